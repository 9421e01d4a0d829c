"""The model against transformers, and against itself: results may not depend on what a request shares a step with."""

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic.config import GroupConfig
from elastic.errors import ElasticError, NeedsReplan
from elastic.placement.maps import HOLE, Placement
from elastic.protocol import Sampling, Submit
from elastic.rank.architecture import Arena, ExpertBuffers, read_architecture
from elastic.rank.buffers import Buffers
from elastic.rank.routing import RouteTable
from elastic.rank.runner import Runner
from elastic.rank.scheduler import Batch, Scheduler
from elastic.tools.make_checkpoint import Options, make_checkpoint
from tests.rank.loopback import LoopbackEp, Rank, ask, load, open_rank, place, step

TOLERANCE = 1e-4
"""Of logits with a deviation of 3, against transformers; differences of up to 2e-5 were seen."""

SMALL = Options(layers=2, experts=8, hidden=32, heads=4, kv_heads=2, head_dim=8, expert_intermediate=16)
VARIANTS = {
    "every layer MoE": Options(),
    "first layer dense": replace(SMALL, layers=3, dense_layers=1),
    "every second layer MoE": replace(SMALL, layers=4, sparse_step=2),
    "tied embeddings": replace(SMALL, tied=True, top_k=4),
    "sizes off the vector width": Options(
        layers=2, experts=5, hidden=44, heads=3, kv_heads=1, head_dim=10, expert_intermediate=20, top_k=3, vocab=301
    ),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=list(VARIANTS.values()), ids=list(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint", request.param)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "small", SMALL)


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(300) for _ in range(length)]


def trace(rank: Rank, *requests: Submit, discard: int = 0) -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
    """Run requests together; tokens and logits [tokens, vocab] by request. Every `discard`-th step is done twice."""
    scheduler = rank.scheduler()
    for request in requests:
        assert scheduler.submit(request) is None
    tokens: dict[str, list[int]] = {r.request: [] for r in requests}
    logits: dict[str, list[torch.Tensor]] = {r.request: [] for r in requests}
    steps = 0
    while scheduler.has_work:
        steps += 1
        if discard and steps % discard == 0:
            lost = scheduler.build()
            rank.runner.run(lost)
            scheduler.discard(lost)
        batch = scheduler.build()
        rank.runner.run(batch)
        rows = rank.runner.logits(batch)
        for emitted, row in zip(scheduler.commit(batch, rank.runner.choose(batch)), rows, strict=True):
            tokens[emitted.request] += emitted.tokens
            logits[emitted.request].append(row)
    return tokens, {name: torch.stack(rows) for name, rows in logits.items()}


def neighbours(count: int) -> list[Submit]:
    sampling = Sampling(temperature=0.8, seed=3)
    return [ask(f"n{i}", prompt(2 + 5 * i, i), 25 - 3 * i, sampling=sampling) for i in range(count)]


# --- against the reference ---------------------------------------------------------------------------------------------


def test_tokens_are_those_of_transformers_and_logits_within_the_tolerance(checkpoint: Path) -> None:
    from transformers import Qwen3MoeForCausalLM

    reference = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    rank = open_rank(checkpoint)
    requests = [ask(str(length), prompt(length), 40) for length in (1, 2, 9, 47)]
    tokens, logits = trace(rank, *requests)
    for request in requests:
        n = request.prompt_len
        ids = torch.tensor([request.tokens])
        greedy = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        assert tokens[request.request] == greedy[0, n:].tolist()
        with torch.no_grad():
            wanted = reference(greedy[:, :-1]).logits[0, n - 1 :]
        torch.testing.assert_close(logits[request.request], wanted, rtol=0, atol=TOLERANCE)


def test_the_random_checkpoint_gives_varied_text(tmp_path: Path) -> None:
    rank = open_rank(make_checkpoint(tmp_path / "c", Options()))
    for length in (1, 8):
        assert len(set(rank.serve(ask("r", prompt(length), 64))["r"])) > 20


# --- independence of the batch -----------------------------------------------------------------------------------------


def test_a_request_gets_the_same_bits_whatever_shares_its_steps(checkpoint: Path) -> None:
    rank = open_rank(checkpoint)
    mine = ask("mine", prompt(11), 30)
    alone = trace(rank, mine)
    for among in (1, 3, 7):
        others = neighbours(among)
        tokens, logits = trace(rank, *others[: among // 2], mine, *others[among // 2 :])
        assert tokens["mine"] == alone[0]["mine"]
        assert torch.equal(logits["mine"], alone[1]["mine"])


def test_a_prompt_gets_the_same_bits_however_it_is_cut_into_chunks(checkpoint: Path) -> None:
    mine = ask("mine", prompt(45), 12)
    wide = trace(open_rank(checkpoint), mine)
    for sizes in ((4,), (4, 8), (5, 13)):
        rank = open_rank(checkpoint, max_tokens=sizes[-1], capture_sizes=sizes)
        tokens, logits = trace(rank, *neighbours(2), mine)
        assert tokens["mine"] == wide[0]["mine"]
        assert torch.equal(logits["mine"], wide[1]["mine"])


def test_where_an_expert_lives_does_not_change_a_bit(checkpoint: Path) -> None:
    experts = read_architecture(checkpoint).experts
    mine = ask("mine", prompt(11), 20)
    wanted = trace(open_rank(checkpoint), mine)[1]["mine"]
    got = trace(open_rank(checkpoint, order=list(reversed(range(experts)))), mine)[1]["mine"]
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.95, seed=11)])
@pytest.mark.parametrize("emitted", [1, 7, 29])
def test_a_replay_from_prompt_and_emitted_tokens_continues_as_if_nothing_happened(
    small: Path, emitted: int, sampling: Sampling
) -> None:
    whole, wanted = trace(open_rank(small), ask("r", prompt(13), 30, sampling=sampling))
    replay = ask("r", prompt(13), 30, answer=whole["r"][:emitted], sampling=sampling)
    tokens, logits = trace(open_rank(small, max_tokens=8, capture_sizes=(4, 8)), *neighbours(3), replay)
    assert tokens["r"] == whole["r"][emitted:]
    assert torch.equal(logits["r"], wanted["r"][emitted:])


