"""Cases over several of vLLM's own engine loops in one process. Run by test_inplace_loops.py with vLLM's interpreter; the name of a
case is printed when it has passed."""

# mypy: disable-error-code="import-not-found, import-untyped"
import itertools
import json
import os
import sys
import threading
import time

from elastic.vllm.records import Phase, Refusal, Requests
from elastic.vllm.worker.release import Listener
from tests.vllm.inplace_loop_group import Group


def deaths_under_load_cost_the_others_nothing() -> None:
    group = Group(4)
    asked = {slot: [group.ask(slot, 150), group.ask(slot, 150)] for slot in range(4)}
    group.begun(*itertools.chain(*asked.values()))
    for victim, left in ((1, [0, 2, 3]), (0, [2, 3]), (3, [2])):
        group.kill(victim)
        results = group.order(left)
        group.serves(results)
        assert {group.info(slot).live for slot in left} == {tuple(left)}
        group.begun(*(group.ask(slot, 5) for slot in left))
    group.right(*asked[2])
    assert sum(result.held.kept for result in results.values()) > 0
    group.idle()
    group.right(group.ask(2, 10))


def an_idle_group_is_parked_by_the_order_and_wakes_afterwards() -> None:
    group = Group(3)
    group.right(*(group.ask(slot, 4) for slot in range(3)))
    group.idle()
    group.kill(0)
    group.serves(group.order([1, 2]))
    for slot in (2, 1, 2, 1):
        group.right(group.ask(slot, 6))
        group.idle()


def a_coordinator_that_was_started_again_calls_whoever_is_idle() -> None:
    """The one before it died with what it was told: the engine that has a request waits for the others."""
    group = Group(3)
    group.right(*(group.ask(slot, 4) for slot in range(3)))
    group.idle()
    group.coordinator_away = True
    name, tokens = group.ask(2, 30)
    time.sleep(0.5)
    assert name not in group.ended
    group.coordinator_away = False
    group.call_all()
    group.right((name, tokens))
    group.idle()
    # nobody has work, and a call costs one wave
    group.call_all()
    group.idle()
    group.right(*(group.ask(slot, 6) for slot in range(3)))
    group.idle()
    group.until(lambda: len({engine.current_wave for engine in group.engines.values()}) == 1, "all at one wave")


def all_live_slots_are_a_retry_that_keeps_requests() -> None:
    group = Group(3)
    asked = [group.ask(slot, 200) for slot in range(3)]
    group.begun(*asked)
    results = group.order([0, 1, 2])
    group.serves(results)
    assert sum(result.held.kept for result in results.values()) == 3
    group.right(*asked)


def recompute_and_abort_do_what_they_say() -> None:
    group = Group(2)
    asked = [group.ask(slot, 100) for slot in range(2)]
    group.begun(*asked)
    results = group.order([0, 1], requests=Requests.RECOMPUTE)
    assert sum(result.held.recomputed for result in results.values()) == 2
    group.right(*asked)
    asked = [group.ask(slot, 100) for slot in range(2)]
    group.begun(*asked)
    results = group.order([0, 1], requests=Requests.ABORT)
    assert sum(result.held.aborted for result in results.values()) == 2
    for name, _ in asked:
        group.until(lambda name=name: name in group.ended, "aborted")
        assert str(group.ended[name]) == "abort"
    group.right(group.ask(0, 5), group.ask(1, 5))


def partial_repeated_stale_and_conflicting_orders_do_no_harm() -> None:
    group = Group(3)
    asked = [group.ask(slot, 400) for slot in range(3)]
    group.begun(*asked)
    alone = group.order([0], [0, 1, 2], timeout_s=0.7)[0]
    assert (alone.serves, alone.phase) == (False, Phase.MEET), alone
    assert "did not come" in alone.detail
    first = group.order([0, 1, 2])
    group.serves(first)
    assert group.order([0, 1, 2], epoch=group.epoch) == first
    stale = group.order([1], [0, 1, 2], epoch=group.epoch - 1)[1]
    assert (stale.serves, stale.refused) == (False, Refusal.STALE)
    assert group.order([2], [0, 2], epoch=group.epoch)[2].refused == Refusal.CONFLICT
    assert group.order([2], [0, 1])[2].refused == Refusal.NOT_MEMBER
    wrong = group.result(0, group.send(0, "healer_shrink", {"epoch": "x"}))
    assert wrong["success"] is False
    group.right(*asked)


