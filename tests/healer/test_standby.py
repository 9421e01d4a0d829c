"""Two daemons of one deployment, as processes: one acts, the other stands by and takes over."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.healer.support import POLICY
from tests.healer.test_daemon import REPOSITORY, SPEC, healer, wait

TTL_S, RENEW_S = 2.0, 0.3
LONG_S = 20.0
LEASE_LOST = 4


def lease(ttl_s: float = TTL_S) -> str:
    return f"  lease: {{store: folder, folder: lease, ttl: {ttl_s:g}s, renew: {RENEW_S * 1000:g}ms, deadline: 400ms, margin: 400ms}}\n"


class Pair:
    def __init__(self, folder: Path, ttl_s: float = TTL_S) -> None:
        self.folder, self.run_dir, self.policy = folder, folder / "run", folder / "policy.yaml"
        self.policy.write_text(POLICY + SPEC + lease(ttl_s))
        self.processes: list[subprocess.Popen[bytes]] = []

    def spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.healer.scripted_daemon", "run", "--policy", str(self.policy)]
        with (self.folder / f"log-{len(self.processes)}").open("wb") as log:
            process = subprocess.Popen(command, cwd=REPOSITORY, stderr=log, start_new_session=True)
        self.processes.append(process)
        return process

    def address(self, process: subprocess.Popen[bytes]) -> str:
        for path in (self.run_dir / "healer.json", self.run_dir / f"standby-{process.pid}.json"):
            if path.exists() and (found := json.loads(path.read_text()))["pid"] == process.pid:
                return str(found["http"])
        raise OSError("it listens nowhere yet")

    def status(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        try:
            found: dict[str, Any] = httpx.get(self.address(process) + "/status", timeout=10).json()
        except (httpx.HTTPError, OSError, ValueError):
            return {"state": ""}
        return found

    def until(self, process: subprocess.Popen[bytes], state: str, deadline_s: float = 30.0) -> None:
        wait(lambda: self.status(process)["state"] == state, f"{process.pid} is {state}", deadline_s)

    def acts(self) -> list[dict[str, Any]]:
        path = self.run_dir / "acts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def kill_rank(self, process: subprocess.Popen[bytes], slot: int) -> None:
        os.kill(self.status(process)["group"]["slots"][slot]["member"]["pid"], signal.SIGKILL)

    def end(self) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            finally:
                process.wait()


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """With the lifetime of a lease that a test may name."""
    found = Pair(tmp_path, getattr(request, "param", TTL_S))
    try:
        yield found
    finally:
        found.end()


def test_a_standby_answers_what_it_knows_refuses_orders_and_names_the_holder(pair: Pair) -> None:
    first = pair.spawn()
    pair.until(first, "ok")
    holder = pair.status(first)["lease"]
    assert (holder["role"], holder["term"], holder["holder"]) == ("holder", 1, holder["name"])
    pair.kill_rank(first, 1)
    wait(lambda: len(httpx.get(pair.address(first) + "/incidents").json()) == 1, "an incident")
    second = pair.spawn()
    wait(lambda: pair.status(second).get("lease", {}).get("holder") == holder["name"], "the standby sees the holder")
    api = pair.address(second)
    assert pair.status(second)["state"] == "standby"
    assert httpx.get(api + "/livez").status_code == 200
    assert httpx.get(api + "/healthz").status_code == 503
    assert httpx.get(api + "/incidents").json()[0]["causes"] == ["process-death"]
    assert "healer_lease_held 0.0" in httpx.get(api + "/metrics").text
    for path, body in (("/scale", {"ranks": 3}), ("/pause", {}), ("/stop", {})):
        refused = httpx.post(api + path, json=body)
        assert refused.status_code == 409
        assert holder["name"] in refused.json()["error"]
    shown = healer("status", "--run-dir", str(pair.run_dir), "--json")
    assert json.loads(shown.stdout)["pid"] == first.pid, "the command line asks the one that acts"
    second.send_signal(signal.SIGTERM)
    assert second.wait(10) == 0
    assert pair.status(first)["acts"]


@pytest.mark.parametrize("pair", [LONG_S], indirect=True)
def test_a_holder_that_ends_hands_over_at_once(pair: Pair) -> None:
    first = pair.spawn()
    pair.until(first, "ok")
    second = pair.spawn()
    pair.until(second, "standby")
    first.send_signal(signal.SIGTERM)
    assert first.wait(10) == 0
    ended = time.monotonic()
    wait(lambda: pair.status(second).get("acts"), "the standby acts")
    assert time.monotonic() - ended < LONG_S, "it need not wait for the end of a lease that was given back"
    assert pair.status(second)["lease"]["term"] == 2


def test_a_standby_takes_over_from_a_holder_that_was_killed(pair: Pair) -> None:
    first = pair.spawn()
    pair.until(first, "ok")
    second = pair.spawn()
    pair.until(second, "standby")
    os.kill(first.pid, signal.SIGKILL)
    killed = time.monotonic()
    wait(lambda: pair.status(second).get("acts"), "the standby acts")
    assert time.monotonic() - killed < TTL_S + RENEW_S + 15.0, "the rest is this machine's slowness"
    pair.until(second, "ok")
    assert json.loads((pair.run_dir / "healer.json").read_text())["pid"] == second.pid
    pair.kill_rank(second, 2)
    wait(lambda: pair.acts(), "it heals")
    assert (pair.acts()[-1]["term"], pair.acts()[-1]["pid"]) == (2, second.pid)


def test_a_frozen_holder_that_wakes_after_a_takeover_never_acts_again(pair: Pair) -> None:
    first = pair.spawn()
    pair.until(first, "ok")
    second = pair.spawn()
    pair.until(second, "standby")
    ranks = [s["member"]["pid"] for s in pair.status(first)["group"]["slots"] if s["member"]]
    os.kill(first.pid, signal.SIGSTOP)
    pair.until(second, "ok")
    # what the frozen one would heal the moment it wakes
    os.kill(ranks[1], signal.SIGKILL)
    os.kill(ranks[3], signal.SIGKILL)
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait(20) == LEASE_LOST
    assert "the lease of term 1 is over" in (pair.folder / "log-0").read_text()
    assert [act for act in pair.acts() if act["pid"] == first.pid] == []
    assert pair.status(second)["acts"]
    pair.kill_rank(second, 0)
    wait(lambda: [act for act in pair.acts() if act["pid"] == second.pid], "the new holder heals")
    wait(lambda: pair.status(second)["state"] == "ok", "and writes its journal")
    entries = [json.loads(line) for line in healer("export", "--run-dir", str(pair.run_dir)).stdout.splitlines()]
    started = [e["seq"] for e in entries if e["body"].get("event") == "daemon-started"]
    by_first = [e["body"].get("event") for e in entries if e["seq"] > started[-1]]
    assert "daemon-ended" not in by_first, "the former holder wrote nothing after the takeover"
    third = pair.spawn()
    pair.until(third, "standby")


def test_a_standby_takes_over_with_the_policy_as_it_is_then(pair: Pair) -> None:
    first = pair.spawn()
    pair.until(first, "ok")
    second = pair.spawn()
    pair.until(second, "standby")
    before = pair.status(second)["policy_file"]["digest"]
    pair.policy.write_text(POLICY + SPEC.replace("minRanks: 2", "minRanks: 3") + lease())
    second.send_signal(signal.SIGHUP)
    wait(lambda: pair.status(second)["policy_file"]["digest"] != before, "read again")
    first.send_signal(signal.SIGTERM)
    pair.until(second, "ok")
    refused = httpx.post(pair.address(second) + "/scale", json={"ranks": 2})
    assert (refused.status_code, "minRanks 3" in refused.json()["error"]) == (409, True)


def test_without_a_way_to_the_store_nobody_acts(pair: Pair) -> None:
    (pair.folder / "lease").write_text("not a folder")
    only = pair.spawn()
    pair.until(only, "standby")
    wait(lambda: "cannot be read" in pair.status(only).get("why", ""), "it says what is wrong")
    assert pair.acts() == []
    assert not pair.status(only)["acts"]
