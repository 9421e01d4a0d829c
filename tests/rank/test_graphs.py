import gc
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from elastic.errors import ElasticError
from elastic.rank.buffers import AddressMoved, Buffers
from elastic.rank.graphs import CpuStepGraph, Nodes, StepGraphs


class Got(NamedTuple):
    rows: torch.Tensor


class World:
    """A small step: output = (input + weight) through an external call, all in registered buffers."""

    def __init__(self) -> None:
        self.buffers = Buffers()
        self.input = self.buffers.add("input", torch.zeros(8, 3))
        self.weight = self.buffers.add("weight", torch.ones(3))
        self.output = self.buffers.add("output", torch.zeros(8, 3))
        self.received = self.buffers.add("received", torch.zeros(8, 3))
        self.unused = self.buffers.add("unused", torch.zeros(2))
        self.runs = 0

    def exchange(self, x: torch.Tensor) -> Got:
        self.received[: len(x)].copy_(x)
        return Got(self.received)

    def step(self, rows: int, nodes: Nodes) -> None:
        self.runs += 1
        sent = self.input[:rows] + self.weight
        got = nodes.external(self.exchange, sent)
        self.output[:rows] = got.rows[:rows] * 2

    def graphs(self, *sizes: int) -> StepGraphs:
        return StepGraphs(sizes, lambda rows: CpuStepGraph(rows, self.step, self.buffers))


def move(tensor: torch.Tensor) -> None:
    """The same tensor object in other memory."""
    tensor.data = tensor.clone()


def test_a_replay_reads_and_writes_the_buffers_in_place() -> None:
    world = World()
    graphs = world.graphs(4, 8)
    graphs.capture()
    world.input.fill_(2.0)
    world.weight.fill_(3.0)
    graphs.replay(4)
    assert world.output[:4].eq(10).all()
    assert not world.output[4:].eq(10).any()
    assert (graphs.captures, graphs.replays, graphs.address_changes) == (2, 1, 0)


def test_a_second_capture_captures_nothing() -> None:
    graphs = World().graphs(4, 8)
    assert not graphs.complete
    graphs.capture()
    graphs.capture()
    assert graphs.complete
    assert graphs.captures == 2


class Garbage:
    """Of an earlier model: a cycle, freed whenever Python looks for such."""

    def __init__(self, freed: list[str]) -> None:
        self.freed, self.itself = freed, self

    def __del__(self) -> None:
        self.freed.append("freed")


def test_nothing_is_freed_while_graphs_are_captured_but_all_of_it_before() -> None:
    world, freed, at_begin = World(), list[str](), list[int]()

    def step(rows: int, nodes: Nodes) -> None:
        at_begin.append(len(freed))
        Garbage(freed)
        for _ in range(3 * sum(gc.get_threshold())):
            cycle: list[object] = []
            cycle.append(cycle)
        world.step(rows, nodes)

    Garbage(freed)
    StepGraphs((4, 8), lambda rows: CpuStepGraph(rows, step, world.buffers)).capture()
    assert len(at_begin) == 4
    assert set(at_begin) == {1}
    assert gc.isenabled()
    gc.collect()
    assert len(freed) == 5


@pytest.mark.parametrize("name", ["input", "weight", "output", "received"])
def test_a_moved_buffer_stops_the_replay_before_it_runs(name: str) -> None:
    world = World()
    graphs = world.graphs(4)
    graphs.capture()
    runs = world.runs
    move(world.buffers[name])
    with pytest.raises(AddressMoved, match=f"moved since the capture: {name}"):
        graphs.replay(4)
    assert world.runs == runs
    assert (graphs.replays, graphs.address_changes) == (0, 1)
    assert world.buffers.check() == (name,)


def test_a_moved_buffer_that_the_step_does_not_use_is_seen_by_the_registry_only() -> None:
    world = World()
    graphs = world.graphs(4)
    graphs.capture()
    move(world.unused)
    graphs.replay(4)
    assert world.buffers.check() == ("unused",)


def test_an_external_call_that_returns_other_memory_is_refused() -> None:
    world = World()
    graphs = world.graphs(4)
    graphs.capture()
    world.received = world.received.clone()
    with pytest.raises(AddressMoved, match="exchange returned tensors at other addresses"):
        graphs.replay(4)
    assert graphs.address_changes == 1


STRANGER = torch.ones(3)
BUFFER = torch.ones(4, 3)


@pytest.mark.parametrize(
    "step",
    [
        lambda rows, nodes: BUFFER.add_(STRANGER),
        lambda rows, nodes: BUFFER.copy_(torch.tensor([1.0, 2.0, 3.0])),
        lambda rows, nodes: torch.mul(BUFFER[0], 2, out=STRANGER),
        lambda rows, nodes: nodes.external(lambda x: None, STRANGER),
        lambda rows, nodes: nodes.external(lambda: Got(STRANGER)),
    ],
    ids=["reads", "from python numbers", "writes", "gives to a call", "gets from a call"],
)
def test_a_step_that_touches_an_unregistered_tensor_cannot_be_captured(step: Callable[[int, Nodes], None]) -> None:
    buffers = Buffers()
    buffers.add("buffer", BUFFER)
    graphs = StepGraphs([4], lambda rows: CpuStepGraph(rows, step, buffers))
    with pytest.raises(ElasticError, match="not registered buffers"):
        graphs.capture()
    assert graphs.captures == 0
    with pytest.raises(ElasticError, match="no graph of 4 rows is captured"):
        graphs.replay(4)


def test_a_step_that_looks_at_a_value_on_the_host_cannot_be_captured() -> None:
    buffers = Buffers()
    flag = buffers.add("flag", torch.zeros(1))

    def step(rows: int, nodes: Nodes) -> None:
        if flag.item() > 0:
            flag.zero_()

    with pytest.raises(ElasticError, match="reads a value on the host"):
        CpuStepGraph(4, step, buffers).capture()


def test_the_largest_count_may_be_read() -> None:
    buffers = Buffers()
    counts = buffers.add("counts", torch.tensor([1, 3, 2], dtype=torch.int32))
    seen: list[int] = []
    graph = CpuStepGraph(4, lambda rows, nodes: seen.append(nodes.largest(counts)), buffers)
    graph.capture()
    counts[0] = 9
    graph.replay()
    assert seen == [3, 3, 9]
    assert graph.touched == ("counts",)


def test_a_buffer_is_never_replaced_under_its_name() -> None:
    world = World()
    assert world.buffers.add("weight", world.weight) is world.weight
    with pytest.raises(AddressMoved, match="buffer weight: registered at"):
        world.buffers.add("weight", torch.ones(3))
    assert world.buffers["weight"] is world.weight
    assert world.buffers.check() == ()


def test_a_buffer_that_changed_its_shape_counts_as_moved() -> None:
    world = World()
    world.weight.resize_(2)
    assert world.buffers.check() == ("weight",)


def test_the_smallest_graph_that_holds_the_rows_is_used() -> None:
    graphs = World().graphs(8, 4)
    assert [graphs.fit(n) for n in (0, 1, 4, 5, 8)] == [4, 4, 4, 8, 8]
    with pytest.raises(ElasticError, match="9 rows exceeds the largest graph, 8 rows"):
        graphs.fit(9)