def a_step_that_waits_for_a_live_rank_that_never_began_it_is_freed() -> None:
    group, freed = Group(3), threading.Event()

    def heard(epoch: int, gone: list[int]) -> None:
        if 2 in gone:
            freed.set()

    asked = [group.ask(slot, 400) for slot in (1, 2)]
    group.begun(*asked)
    listener = Listener(os.getpid(), 0, heard)
    try:
        worker = group.engines[1].model_executor
        worker.freed = freed
        assert worker.stands.wait(10.0)
        group.kill(0)
        group.serves(group.order([1, 2]))
    finally:
        listener.close()
    assert freed.is_set()
    group.right(*asked)


def a_newer_order_ends_the_one_that_waits() -> None:
    group = Group(3)
    asked = [group.ask(slot, 150) for slot in (0, 1)]
    group.begun(*asked)
    group.epoch += 1
    params = {"epoch": group.epoch, "survivors": [0, 1, 2], "store_host": "127.0.0.1", "store_port": group.store.port}
    first = group.send(0, "healer_shrink", {**params, "timeout_s": 20.0})
    group.until(lambda: group.info(0).phase == Phase.MEET, "it waits")
    group.kill(2)
    began = time.monotonic()
    group.serves(group.order([0, 1]))
    assert time.monotonic() - began < 10
    assert "newer" in group.result(0, first)["reason"]
    group.right(*asked)


def one_vote_of_no_and_nobody_serves() -> None:
    group = Group(3)
    asked = [group.ask(0, 150)]
    group.begun(*asked)
    group.engines[2].model_executor.fails = "a sticky error"
    group.kill(1)
    results = group.order([0, 2], timeout_s=3.0)
    assert {slot: result.serves for slot, result in results.items()} == {0: False, 2: False}
    assert (results[0].phase, results[2].phase) == (Phase.VOTE, Phase.WORKERS)
    assert "slot 2: worker 0: a sticky error" in results[0].detail
    group.kill(2)
    group.serves(group.order([0]))
    group.right(*asked)


def a_second_death_during_the_shrink() -> None:
    group = Group(3)
    asked = [group.ask(0, 150)]
    group.begun(*asked)
    group.kill(1)
    group.epoch += 1
    params = {"epoch": group.epoch, "survivors": [0, 2], "store_host": "127.0.0.1", "store_port": group.store.port}
    call = group.send(0, "healer_shrink", {**params, "timeout_s": 1.5})
    group.kill(2)
    assert group.result(0, call)["success"] is False
    group.serves(group.order([0]))
    group.right(*asked)


def stock_retry_is_refused_after_an_order() -> None:
    group = Group(2)
    group.serves(group.order([0, 1]))
    answer = group.result(0, group.send(0, "retry", {}))
    assert answer["success"] is False
    assert "rebuilt" in answer["reason"]
    group.kill(1)
    group.serves(group.order([0]))
    assert "empty" in group.result(0, group.send(0, "retry", {}))["reason"]


def any_slot_is_filled_again_while_the_others_serve() -> None:
    group = Group(3)
    for victim in (1, 0, 2):
        left = [slot for slot in range(3) if slot != victim]
        asked = [group.ask(slot, 200) for slot in left]
        group.begun(*asked)
        group.kill(victim)
        group.serves(group.order(left))
        order = group.prepare(left, victim)
        group.enter(order, group.join(order))
        group.commit(order)
        assert {group.info(slot).live for slot in range(3)} == {(0, 1, 2)}
        group.right(*asked)
        group.idle()
        for slot in (victim, *left):
            group.right(group.ask(slot, 6))
            group.idle()


def two_holes_are_filled_one_after_the_other() -> None:
    group = Group(4)
    group.kill(0)
    group.kill(2)
    group.serves(group.order([1, 3]))
    for joiner, live in ((2, [1, 3]), (0, [1, 2, 3])):
        order = group.prepare(live, joiner)
        group.enter(order, group.join(order))
        group.commit(order)
        group.right(*(group.ask(slot, 6) for slot in (*live, joiner)))
    assert group.info(3).live == (0, 1, 2, 3)


