"""The router's file, and its end."""

import asyncio
import json

import httpx
import pytest

from tests.vllm.router_fakes import Fault
from tests.vllm.router_stand import BODY, COMPLETIONS, RIGHT, Stand, Start, stream, text_of, until


async def test_a_file_of_an_older_epoch_is_refused_and_said(start: Start) -> None:
    stand = await start(1)
    stand.epoch = 10
    stand.write()
    assert (await stand.status())["epoch"] == 11
    stand.epoch = 3
    stand.admit[0] = False
    stand.write()
    assert (await stand.status())["epoch"] == 11
    assert await text_of(stand) == RIGHT
    said = json.loads(stand.path.with_name("router.json").read_text())
    assert (said["epoch"], "epoch 4 is older than epoch 11" in said["refused"]) == (11, True)
    stand.admit[0], stand.epoch = True, 11
    stand.write()
    assert json.loads(stand.path.with_name("router.json").read_text())["refused"] == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1"),
        ('{"epoch": 9,\n"ranks": [}', "line 2, column 11"),
        ('{"epoch": 9, "ranks": [{"slot": -1}]}', "$.ranks[0].slot"),
        ('{"epoch": 9, "ranks": [], "ports": 1}', "ports"),
        ('{"epoch": 9, "ranks": [{"slot":0,"incarnation":0,"url":"ftp://x","admit":true}]}', "ftp://x"),
        ('{"epoch": 9, "ranks": [{"slot":0,"incarnation":0,"url":"http://x/v1","admit":true}]}', "slot 0"),
        ('{"epoch": 9, "ranks": [], "port": 1}', "restart"),
    ],
)
async def test_a_wrong_file_changes_nothing_and_is_said_with_its_place(start: Start, text: str, said: str) -> None:
    stand = await start(1)
    assert stand.router is not None
    stand.path.write_text(text)
    stand.router.reload()
    assert said in json.loads(stand.path.with_name("router.json").read_text())["refused"]
    assert await text_of(stand) == RIGHT
    assert await stand.metric('healer_router_reloads_total{result="refused"}') == 1


async def test_a_router_that_ends_finishes_what_it_has_and_takes_nothing_new(start: Start) -> None:
    stand = await start(1)
    stand.ranks[0].hold.clear()
    task = asyncio.create_task(stream(stand.client, COMPLETIONS, BODY))
    await until(lambda: stand.ranks[0].active == 1)
    stand.stop.set()
    await until(lambda: _closing(stand))
    refused = await stand.client.post(COMPLETIONS, json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    stand.ranks[0].hold.set()
    assert (await task).text == RIGHT


async def _closing(stand: Stand) -> bool:
    return bool((await stand.client.get("/readyz")).status_code == 503)


async def test_what_is_left_at_the_end_of_the_grace_gets_an_explicit_error(start: Start) -> None:
    stand = await start(1, limits={"grace_s": 0.1})
    stand.ranks[0].faults.append(Fault("stall", 3))
    task = asyncio.create_task(stream(stand.client, COMPLETIONS, BODY))
    await until(lambda: stand.ranks[0].active == 1)
    await until(lambda: stand.metric("healer_router_tokens_total"))
    stand.stop.set()
    got = await task
    assert got.error is not None
    assert got.error["code"] == "shutting_down"
    assert not got.done


async def test_every_unknown_path_has_the_error_envelope(start: Start) -> None:
    stand = await start(1)
    answer: httpx.Response = await stand.client.get("/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
