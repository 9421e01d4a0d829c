"""The API against its own description, and what callers rely on: idempotency, auth, a record of who asked."""

import contextlib
import getpass
import json
import os
import socket
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.healer.support import POLICY
from tests.healer.test_daemon import SPEC, Daemon, wait

TOKEN = "correct-horse-battery-staple"
AUTHORISED = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    found = Daemon(tmp_path_factory.mktemp("api"))
    (found.folder / "token").write_text(TOKEN + "\n")
    found.policy.write_text(POLICY + SPEC.replace("{port: 0}", "{port: 0, tokenFile: token}"))
    try:
        found.start()
        yield found
    finally:
        found.end()


@pytest.fixture(scope="module")
def unguarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    found = Daemon(tmp_path_factory.mktemp("open"))
    try:
        found.start()
        yield found
    finally:
        found.end()


def test_no_call_makes_the_daemon_fail_or_answer_other_than_described(unguarded: Daemon) -> None:
    # a whole number such as 4.0 is valid by JSON Schema and refused here, and two calls may happen to have the same key
    config = schemathesis.Config.from_dict({"checks": {"positive_data_acceptance": {"enabled": False}}})
    described = schemathesis.openapi.from_url(f"{unguarded.http}/openapi.json", config=config)
    operations = [one.ok() for one in described.get_all_operations()]
    assert len(operations) > 15
    for operation in operations:
        if operation.path == "/stop":
            continue  # it would end the daemon

        @given(case=operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
        @settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def call(case: Any) -> None:
            case.call_and_validate()

        call()


def test_after_all_that_the_daemon_still_heals(unguarded: Daemon) -> None:
    for path, body in (("/resume", {}), ("/breaker/reset", {})):
        assert unguarded.post(path, json=body).status_code == 202
    for held in unguarded.get("/status").json()["healing"]["quarantined"]:
        assert unguarded.post("/release", json={"slot": held}).status_code == 202
    assert unguarded.post("/scale", json={"slots": [0, 1, 2, 3]}).status_code == 202
    wait(unguarded.is_ok, "the group is whole again")
    assert unguarded.get("/status").json()["healing"]["paused"] == ""
    unguarded.kill_and_heal(1)
    assert not [line for line in unguarded.log().splitlines() if "event.failed" in line or "round.failed" in line]


def test_clients_that_connect_and_say_nothing_keep_nobody_out_and_no_rank_from_being_healed(unguarded: Daemon) -> None:
    host, port = unguarded.http.removeprefix("http://").split(":")
    assert unguarded.process is not None
    with contextlib.ExitStack() as silent:
        for _ in range(300):
            silent.enter_context(socket.create_connection((host, int(port)), timeout=5)).sendall(
                b"GET /status HTTP/1.1\r\n"
            )
        wait(unguarded.is_ok, "it answers all the same")
        assert len(os.listdir(f"/proc/{unguarded.process.pid}/fd")) < 280
        unguarded.kill_and_heal(2)


def test_callers_who_never_end_their_body_keep_nobody_out_and_are_told_so(unguarded: Daemon) -> None:
    host, port = unguarded.http.removeprefix("http://").split(":")
    head = b"POST /pause HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n{"
    with contextlib.ExitStack() as slow:
        calls = [slow.enter_context(socket.create_connection((host, int(port)), timeout=30)) for _ in range(250)]
        for call in calls:
            with contextlib.suppress(OSError):  # the first ones made room for the last
                call.sendall(head)
        wait(unguarded.is_ok, "it answers all the same", 4.0)
        assert calls[-1].recv(65536).startswith(b"HTTP/1.1 408 ")
    assert unguarded.get("/status").json()["healing"]["paused"] == ""


def test_a_caller_who_goes_away_in_mid_sentence_is_no_failure_of_the_daemon(unguarded: Daemon) -> None:
    host, port = unguarded.http.removeprefix("http://").split(":")
    head = "POST /pause HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n{"
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=5) as call:
            call.sendall(head.encode())
    assert unguarded.get("/livez").status_code == 200
    unguarded.cli("pause", "--reason", "a line")
    unguarded.cli("resume")
    assert "Traceback" not in unguarded.log()


@pytest.mark.parametrize("reason", ["two\nlines", "nul\0", "\x1b[2Jcleared", "\x9b2J", "end\n"])
def test_a_reason_that_would_write_on_a_terminal_is_refused(unguarded: Daemon, reason: str) -> None:
    assert unguarded.post("/pause", json={"reason": reason}).status_code == 400
    assert unguarded.get("/status").json()["healing"]["paused"] == ""


