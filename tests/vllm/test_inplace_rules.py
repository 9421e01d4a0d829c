"""What is decided about requests, survivors and handshakes, without a vLLM."""

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.vllm.coordination.handshake import Addresses, Handshake, Shared
from elastic.vllm.driver import Round, next_round
from elastic.vllm.held import Facts, confirmed_tokens, rule
from elastic.vllm.records import EngineInfo, Phase, Refusal, Requests, ShrinkOrder, ShrinkResult
from healer.targets.vllm.in_place import environment, why_not

SAFE = Facts(
    confirmed=40,
    prompt=30,
    encoder_inputs=False,
    prompt_outputs=False,
    session=False,
    seeded=False,
    kv_connector=False,
    aux_outputs=False,
    admitted_in_lost_step=False,
    paged_only=True,
    runner_v2=True,
    unseen_mask=False,
)
STRENGTH = {Requests.ABORT: 0, Requests.RECOMPUTE: 1, Requests.KEEP: 2}


def fact(**changed: Any) -> Facts:
    return dataclasses.replace(SAFE, **changed)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (SAFE, Requests.KEEP),
        (fact(confirmed=10), Requests.KEEP),  # in the middle of its prompt
        (fact(confirmed=0), Requests.RECOMPUTE),
        (fact(admitted_in_lost_step=True), Requests.RECOMPUTE),
        (fact(paged_only=False), Requests.RECOMPUTE),  # the failed step has changed the state of a state-space layer
        (fact(aux_outputs=True), Requests.RECOMPUTE),
        (fact(encoder_inputs=True), Requests.KEEP),  # its images are in the KV cache
        (fact(encoder_inputs=True, confirmed=10), Requests.RECOMPUTE),
        (fact(prompt_outputs=True, confirmed=10), Requests.RECOMPUTE),
        (fact(seeded=True), Requests.KEEP),
        (fact(seeded=True, runner_v2=False), Requests.ABORT),
        (fact(runner_v2=False), Requests.KEEP),
        (fact(unseen_mask=True), Requests.ABORT),  # accepted tokens may be wrong
        (fact(kv_connector=True), Requests.ABORT),
        (fact(session=True), Requests.ABORT),
    ],
)
def test_a_request_is_kept_only_where_its_cache_is_known_to_be_right(facts: Facts, expected: Requests) -> None:
    assert rule(Requests.KEEP, facts) == expected


@given(
    st.builds(
        Facts,
        confirmed=st.integers(0, 50),
        prompt=st.integers(1, 50),
        **{f.name: st.booleans() for f in dataclasses.fields(Facts) if f.type is bool or f.type == "bool"},
    ),
    st.sampled_from(list(Requests)),
)
def test_no_rule_gives_a_request_more_than_was_ordered(facts: Facts, order: Requests) -> None:
    assert STRENGTH[rule(order, facts)] <= STRENGTH[order]


@pytest.mark.parametrize(
    ("computed", "in_flight", "stale", "confirmed"),
    [(100, 0, 0, 100), (100, 1, 0, 99), (100, 2, 0, 98), (0, 3, 3, 0), (10, 30, 0, 0), (64, 5, 5, 64)],
)
def test_tokens_of_a_step_that_was_not_accepted_do_not_count(
    computed: int, in_flight: int, stale: int, confirmed: int
) -> None:
    assert confirmed_tokens(computed, in_flight, stale) == confirmed


# --- survivors ------------------------------------------------------------------------------------------------------------------

ORDER = ShrinkOrder(7, (0, 2, 3), "127.0.0.1", 1, 5.0)


def answer(
    slot: int, *, serves: bool = True, phase: Phase = Phase.SERVE, refused: Refusal | None = None
) -> ShrinkResult:
    return ShrinkResult(7, slot, serves, phase, "" if serves else f"failed in {phase}", refused)


def test_all_serve() -> None:
    answers: dict[int, ShrinkResult | str] = {slot: answer(slot) for slot in ORDER.survivors}
    assert next_round(ORDER, answers, []) == Round(True, ORDER.survivors)


def test_a_survivor_that_dies_meanwhile_is_left_out_and_need_not_be_ended() -> None:
    late = {slot: answer(slot, serves=False, phase=Phase.MEET) for slot in (0, 3)}
    found = next_round(ORDER, {**late, 2: "no answer within 6 s"}, [2])
    assert (found.serves, found.survivors, found.fence) == (False, (0, 3), ())


def test_a_survivor_that_says_nothing_is_ended_before_the_others_go_on_without_it() -> None:
    late = {slot: answer(slot, serves=False, phase=Phase.MEET) for slot in (0, 3)}
    found = next_round(ORDER, {**late, 2: "no answer within 6 s"}, [])
    assert (found.survivors, found.fence) == ((0, 3), (2,))


def test_a_survivor_whose_own_worker_failed_is_ended_and_those_that_heard_its_no_are_not() -> None:
    heard = {slot: answer(slot, serves=False, phase=Phase.VOTE) for slot in (0, 3)}
    found = next_round(ORDER, {**heard, 2: answer(2, serves=False, phase=Phase.WORKERS)}, [])
    assert (found.survivors, found.fence) == ((0, 3), (2,))


def test_a_worker_that_met_a_dying_peer_is_not_blamed_for_it() -> None:
    met = {0: answer(0, serves=False, phase=Phase.WORKERS), 3: answer(3, serves=False, phase=Phase.VOTE)}
    found = next_round(ORDER, {**met, 2: "no answer within 6 s"}, [2])
    assert (found.survivors, found.fence) == ((0, 3), ())