def a_preparation_that_is_aborted_or_fails_leaves_the_engines_serving() -> None:
    group = Group(2)
    group.kill(1)
    group.serves(group.order([0]))
    asked = group.ask(0, 300)
    group.begun(asked)
    group.prepare([0], 1)
    busy = group.all([0], "healer_refill_prepare", prepare_again(group))[0]
    assert (busy["ok"], busy["refused"]) == (False, Refusal.WRONG_STATE)
    assert group.all([0], "healer_refill_abort", group.epoch)[0]["detail"] == "prepare"
    group.prepare([0], 1, timeout_s=0.5)  # the joiner never comes
    group.until(lambda: bool(group.info(0).refill_error), "it is dropped")
    refused = group.all([0], "healer_refill_commit", group.epoch)[0]
    assert "did not come" in refused["detail"]
    order = group.prepare([0], 1)
    late = group.all([0], "healer_refill_abort", group.epoch - 1)[0]
    assert (late["ok"], late["refused"]) == (False, Refusal.STALE)
    group.enter(order, group.join(order))
    group.commit(order)
    group.right(asked, group.ask(1, 6))


def prepare_again(group: Group) -> dict[str, object]:
    boot = {"size": group.size, "host": "127.0.0.1", "port": 1, "ports": [2], "store_port": 3}
    given = {"epoch": group.epoch + 1, "live": [0], "joiners": [1], "source": 0, "timeout_s": 1.0}
    group.epoch += 1
    return given | {"bootstrap": boot}


def a_joiner_that_dies_when_ready_is_shrunk_away_with_nothing_lost() -> None:
    group = Group(3)
    group.kill(1)
    group.serves(group.order([0, 2]))
    asked = [group.ask(slot, 300) for slot in (0, 2)]
    group.begun(*asked)
    order = group.prepare([0, 2], 1)
    group.vanish(order, group.join(order))
    assert all(answer["ok"] for answer in group.all([0, 2], "healer_refill_pause", order.epoch))
    calls = [group.utility(slot, "healer_refill_commit", order.epoch) for slot in (0, 2)]
    time.sleep(0.3)
    group.serves(group.order([0, 2]))
    for slot, call in zip((0, 2), calls, strict=True):
        assert group.result(slot, call)["ok"] is False
    group.right(*asked)
    group.idle()
    group.right(group.ask(2, 6))


def a_survivor_that_dies_during_a_preparation() -> None:
    group = Group(3)
    group.kill(1)
    group.serves(group.order([0, 2]))
    asked = group.ask(2, 300)
    group.begun(asked)
    group.prepare([0, 2], 1)
    group.kill(0)
    group.serves(group.order([2]))
    assert "shrink" in group.info(2).refill_error
    order = group.prepare([2], 0)
    group.enter(order, group.join(order))
    group.commit(order)
    group.right(asked, group.ask(0, 6))


CASES = (
    deaths_under_load_cost_the_others_nothing,
    an_idle_group_is_parked_by_the_order_and_wakes_afterwards,
    a_coordinator_that_was_started_again_calls_whoever_is_idle,
    all_live_slots_are_a_retry_that_keeps_requests,
    recompute_and_abort_do_what_they_say,
    partial_repeated_stale_and_conflicting_orders_do_no_harm,
    a_step_that_waits_for_a_live_rank_that_never_began_it_is_freed,
    a_newer_order_ends_the_one_that_waits,
    one_vote_of_no_and_nobody_serves,
    a_second_death_during_the_shrink,
    stock_retry_is_refused_after_an_order,
    any_slot_is_filled_again_while_the_others_serve,
    two_holes_are_filled_one_after_the_other,
    a_preparation_that_is_aborted_or_fails_leaves_the_engines_serving,
    a_joiner_that_dies_when_ready_is_shrunk_away_with_nothing_lost,
    a_survivor_that_dies_during_a_preparation,
)


def main() -> None:
    from elastic.vllm import refill, sentinel, waking

    sentinel.install()
    refill.install()
    waking.install()
    wanted = sys.argv[2:]
    for case in CASES:
        if not wanted or case.__name__ in wanted:
            began = time.monotonic()
            case()
            print(json.dumps({"passed": case.__name__, "took_s": round(time.monotonic() - began, 2)}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads that wait in gloo do not end with the interpreter


if __name__ == "__main__":
    main()