def test_a_call_that_is_sent_twice_is_carried_out_once(guarded: Daemon) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex} | AUTHORISED
    before = _orders(guarded)
    first = guarded.post("/pause", json={"reason": "maintenance"}, headers=key)
    again = guarded.post("/pause", json={"reason": "maintenance"}, headers=key)
    assert (first.status_code, again.status_code, first.content) == (202, 202, again.content)
    other = guarded.post("/pause", json={"reason": "another"}, headers=key)
    elsewhere = guarded.post("/resume", json={}, headers=key)
    assert (other.status_code, elsewhere.status_code) == (422, 422)
    assert guarded.get("/status").json()["healing"]["paused"].endswith(": maintenance"), "and for what"
    assert len(_orders(guarded)) == len(before) + 1
    assert guarded.post("/resume", json={}, headers=AUTHORISED).status_code == 202


def test_what_was_refused_may_be_asked_again_under_the_same_key(guarded: Daemon) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex} | AUTHORISED
    assert guarded.post("/release", json={"slot": 5}, headers=key).status_code == 409
    assert guarded.post("/quarantine", json={"slot": 5}, headers=AUTHORISED).status_code == 202
    assert guarded.post("/release", json={"slot": 5}, headers=key).status_code == 202


def test_who_asked_is_written_down_with_what_became_of_it(guarded: Daemon) -> None:
    headers = AUTHORISED | {"From": "alice@ops"}
    assert guarded.post("/quarantine", json={"slot": 5, "for_s": 60.0}, headers=headers).status_code == 202
    assert guarded.post("/drain", json={"slot": 5}, headers=headers).status_code == 409
    asked, refused = _orders(guarded)[-2:]
    assert (asked["order"], asked["who"]) == ("Quarantine", "alice@ops at 127.0.0.1")
    assert asked["answer"].startswith("quarantines slot 5 for 60 s")
    assert refused["answer"].startswith("refused: slot 5 is not in the target")
    done = guarded.cli("release", "5")
    assert (done.returncode, "ends the quarantine of slot 5" in done.stdout) == (0, True), done.stderr
    assert _orders(guarded)[-1]["who"].startswith(getpass.getuser())


def test_the_command_line_gives_every_order(guarded: Daemon) -> None:
    for command, said in (
        (("pause", "--reason", "firmware"), "pauses healing"),
        (("resume",), "heals and scales again"),
        (("quarantine", "5", "--for", "90m"), "quarantines slot 5 for 5400 s"),
        (("release", "5"), "ends the quarantine"),
        (("replace", "2", "--reason", "slow"), "replaces slot 2"),
        (("breaker", "reset"), "resets the circuit breaker"),
    ):
        wait(guarded.is_ok, "no order is under way")
        done = guarded.cli(*command, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["sentence"].startswith(said)
    wait(guarded.is_ok, "slot 2 is replaced")
    drained = guarded.cli("drain", "3")
    assert drained.returncode == 0, drained.stderr
    wait(lambda: guarded.get("/status").json()["group"]["live"] == [0, 1, 2], "drained")
    assert guarded.cli("scale", "4", "--wait").returncode == 0
    nothing = guarded.cli("cancel")
    assert (nothing.returncode, nothing.stderr) == (
        1, "error: nothing is being prepared: every slot of the target is live\n",
    )  # fmt: skip
    assert guarded.cli("quarantine", "5", "--for", "soon").returncode == 2


def test_many_wrong_tokens_shut_the_caller_out_and_reading_goes_on(guarded: Daemon) -> None:
    wrong = {"Authorization": "Bearer wrong"}
    codes = [guarded.post("/pause", json={}, headers=wrong).status_code for _ in range(6)]
    assert codes[0] == 401
    assert codes[-1] == 429
    late = guarded.post("/pause", json={}, headers=AUTHORISED)
    assert (late.status_code, int(late.headers["retry-after"]) > 0) == (429, True)
    assert guarded.get("/status").status_code == 200


def _orders(daemon: Daemon) -> list[dict[str, Any]]:
    lines = daemon.cli("export").stdout.splitlines()
    bodies = [json.loads(line)["body"] for line in lines]
    return [body for body in bodies if body.get("event") == "order"]


def test_a_caller_who_hears_nothing_tries_again_under_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from healer import client as seam

    sent: list[str] = []

    def request(method: str, url: str, *, headers: dict[str, str], **_: Any) -> httpx.Response:
        sent.append(headers["Idempotency-Key"])
        if len(sent) < 3:
            raise httpx.ReadTimeout("no answer")
        return httpx.Response(202, json={"sentence": "done", "target": []})

    monkeypatch.setattr(seam.httpx, "request", request)
    monkeypatch.setattr(seam.time, "sleep", lambda _: None)
    client = object.__new__(seam.Client)
    client.address = seam.DaemonAddress(
        pid=1, pid_start=_start_of(1), http="http://x", policy="", token_file="", version="", started_wall=0.0
    )
    assert client.post("/pause", {})["sentence"] == "done"
    assert len(sent) == 3
    assert len(set(sent)) == 1


def _start_of(pid: int) -> int:
    from elastic import process

    return process.start_time(pid)