def test_one_that_serves_and_one_that_does_not_are_asked_again_together() -> None:
    found = next_round(ORDER, {0: answer(0), 2: answer(2), 3: answer(3, serves=False, phase=Phase.MEET)}, [])
    assert (found.serves, found.survivors, found.fence) == (False, (0, 2, 3), ())


def test_a_stale_order_blames_nobody() -> None:
    stale = {s: answer(s, serves=False, phase=Phase.PARK, refused=Refusal.STALE) for s in ORDER.survivors}
    found = next_round(ORDER, dict(stale), [])
    assert (found.survivors, found.fence) == (ORDER.survivors, ())


results = st.one_of(
    st.just("no answer"),
    st.builds(
        lambda serves, phase, refused: answer(0, serves=serves, phase=phase, refused=None if serves else refused),
        st.booleans(),
        st.sampled_from(list(Phase)),
        st.one_of(st.none(), st.sampled_from(list(Refusal))),
    ),
)


@given(st.fixed_dictionaries(dict.fromkeys(ORDER.survivors, results)), st.sets(st.sampled_from(ORDER.survivors)))
def test_nobody_goes_on_without_a_rank_that_is_neither_dead_nor_to_be_ended(
    answers: dict[int, ShrinkResult | str], dead: set[int]
) -> None:
    found = next_round(ORDER, answers, dead)
    assert set(found.survivors) | set(found.fence) | dead >= set(ORDER.survivors)
    assert not set(found.survivors) & (dead | set(found.fence))
    if found.serves:
        assert not dead
        assert all(isinstance(a, ShrinkResult) and a.serves for a in answers.values())


# --- the target's choice --------------------------------------------------------------------------------------------------------


def info(slot: int, *, status: str = "unhealthy") -> EngineInfo:
    return EngineInfo(slot, 4, (0, 1, 2, 3), 0, status, "", None, "", "", 1, 0, 0, 8, 8)


@pytest.mark.parametrize(
    ("survivors", "infos", "sticky", "reason"),
    [
        ((0, 2), {0: info(0), 2: info(2)}, (), ""),
        ((0,), {0: info(0)}, (), "2 are needed"),
        ((0, 2), {0: info(0), 2: "POST …: no such route"}, (), "rank 2: POST"),
        ((0, 2), {0: info(0), 2: info(2, status="dead")}, (), "lost a worker"),
        ((0, 2), {0: info(0), 2: info(2)}, (2,), "CUDA"),
        ((0, 2), {0: info(0)}, (), "not asked"),
    ],
)
def test_in_place_is_chosen_only_where_every_survivor_can(
    survivors: tuple[int, ...], infos: dict[int, EngineInfo | str], sticky: tuple[int, ...], reason: str
) -> None:
    found = why_not(survivors, least=2, infos=infos, sticky=sticky)
    assert reason in found
    assert bool(found) == bool(reason)


def test_the_plugin_joins_those_that_the_user_names() -> None:
    assert environment({}, joins=False, coordinated=False) == {"VLLM_PLUGINS": "healer_in_place"}
    found = environment({"VLLM_PLUGINS": "lora,healer_in_place"}, joins=True, coordinated=True)
    assert found["VLLM_PLUGINS"] == "lora,healer_in_place"
    assert found["HEALER_REFILL"] == found["HEALER_COORDINATION"] == "1"


# --- handshake ------------------------------------------------------------------------------------------------------------------

ADDRESSES = Addresses("tcp://a:1", "tcp://a:2", "tcp://a:3")
SHARED = Shared(3, "10.0.0.1", 5, (6, 7), 8)


def said(slot: int, status: str, **more: object) -> tuple[bytes, bytes]:
    return slot.to_bytes(2, "little"), msgspec.msgpack.encode(
        {"status": status, "local": False, "headless": False} | more
    )


def test_ranks_of_a_start_are_answered_at_once_with_the_coordinator_outside() -> None:
    shake = Handshake((0, 1, 2), ADDRESSES, SHARED)
    ((identity, reply),) = shake.on_message(*said(1, "HELLO"))
    told = msgspec.msgpack.decode(reply)
    assert identity == b"\x01\x00"
    assert told["parallel_config"] == {
        "data_parallel_master_ip": "10.0.0.1",
        "data_parallel_master_port": 5,
        "_data_parallel_master_port_list": [6, 7],
        "_coord_store_port": 8,
        "data_parallel_size": 3,
    }
    assert told["addresses"]["coordinator_input"] == "tcp://a:3"
    for slot in (0, 1, 2):
        assert not shake.done
        assert shake.on_message(*said(slot, "READY", parallel_config_hash="h")) == []
    assert shake.done
    assert not shake.trouble


def test_a_joiner_waits_until_the_survivors_are_told() -> None:
    shake = Handshake((1,), ADDRESSES, SHARED, redundant_experts=4, max_size=8)
    assert shake.on_message(*said(1, "HELLO")) == []
    ((_, reply),) = shake.answer([1])
    told = msgspec.msgpack.decode(reply)
    assert (told["num_redundant_experts"], told["elastic_ep_max_dp_size"]) == (4, 8)
    assert len(shake.on_message(*said(1, "HELLO"))) == 1, "it asks again after its answer was lost"


def test_a_rank_with_another_configuration_is_named() -> None:
    shake = Handshake((0, 1), ADDRESSES, SHARED)
    shake.on_message(*said(0, "READY", parallel_config_hash="a"))
    shake.on_message(*said(1, "READY", parallel_config_hash="b"))
    assert "slot 1" in shake.trouble


@given(st.binary(min_size=0, max_size=4), st.binary(max_size=40))
def test_no_message_ends_the_handshake(identity: bytes, payload: bytes) -> None:
    shake = Handshake((0, 1), ADDRESSES, SHARED)
    assert shake.on_message(identity, payload) == []
    assert not shake.done
