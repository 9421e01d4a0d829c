"""The solver, against random systems, holes and losses: what a plan promises to whoever carries it out."""

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import ElasticError, Infeasible
from elastic.placement.maps import HOLE
from elastic.placement.problem import Floats, Goals, Ints, Problem, System, mean_load, problem
from elastic.placement.report import evaluate, report
from elastic.placement.schedule import schedule
from elastic.placement.solution import Kind, Solution
from elastic.placement.solver import cover, solve, warm_up
from elastic.placement.validate import check_rows

FEW = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warm_up()


@dataclass(frozen=True)
class Asked:
    """The parts of a question, feasible or not."""

    system: System
    load: Floats
    current: Ints
    present: tuple[int, ...]
    live: tuple[int, ...]
    goals: Goals

    def problem(self) -> Problem:
        return problem(
            self.system, self.load, live=self.live, current=self.current, present=self.present, goals=self.goals
        )


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    """Ranks of different sizes on several hosts, any map with holes and duplicates, any set of live and lost ranks."""
    ranks = draw(st.integers(1, 7))
    slots = tuple(draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks)))
    per_host, per_domain = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    system = System(slots, tuple(r // per_host for r in range(ranks)), tuple(r // per_domain for r in range(ranks)))
    live = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    present = draw(st.sets(st.integers(0, ranks - 1)))
    experts, layers = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    current = rng.integers(-1, experts, size=(layers, sum(slots)), dtype=np.int32)
    load = rng.lognormal(0, draw(st.sampled_from([0.0, 1.0, 3.0])), size=(layers, experts))
    load *= rng.random((layers, experts)) < draw(st.sampled_from([0.0, 0.7, 1.0]))
    goals = Goals(
        tolerance=draw(st.sampled_from([0.0, 0.01, 0.2])),
        balance_moves=draw(st.none() | st.integers(0, 4)),
        protect_moves=draw(st.integers(0, 3)),
        replicas=draw(st.none() | st.integers(0, 20)),
    )
    return Asked(system, load, current, tuple(sorted(present)), tuple(sorted(live)), goals)


def solved(question: Asked) -> Solution | None:
    """The solution, or None where the refusal is right and says the numbers."""
    room = sum(min(question.system.slots[r], question.load.shape[1]) for r in question.live)
    if room >= question.load.shape[1]:
        return solve(question.problem())
    with pytest.raises(Infeasible, match=f"hold {room} of {question.load.shape[1]} experts"):
        question.problem()
    return None


def readable(question: Asked) -> Ints:
    """What can be read before the first move: the slots of all ranks that are present, also of those that leave."""
    return np.where(np.isin(question.system.owner, question.present), question.current, np.int32(HOLE))


def carry_out(question: Asked, solution: Solution, order: list[int]) -> Ints:
    """The buffers after the steps in `order`; every move must find at its source what it promises."""
    rows = readable(question)
    for i in order:
        _, layer, p, expert, q, other = solution.steps[i].tolist()
        for arriving, source in ((expert, solution.sources[i, 0]), (other, solution.sources[i, 1])):
            if arriving != HOLE and source != HOLE:
                assert rows[layer, source] == arriving, f"step {i} reads slot {source} too late or too early"
        rows[layer, p] = expert
        if q != HOLE:
            rows[layer, q] = other
    return rows


def serving(question: Asked, solution: Solution, buffers: Ints) -> Ints:
    """What of the buffers the new map uses."""
    return np.where(solution.target == HOLE, np.int32(HOLE), buffers)


@FEW
@given(asked())
def test_every_plan_is_valid_at_its_end_and_at_every_stop_after_coverage(question: Asked) -> None:
    solution = solved(question)
    if solution is None:
        return
    for count in range(solution.coverage, len(solution) + 1):
        check_rows(solution.map_at(count), question.system.slots, question.load.shape[1], live=question.live)
    used = solution.target[:, ~np.isin(question.system.owner, question.live)]
    assert (used == HOLE).all(), "a slot outside the view holds experts"


@FEW
@given(asked())
def test_making_the_steps_in_order_gives_the_target(question: Asked) -> None:
    solution = solved(question)
    if solution is not None:
        buffers = carry_out(question, solution, list(range(len(solution))))
        assert (serving(question, solution, buffers) == solution.target).all()


@FEW
@given(asked(), st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_batches_in_order_give_the_target_whatever_the_order_inside(question: Asked, seed: int, most: int) -> None:
    solution = solved(question)
    if solution is None:
        return
    plan, rng = schedule(solution, rank_experts=most, host_experts=most), random.Random(seed)
    order: list[int] = []
    for batch in range(plan.count):
        steps = plan.steps_of(batch)
        sends, receives = Counter[int](), Counter[int]()
        for i in steps:
            for p, source in (
                (solution.steps[i, 2], solution.sources[i, 0]),
                (solution.steps[i, 4], solution.sources[i, 1]),
            ):
                if p != HOLE:
                    receives[int(question.system.owner[p])] += 1
                if p != HOLE and source != HOLE:
                    sends[int(question.system.owner[source])] += 1
        assert max([*sends.values(), *receives.values()]) <= most, "a hot link"
        rng.shuffle(steps)
        order += steps
    assert sorted(order) == list(range(len(solution)))
    buffers = carry_out(question, solution, order)
    assert (serving(question, solution, buffers) == solution.target).all()


@FEW
@given(asked(), st.integers(0, 2**32 - 1))
def test_any_order_that_keeps_steps_with_a_common_expert_gives_the_target(question: Asked, seed: int) -> None:
    solution = solved(question)
    if solution is None:
        return
    rows, before = solution.start.copy(), dict[tuple[int, int], int]()
    needs: list[set[int]] = []
    for i, (_, layer, p, expert, q, other) in enumerate(solution.steps.tolist()):
        named = {expert, int(rows[layer, p])} | ({other, int(rows[layer, q])} if q != HOLE else set())
        needs.append({before[layer, e] for e in named - {HOLE} if (layer, e) in before})
        before |= {(layer, e): i for e in named}
        rows[layer, p] = expert
        if q != HOLE:
            rows[layer, q] = other
    rng, order, left = random.Random(seed), [], set(range(len(solution)))
    while left:
        ready = sorted(i for i in left if not needs[i] & left)
        covering = [i for i in ready if i < solution.coverage]
        order.append(rng.choice(covering or ready))
        left.remove(order[-1])
    assert (serving(question, solution, carry_out(question, solution, order)) == solution.target).all()


@FEW
@given(asked())
def test_the_same_question_always_gets_the_same_plan(question: Asked) -> None:
    first, second = solved(question), solved(question)
    if first is not None and second is not None:
        assert (first.steps == second.steps).all()
        assert (first.sources == second.sources).all()


@FEW
@given(asked())
def test_coverage_can_begin_before_the_rest_is_planned(question: Asked) -> None:
    solution = solved(question)
    if solution is None or not question.present:
        return
    first = cover(question.problem())
    assert (first.steps == solution.steps[: solution.coverage]).all()
    orphans = len(solution.start) * question.load.shape[1]
    for row in solution.start:
        orphans -= len(set(row.tolist()) - {HOLE})
    assert first.moved == orphans, "coverage moves more than the orphans"


@FEW
@given(asked())
def test_no_move_reads_a_lost_rank_or_ignores_a_live_copy(question: Asked) -> None:
    solution = solved(question)
    if solution is None:
        return
    holding = readable(question)
    for move in solution.moves():
        assert move.slot in question.live
        if move.source_slot == HOLE:
            assert move.expert not in holding[move.layer], "a live copy was ignored"
        else:
            assert move.source_slot in question.present or move.source_slot in question.live


@FEW
@given(asked())
def test_a_limit_on_moves_is_kept_and_balance_never_gets_worse(question: Asked) -> None:
    solution = solved(question)
    if solution is None or question.goals.balance_moves is None:
        return
    for layer in range(len(question.load)):
        steps = solution.steps[(solution.steps[:, 1] == layer) & (solution.steps[:, 0] == Kind.BALANCE)]
        assert len(steps) + int((steps[:, 4] != HOLE).sum()) <= question.goals.balance_moves


@FEW
@given(asked())
def test_the_report_of_any_plan_adds_up(question: Asked) -> None:
    solution = solved(question)
    if solution is None:
        return
    told = report(solution)
    assert told.total.moved == solution.moved == len(solution.moves())
    assert told.total.moved_bytes == told.total.domain_bytes + told.total.network_bytes + told.total.unread_bytes
    assert told.coverage.moved == solution.coverage
    assert (told.evaluation.balancedness <= 1 + 1e-9).all()


def lognormal(layers: int = 6, experts: int = 64, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).lognormal(0, 1, size=(layers, experts))


def lose(system: System, load: Floats, rows: Ints, lost: set[int], goals: Goals | None = None) -> Solution:
    live = [r for r in range(system.ranks) if r not in lost]
    return solve(problem(system, load, live=live, current=rows, present=live, goals=goals))


def test_with_two_slots_for_every_expert_any_lost_rank_leaves_hardly_an_orphan_and_the_balance_is_as_good() -> None:
    system, load = System.uniform(16, 16), lognormal(experts=128)
    placed = solve(problem(system, load, live=range(16)))
    found = evaluate(system, load, placed.target, range(16))
    assert found.rank.expected <= 0.1
    assert found.worst > 0.99


def test_second_copies_are_on_another_host_so_that_a_lost_host_leaves_few_orphans() -> None:
    system, load = System.uniform(16, 16, ranks_per_host=4), lognormal(experts=128)
    found = evaluate(system, load, solve(problem(system, load, live=range(16))).target, range(16))
    assert found.host is not None
    # by chance a pair of ranks shares a host one time in five: 26 experts, 6 of them on each host
    assert found.host.expected <= 1.5


def test_losing_a_rank_moves_a_fraction_of_what_a_new_plan_moves() -> None:
    system, load = System.uniform(16, 5), lognormal()
    placed = solve(problem(system, load, live=range(16))).target
    after = lose(system, load, placed, {3})
    orphans = after.coverage / len(load)
    assert orphans <= 5
    assert after.moved / len(load) < 0.35 * 75
    assert evaluate(system, load, after.target, after.problem.live).worst > 0.95


def test_a_balanced_group_is_left_alone() -> None:
    system, load = System.uniform(8, 10), lognormal()
    placed = solve(problem(system, load, live=range(8))).target
    assert len(solve(problem(system, load, live=range(8), current=placed))) == 0


def test_a_small_imbalance_is_not_worth_the_bytes() -> None:
    system, load = System.uniform(8, 10), lognormal()
    placed = solve(problem(system, load, live=range(8))).target
    drifted = load * np.random.default_rng(1).lognormal(0, 0.3, size=load.shape)
    lazy = solve(problem(system, drifted, live=range(8), current=placed, goals=Goals(worth=10.0)))
    assert len(lazy) == 0
    eager = solve(problem(system, drifted, live=range(8), current=placed))
    assert len(eager) > 0
    assert eager.busiest_after[-1] < 1.03


def test_ranks_of_two_slots_are_balanced_again_after_a_loss_for_few_moves() -> None:
    """A rank is its two experts: one copy too few of a heavy one, and no exchange helps."""
    system, load = System.uniform(72, 2), lognormal(layers=8, experts=128)
    placed = solve(problem(system, load, live=range(72))).target
    after = lose(system, load, placed, {5})
    anew = solve(problem(system, load, live=after.problem.live))
    reached = evaluate(system, load, after.target, after.problem.live).balancedness
    possible = evaluate(system, load, anew.target, after.problem.live).balancedness
    assert (reached >= 0.985 * possible).all()
    assert after.moved / len(load) < 0.25 * 142


@FEW
@given(asked())
def test_balance_never_brings_an_expert_to_a_rank_that_it_leaves_again(question: Asked) -> None:
    solution = solved(question)
    if solution is None:
        return
    system = question.system
    for layer in range(len(question.load)):
        steps = solution.steps[(solution.steps[:, 1] == layer) & (solution.steps[:, 0] == Kind.BALANCE)]
        before = solution.map_at(solution.coverage)[layer]
        new = sum(
            len(set(solution.target[layer][span].tolist()) - set(before[span].tolist()) - {HOLE})
            for span in (slice(system.first[r], system.first[r + 1]) for r in range(system.ranks))
        )
        # a cycle of exchanges moves one of its experts more than once, and no other
        assert len(steps) + int((steps[:, 4] != HOLE).sum()) <= 2 * new


def test_a_hole_that_brings_no_balance_costs_no_move_unless_it_is_wanted() -> None:
    system = System.uniform(4, 6)
    load = np.ones((2, 16))
    # rank by rank four experts, one of them twice: the second copy is useless
    rows = np.array([[*range(4 * r, 4 * r + 4), 4 * r, 4 * r] for r in range(4)]).reshape(1, -1).repeat(2, axis=0)
    assert len(solve(problem(system, load, live=range(4), current=rows))) == 0
    filled = solve(problem(system, load, live=range(4), current=rows, goals=Goals(fill_holes=True)))
    assert filled.moved == 2 * 8
    assert (filled.target != HOLE).all()


def test_growth_fills_the_new_ranks_and_moves_little_else() -> None:
    old, new = System.uniform(8, 9), System.uniform(12, 9)
    load = lognormal()
    rows = np.full((len(load), 108), HOLE, dtype=np.int32)
    rows[:, :72] = solve(problem(old, load, live=range(8))).target
    grown = solve(problem(new, load, live=range(12), current=rows, present=range(8)))
    assert grown.moved / len(load) <= 1.25 * 36
    assert evaluate(new, load, grown.target, range(12)).worst > 0.97
    assert (grown.target != HOLE).all()


def test_a_leaving_rank_hands_over_its_sole_copies_before_it_goes() -> None:
    system, load = System.uniform(4, 22), lognormal()
    placed = solve(problem(system, load, live=range(4))).target
    leaving = cover(problem(system, load, live=[0, 1, 3], current=placed, present=range(4)))
    assert leaving.moves()
    assert all(move.source_slot == 2 for move in leaving.moves())


def test_a_refilled_slot_takes_nothing_from_its_dead_predecessor() -> None:
    system, load = System.uniform(4, 22), lognormal()
    placed = solve(problem(system, load, live=range(4))).target
    covered = lose(system, load, placed, {2}).target
    stale = np.where(system.owner == 2, placed, covered)
    back = solve(problem(system, load, live=range(4), current=stale, present=[0, 1, 3]))
    assert (back.start[:, system.owner == 2] == HOLE).all()
    assert all(move.source_slot in (0, 1, 3) for move in back.moves() if move.slot == 2)
    assert (back.target[:, system.owner == 2] != HOLE).all()


def test_orphans_are_loaded_by_all_survivors_alike() -> None:
    system = System.uniform(8, 20)
    load = lognormal(layers=16)
    placed = solve(problem(system, load, live=range(8), goals=Goals(replicas=64))).target
    after = lose(system, load, placed, {0}, Goals(replicas=64))
    received = Counter(move.slot for move in after.moves(0, after.coverage))
    assert max(received.values()) <= -(-after.coverage // 7) + 1


def test_copies_come_from_the_same_domain_where_they_can() -> None:
    system = System.uniform(8, 16, ranks_per_host=4)
    load = lognormal(layers=4)
    placed = solve(problem(system, load, live=range(8))).target
    after = lose(system, load * np.random.default_rng(3).lognormal(0, 1, load.shape), placed, set())
    told = report(after)
    assert told.total.domain_bytes > told.total.network_bytes


def test_protection_trades_third_copies_for_second_ones_and_leaves_the_balance() -> None:
    system, load = System.uniform(8, 12), lognormal(layers=4)
    # every spare slot holds a third copy of one of the first experts
    rows = np.array([[r * 8 + i for i in range(8)] + [(r * 8 + 8 + i) % 16 for i in range(4)] for r in range(8)])
    start = np.tile(rows.reshape(-1), (4, 1))
    goals = Goals(protect_moves=16)
    before = evaluate(system, load, solve(problem(system, load, live=range(8), current=start)).target, range(8))
    after = evaluate(
        system, load, solve(problem(system, load, live=range(8), current=start, goals=goals)).target, range(8)
    )
    assert after.rank.expected < before.rank.expected
    assert after.worst > 0.98 * before.worst


def test_a_map_with_an_expert_twice_on_a_rank_is_repaired_and_said_so() -> None:
    system = System.uniform(2, 3)
    solution = solve(problem(system, [[1.0, 1.0, 1.0, 1.0]], live=[0, 1], current=[[0, 0, 1, 2, 3, 0]]))
    check_rows(solution.target, system.slots, 4, live=[0, 1])
    assert any("1 slots held an expert twice" in said for said in report(solution).shortfalls)


def test_ranks_of_different_sizes_are_all_used() -> None:
    system = System((2, 6, 4), (0, 0, 1), (0, 0, 1))
    load = lognormal(layers=3, experts=8)
    placed = solve(problem(system, load, live=range(3))).target
    check_rows(placed, system.slots, 8, live=range(3))
    assert (placed != HOLE).all()


def test_what_cannot_be_done_is_said_with_the_numbers() -> None:
    system = System.uniform(4, 2)
    load = np.array([[100.0, 1, 1, 1, 1, 1]])
    told = report(solve(problem(system, load, live=range(4))))
    assert any(said.startswith("faults:") and "one copy" in said for said in told.shortfalls)
    with pytest.raises(Infeasible, match=r"2 live ranks with 4 slots can hold 4 of 6 experts; 2 more slots are needed"):
        problem(system, load, live=[0, 1])
    with pytest.raises(Infeasible, match=r"live ranks \[4\] are outside the system of 4 ranks"):
        problem(system, load, live=[0, 4])


def test_lost_copies_without_a_host_tier_are_said_to_come_from_disk() -> None:
    system = System.uniform(3, 4)
    load = lognormal(layers=1, experts=8)
    placed = solve(problem(system, load, live=range(3))).target
    after = solve(problem(system, load, live=[0, 1], current=placed, present=[0, 1], host_tier=False))
    assert any("come from disk" in said for said in report(after).shortfalls)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ([1.0, 2.0], "expected [layers, experts]"),
        ([[1.0, -2.0]], "layer 0 expert 1: -2.0 is no load"),
        ([[1.0, float("nan")]], "layer 0 expert 1: nan is no load"),
    ],
)
def test_a_load_that_is_none_is_refused(load: list[float], said: str) -> None:
    with pytest.raises(ElasticError) as refused:
        problem(System.uniform(2, 2), load, live=[0, 1])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[0, 1, 2]], "shape (1, 3), expected [layers, 4] for 2 ranks"),
        ([[0, 1, 2, 9]], "layer 0 rank 1 slot 1: expert 9 is outside 0..3"),
        ([[0, 1, 2, 2]], "layer 0 rank 1 slot 1: a second replica of expert 2 on one rank"),
        ([[0, 1, 2, HOLE]], "layer 0: no copy of experts 3 (1 of 4) on the live ranks"),
        ([[0.0, 1.0, 2.0, 3.0]], "expected whole numbers"),
    ],
)
def test_a_foreign_map_that_could_not_serve_is_refused_with_the_place(rows: list[list[int]], said: str) -> None:
    with pytest.raises(ElasticError) as refused:
        check_rows(rows, (2, 2), 4, live=[0, 1])
    assert said in str(refused.value)


def test_recent_samples_of_a_window_count_more() -> None:
    window = np.array([[[4.0, 0.0]], [[0.0, 4.0]]])
    assert mean_load(window).tolist() == [[2.0, 2.0]]
    weighed = mean_load(window, half_life=1.0)
    assert weighed[0, 1] == pytest.approx(2 * weighed[0, 0])