# --- steps that do not count -------------------------------------------------------------------------------------------


def test_discarded_steps_change_nothing(small: Path) -> None:
    rank = open_rank(small, max_tokens=8, capture_sizes=(4, 8))
    requests = [*neighbours(3), ask("mine", prompt(20), 20)]
    tokens, logits = trace(rank, *requests)
    again, again_logits = trace(rank, *requests, discard=2)
    assert again == tokens
    assert all(torch.equal(again_logits[name], logits[name]) for name in logits)


class Broken(LoopbackEp):
    """Returns rows of infinity while `broken`: what a step reads from memory that a dying peer left half written."""

    broken = False

    def combine(self, y: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        super().combine(y, topk_idx, topk_weights, out)
        if self.broken:
            out.fill_(float("inf"))


def test_garbage_of_a_discarded_step_never_reaches_a_later_one(small: Path) -> None:
    mine = ask("mine", prompt(10), 15)
    wanted = trace(open_rank(small), mine)
    rank = open_rank(small, backend=Broken)
    assert isinstance(rank.ep, Broken)
    scheduler = rank.scheduler()
    scheduler.submit(ask("other", prompt(30), 9))
    rank.ep.broken = True
    lost = scheduler.build()
    rank.runner.run(lost)
    scheduler.discard(lost)
    rank.ep.broken = False
    scheduler.cancel("other", 0)
    # the same sequence, shorter: the positions beyond hold what the lost step left
    got: list[int] = rank.serve(mine, scheduler=scheduler)["mine"]
    assert got == wanted[0]["mine"]


def test_padding_reaches_no_expert_and_no_sequence(small: Path) -> None:
    rank = open_rank(small)
    scheduler = rank.scheduler()
    scheduler.submit(ask("r", prompt(5), 9))
    step(rank.runner, scheduler)
    cache = rank.buffers["kv"][:, :, : rank.config.max_seqs].clone()
    rank.ep.routed_rows.clear()
    rank.runner.run(Batch())
    assert set(rank.ep.routed_rows) == {0}
    assert torch.equal(rank.buffers["kv"][:, :, : rank.config.max_seqs], cache)
    step(rank.runner, scheduler)
    assert rank.ep.routed_rows[-1] == 1


# --- graphs, placement, order of loading -------------------------------------------------------------------------------


def test_serving_captures_nothing_and_moves_nothing(small: Path) -> None:
    rank = open_rank(small)
    addresses = {name: rank.buffers[name].data_ptr() for name in rank.buffers}
    rank.runner.capture()
    tokens = rank.serve(*neighbours(4))
    experts = rank.arch.experts
    order = tuple(reversed(range(experts)))
    load(small, rank.arch, rank.arena, rank.experts, list(order))
    place(rank.runner, Placement(experts, 1, experts, (order,) * len(rank.arch.moe_layers)))
    assert rank.serve(*neighbours(4)) == tokens
    assert {name: rank.buffers[name].data_ptr() for name in rank.buffers} == addresses
    assert rank.buffers.check() == ()
    graphs = rank.runner.graphs
    assert (graphs.captures, graphs.address_changes) == (4, 0)
    assert graphs.replays >= 40


@pytest.mark.parametrize("name", ["kv", "experts.w13", "experts.w2", "dense", "route.table", "inputs", "logits"])
def test_a_buffer_that_moved_stops_the_rank_instead_of_computing_on_old_memory(small: Path, name: str) -> None:
    rank = open_rank(small)
    buffer = rank.buffers[name]
    buffer.data = buffer.clone()
    with pytest.raises(ElasticError, match=f"moved since the capture: {name}"):
        rank.runner.run(Batch())
    assert rank.runner.graphs.address_changes == 1


def test_a_joiner_captures_before_its_weights_and_map_arrive(small: Path) -> None:
    wanted = open_rank(small).serve(*neighbours(2))
    arch = read_architecture(small)
    config = open_rank(small).config
    arena, experts = Arena(arch.dense_shapes()), ExpertBuffers(arch, arch.experts)
    ep, buffers = LoopbackEp(arch.experts, config.max_tokens, arch.hidden), Buffers()
    runner = Runner(config, arch, arena, experts, ep, buffers)
    with pytest.raises(ElasticError, match="no graph of 4 rows is captured"):
        runner.run(Batch())
    runner.capture()
    assert not buffers["kv"][:, :, : config.max_seqs].any()
    order = list(range(arch.experts))
    load(small, arch, arena, experts, order)
    place(runner, Placement(arch.experts, 1, arch.experts, (tuple(order),) * len(arch.moe_layers)))
    rank = Rank(config, arch, arena, experts, ep, buffers, runner)
    assert rank.serve(*neighbours(2)) == wanted


def test_the_first_capture_of_a_process_does_not_import_the_compiler(small: Path) -> None:
    """It would add seconds to every refill, and its memory to every rank."""
    code = (
        "import sys; from pathlib import Path; from tests.rank.loopback import open_rank; "
        "open_rank(Path(sys.argv[1])); print('torch._dynamo' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(small)], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "False", ran.stderr


def test_more_rows_than_the_largest_graph_are_refused(small: Path) -> None:
    rank = open_rank(small)
    rows = rank.config.max_tokens + 1
    with pytest.raises(ElasticError, match="33 rows exceeds the largest graph"):
        rank.runner.run(Batch((0,) * rows, (0,) * rows, tuple(range(rows))))


def test_scheduler_and_group_configuration_agree_on_the_order_of_sizes(small: Path) -> None:
    config = GroupConfig(
        name="g", run_dir="run", checkpoint=str(small), ranks=1, max_ranks=1, slots_per_rank=8,
        max_tokens=4, max_seqs=2, max_model_len=10,
    )  # fmt: skip
    scheduler = Scheduler(config.max_tokens, config.max_seqs, config.max_model_len)
    for i in range(3):
        scheduler.submit(ask(str(i), prompt(8), 2))
    assert scheduler.build().rows == 4
    assert scheduler.submit(ask("long", prompt(9), 2)) is not None


# --- routing -----------------------------------------------------------------------------------------------------------


def routes_of(rank: int, placement: Placement, live: list[int], rows: int = 6) -> list[list[int]]:
    """Physical slots by [expert][row] of the only layer."""
    table = RouteTable(rank, 1, placement.experts, rows, Buffers())
    table.stage(placement, live)
    table.switch()
    experts = torch.arange(placement.experts).expand(rows, -1)
    return table.physical(0, experts, torch.arange(rows)[:, None]).t().tolist()


def test_rows_prefer_the_own_replica_and_spread_over_the_others() -> None:
    placement = Placement(3, 3, 2, ((0, 1, 2, 1, 1, HOLE),))
    assert routes_of(0, placement, [0, 1, 2]) == [[0] * 6, [1] * 6, [2] * 6]
    placement = Placement(3, 3, 2, ((0, 2, 1, HOLE, 1, HOLE),))
    assert routes_of(0, placement, [0, 1, 2])[1] == [2, 4, 2, 4, 2, 4]
    assert routes_of(0, placement, [0, 2])[1] == [4] * 6
    placement = Placement(2, 4, 1, ((0, 0, 1, HOLE),))
    assert routes_of(3, placement, [0, 1, 2, 3])[0] == [1, 0, 1, 0, 1, 0]


def test_a_map_that_leaves_an_expert_without_a_live_copy_is_refused_and_changes_nothing() -> None:
    table = RouteTable(0, 1, 2, 4, Buffers())
    table.stage(Placement(2, 2, 2, ((0, 1, 0, HOLE),)), [0, 1])
    table.switch()
    rows, experts = torch.arange(5)[:, None], torch.tensor([[0, 1]]).expand(5, -1)
    before = table.physical(0, experts, rows)
    assert before[4].tolist() == [HOLE, HOLE]
    with pytest.raises(NeedsReplan, match=r"1 experts have no copy on slots \[1\], the first is expert 1"):
        table.stage(Placement(2, 2, 2, ((0, 1, 0, HOLE),)), [1])
    with pytest.raises(NeedsReplan, match="1 layers of 3 experts, this rank has 1 of 2"):
        table.stage(Placement(3, 2, 2, ((0, 1, 2, HOLE),)), [0, 1])
    table.switch()
    assert torch.equal(table.physical(0, experts, rows), before)
