"""Who is let in, who waits, where requests go, and what the router tells others."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.router_fakes import GONE, MODEL, RETIRED, Fault
from tests.vllm.router_stand import BODY, COMPLETIONS, RIGHT, Stand, Start, text_of, until

# --- the wait through a commit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [GONE, RETIRED], ids=["scaling", "retired"])
async def test_no_client_sees_the_503_of_a_commit(start: Start, gate: dict[str, Any]) -> None:
    stand = await start(2)
    for rank in stand.ranks.values():
        rank.gate = gate
    tasks = [asyncio.create_task(text_of(stand)) for _ in range(8)]
    await until(lambda: _queued(stand, 8))
    stand.ranks[1].gate = None
    assert await asyncio.gather(*tasks) == [RIGHT] * 8
    assert stand.ranks[0].asked(COMPLETIONS) == [], "what shut its gate got nothing"
    assert await stand.metric("healer_router_hold_seconds_count") == 8


async def _queued(stand: Stand, count: int) -> bool:
    return bool((await stand.status())["queued"] == count)


async def test_a_pause_that_only_requests_notice_is_waited_out_however_often_they_ask(start: Start) -> None:
    stand = await start(1)
    stand.ranks[0].paused = True
    task = asyncio.create_task(text_of(stand))
    await until(lambda: len(stand.ranks[0].asked(COMPLETIONS)) >= 7)
    stand.ranks[0].paused = False
    assert await task == RIGHT


async def test_a_rank_that_starts_again_is_used_again_and_nobody_saw_it_gone(start: Start) -> None:
    stand = await start(1)
    await stand.ranks[0].kill()
    task = asyncio.create_task(text_of(stand))
    await until(lambda: _queued(stand, 1))
    await stand.ranks[0].start()
    assert await task == RIGHT


async def test_the_wait_for_a_rank_ends_in_503_with_a_time_to_come_back(start: Start) -> None:
    stand = await start(1, limits={"hold_s": 0.2})
    stand.ranks[0].gate = GONE
    answer = await stand.client.post(COMPLETIONS, json=BODY)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    error = answer.json()["error"]
    assert error["code"] == "no_ranks"
    assert "scaling" not in error["message"]


async def test_no_more_wait_than_may(start: Start) -> None:
    stand = await start(1, limits={"max_queued": 2})
    stand.ranks[0].gate = GONE
    await until(lambda: _open(stand, 0, False))
    tasks = [asyncio.create_task(text_of(stand)) for _ in range(2)]
    await until(lambda: _queued(stand, 2))
    answer = await stand.client.post(COMPLETIONS, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert "retry-after" in answer.headers
    stand.ranks[0].gate = None
    assert await asyncio.gather(*tasks) == [RIGHT] * 2


async def test_no_more_are_in_flight_than_may(start: Start) -> None:
    stand = await start(1, limits={"max_in_flight": 3})
    stand.ranks[0].hold.clear()
    tasks = [asyncio.create_task(text_of(stand)) for _ in range(3)]
    await until(lambda: stand.ranks[0].active == 3)
    answer = await stand.client.post(COMPLETIONS, json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    stand.ranks[0].hold.set()
    assert await asyncio.gather(*tasks) == [RIGHT] * 3


# --- where requests go ---------------------------------------------------------------------------------------------------


async def test_a_drained_rank_ends_what_it_has_and_gets_nothing_new(start: Start) -> None:
    stand = await start(2)
    first = stand.ranks[0]
    for rank in stand.ranks.values():
        rank.hold.clear()
    tasks = [asyncio.create_task(text_of(stand)) for _ in range(4)]
    await until(lambda: sum(rank.active for rank in stand.ranks.values()) == 4)
    had = first.active
    assert had == 2
    stand.admit[0] = False
    stand.write()
    tasks += [asyncio.create_task(text_of(stand)) for _ in range(6)]
    await until(lambda: stand.ranks[1].active == 8)
    for rank in stand.ranks.values():
        rank.hold.set()
    assert await asyncio.gather(*tasks) == [RIGHT] * 10
    assert len(first.asked(COMPLETIONS)) == had
    assert first.cancelled == 0
    assert (await stand.client.get("/readyz/slot/0")).status_code == 503
    assert (await stand.client.get("/readyz/slot/1")).status_code == 200
    assert (await stand.client.get("/readyz")).status_code == 200


async def test_the_less_loaded_rank_is_chosen_whoever_loads_the_other(start: Start) -> None:
    stand = await start(2)
    stand.ranks[0].load = (3, 4)
    await until(lambda: _load(stand, 0, (3, 4)))
    for _ in range(5):
        assert await text_of(stand) == RIGHT
    assert (len(stand.ranks[0].asked(COMPLETIONS)), len(stand.ranks[1].asked(COMPLETIONS))) == (0, 5)


async def _load(stand: Stand, slot: int, load: tuple[int, int]) -> bool:
    rank = next(rank for rank in (await stand.status())["ranks"] if rank["slot"] == slot)
    return (rank["running"], rank["waiting"]) == load


async def test_a_burst_is_spread_between_two_looks_at_the_load(start: Start) -> None:
    stand = await start(3, poll_s=30.0)
    for rank in stand.ranks.values():
        rank.hold.clear()
    tasks = [asyncio.create_task(text_of(stand)) for _ in range(12)]
    await until(lambda: [rank.active for rank in stand.ranks.values()] == [4, 4, 4])
    for rank in stand.ranks.values():
        rank.hold.set()
    assert await asyncio.gather(*tasks) == [RIGHT] * 12


async def test_the_load_of_others_and_what_was_sent_since_are_added(start: Start) -> None:
    stand = await start(2)
    stand.ranks[0].load = (10, 0)
    await until(lambda: _load(stand, 0, (10, 0)))
    looks = [rank.looks for rank in stand.ranks.values()]
    stand.settings["poll_s"] = 60.0
    stand.write()
    # the last looks at the old pace
    await until(lambda: all(rank.looks > had for rank, had in zip(stand.ranks.values(), looks, strict=True)))
    for rank in stand.ranks.values():
        rank.hold.clear()
    tasks = [asyncio.create_task(text_of(stand)) for _ in range(14)]
    await until(lambda: [rank.active for rank in stand.ranks.values()] == [2, 12])
    for rank in stand.ranks.values():
        rank.hold.set()
    assert await asyncio.gather(*tasks) == [RIGHT] * 14


async def test_a_rank_with_a_dead_engine_gets_nothing_though_it_answers(start: Start) -> None:
    stand = await start(2)
    stand.ranks[0].healthy = False
    await until(lambda: _open(stand, 0, False))
    assert await text_of(stand) == RIGHT
    assert stand.ranks[0].asked(COMPLETIONS) == []


async def _open(stand: Stand, slot: int, wanted: bool) -> bool:
    status = (await stand.client.get(f"/readyz/slot/{slot}")).status_code
    return bool((status == 200) == wanted)


async def test_a_busy_rank_is_passed_over_and_busy_everywhere_is_said(start: Start) -> None:
    stand = await start(2)
    stand.ranks[0].faults.append(Fault("busy", 0))
    assert [await text_of(stand) for _ in range(2)] == [RIGHT] * 2
    for rank in stand.ranks.values():
        rank.faults = [Fault("busy", 0)]
    answer = await stand.client.post(COMPLETIONS, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")


# --- clients -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_leaves_ends_its_request_on_the_rank(start: Start, streams: bool) -> None:
    stand = await start(1)
    stand.ranks[0].faults.append(Fault("stall", 3))
    task = asyncio.create_task(stand.client.post(COMPLETIONS, json={**BODY, "stream": streams}))
    await until(lambda: stand.ranks[0].active == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: stand.ranks[0].cancelled == 1)
    await until(lambda: stand.metric('healer_router_requests_total{outcome="cancelled"}'))
    assert (await stand.status())["in_flight"] == 0


async def test_a_client_that_leaves_while_it_waits_frees_its_place(start: Start) -> None:
    stand = await start(1)
    stand.ranks[0].gate = GONE
    task = asyncio.create_task(text_of(stand))
    await until(lambda: _queued(stand, 1))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: _queued(stand, 0))


async def test_a_request_has_its_time_and_no_more(start: Start) -> None:
    stand = await start(1)
    stand.ranks[0].faults.append(Fault("stall", 3))
    answer = await stand.client.post(COMPLETIONS, json=BODY, headers={"x-request-timeout-s": "0.2"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    await until(lambda: stand.ranks[0].cancelled == 1)
    answer = await stand.client.post(COMPLETIONS, json=BODY, headers={"x-request-timeout-s": "soon"})
    assert answer.status_code == 400


async def test_a_rank_that_says_nothing_for_too_long_is_left(start: Start) -> None:
    stand = await start(2, limits={"silence_s": 2.0})
    fault = Fault("stall", 3)
    for rank in stand.ranks.values():
        rank.faults.append(fault)
    assert await text_of(stand) == RIGHT
    assert await stand.metric('healer_router_attempts_lost_total{cause="silent"}') == 1


async def test_the_api_key_reaches_every_rank_that_works_on_the_request(start: Start) -> None:
    stand = await start(2)
    fault = Fault("reset", 5)
    for rank in stand.ranks.values():
        rank.faults.append(fault)
    headers = {"authorization": "Bearer secret", "x-data-parallel-rank": "1"}
    got = await stand.client.post(COMPLETIONS, json=BODY, headers=headers)
    assert got.json()["choices"][0]["text"] == RIGHT
    seen = [headers for rank in stand.ranks.values() for _, _, headers, _ in rank.seen]
    assert len(seen) == 3, "the first attempt, a look at the last tokens, the continuation"
    assert {headers["authorization"] for headers in seen} == {"Bearer secret"}
    assert not any("x-data-parallel-rank" in headers for headers in seen)


async def test_a_body_above_the_limit_is_refused_before_any_rank_sees_it(start: Start) -> None:
    stand = await start(1, limits={"max_body_bytes": 1000})
    for path in (COMPLETIONS, "/v1/embeddings"):
        answer = await stand.client.post(path, json={**BODY, "prompt": "x" * 1000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert stand.ranks[0].seen == []


# --- all else below /v1 --------------------------------------------------------------------------------------------------


async def test_other_paths_are_passed_on_as_they_are(start: Start) -> None:
    stand = await start(1)
    answer = await stand.client.post("/v1/embeddings?a=b&c=%20", json={"input": "x"})
    found = answer.json()
    assert (answer.status_code, found["path"], found["got"]) == (200, "/v1/embeddings?a=b&c=%20", {"input": "x"})
    assert answer.headers["x-rank"] == "yes"
    assert (await stand.client.get("/v1/models")).json()["data"][0]["id"] == MODEL
    assert (await stand.client.post("/v1/nothing/there")).status_code == 404


async def test_control_endpoints_of_a_rank_are_out_of_reach(start: Start) -> None:
    stand = await start(1)
    for path in ("/scale_elastic_ep", "/pause", "/collective_rpc", "/fault_tolerance/apply", "/v1/load_lora_adapter"):
        answer = await stand.client.post(path, json={"new_data_parallel_size": 1})
        assert answer.status_code in (400, 404, 405), path
        assert "error" in answer.json()
    assert stand.ranks[0].seen == []


async def test_another_request_is_sent_again_only_where_it_was_not_begun(start: Start) -> None:
    stand = await start(2)
    await stand.ranks[0].kill()
    assert (await stand.client.post("/v1/embeddings", json={})).status_code == 200
    stand.ranks[1].faults.append(Fault("hangup", 0))
    answer = await stand.client.post("/v1/embeddings", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "rank_lost")


# --- what others read ----------------------------------------------------------------------------------------------------


async def test_readiness_follows_the_ranks(start: Start) -> None:
    stand = await start(1)
    assert (await stand.client.get("/readyz")).status_code == 200
    assert (await stand.client.get("/readyz/slot/7")).status_code == 404
    stand.ranks[0].gate = GONE
    await until(lambda: _open(stand, 0, False))
    for path in ("/readyz", "/health"):
        answer = await stand.client.get(path)
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert (await stand.client.get("/livez")).status_code == 200


async def test_lists_for_envoy_and_nginx_follow_the_ranks(start: Start, tmp_path: Path) -> None:
    envoy, nginx = tmp_path / "eds.json", tmp_path / "upstream.conf"
    files = {"envoy": str(envoy), "envoy_cluster": "moe", "nginx": str(nginx)}
    stand = await start(2, files=files)
    ports = [stand.ranks[slot].port for slot in (0, 1)]

    def healths() -> list[tuple[int, str]]:
        (resource,) = json.loads(envoy.read_text())["resources"]
        assert resource["cluster_name"] == "moe"
        (locality,) = resource["endpoints"]
        return [
            (one["endpoint"]["address"]["socket_address"]["port_value"], one["health_status"])
            for one in locality["lb_endpoints"]
        ]

    assert healths() == [(ports[0], "HEALTHY"), (ports[1], "HEALTHY")]
    stand.admit[0] = False
    stand.write()
    assert healths() == [(ports[0], "DRAINING"), (ports[1], "HEALTHY")]
    assert nginx.read_text() == (f"server 127.0.0.1:{ports[0]} down; # slot 0\nserver 127.0.0.1:{ports[1]}; # slot 1\n")
    await stand.ranks[1].kill()
    await until(lambda: healths()[1][1] == "DRAINING")
    stand.ranks.clear()
    stand.write()
    assert nginx.read_text().endswith(" down;\n"), "nginx refuses an upstream without servers"
