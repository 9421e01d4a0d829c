"""The daemon as its users meet it: a process, a command line and an HTTP API; only the executor is scripted."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.healer.support import POLICY

REPOSITORY = Path(__file__).parents[2]
SPEC = (
    "  api: {port: 0}\n"
    "  detection: {heartbeatInterval: 20ms, stallAfter: 300ms, silentAfter: 3s}\n"
    "  bounds: {minRanks: 2}\n"
)


def wait(check: Callable[[], Any], what: str, deadline_s: float = 30.0) -> Any:
    end = time.monotonic() + deadline_s
    while not (found := check()):
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.02)
    return found


def healer(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "healer.cli", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


class Daemon:
    def __init__(self, folder: Path, spec: str = SPEC) -> None:
        self.folder, self.policy, self.run_dir = folder, folder / "policy.yaml", folder / "run"
        self.policy.write_text(POLICY + spec)
        self.process: subprocess.Popen[bytes] | None = None
        self._groups: list[int] = []

    def spawn(self, *options: str, stderr: int | None = None) -> subprocess.Popen[bytes]:
        """`stderr`: a descriptor, instead of the file `log`."""
        command = [sys.executable, "-m", "tests.healer.scripted_daemon", "run", "--policy", str(self.policy), *options]
        with (self.folder / "log").open("ab") as log:
            to = log.fileno() if stderr is None else stderr
            self.process = subprocess.Popen(command, cwd=REPOSITORY, stderr=to, start_new_session=True)
        self._groups.append(self.process.pid)
        return self.process

    def start(self, *options: str) -> None:
        self.spawn(*options)
        wait(self.is_ok, "the daemon is ok")

    def is_ok(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        try:
            return bool(self.get("/status").json()["state"] == "ok")
        except (httpx.HTTPError, OSError, ValueError):
            return False

    @property
    def http(self) -> str:
        return str(json.loads((self.run_dir / "healer.json").read_text())["http"])

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.http + path, timeout=10)

    def post(self, path: str, **how: Any) -> httpx.Response:
        return httpx.post(self.http + path, timeout=10, **how)

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return healer(*arguments, "--run-dir", str(self.run_dir))

    def pid(self, slot: int) -> int:
        return int(self.get("/status").json()["group"]["slots"][slot]["member"]["pid"])

    def kill_and_heal(self, slot: int) -> None:
        known = len(self.get("/incidents").json())
        os.kill(self.pid(slot), signal.SIGKILL)
        wait(lambda: len(self.get("/incidents").json()) == known + 1 and self.is_ok(), "healed")

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def end(self) -> None:
        """The daemon, and the ranks that it left behind."""
        for group in self._groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self.process is not None:
            self.process.wait()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    found = Daemon(tmp_path_factory.mktemp("daemon"))
    try:
        found.start()
        yield found
    finally:
        found.end()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Daemon]:
    found = Daemon(tmp_path)
    try:
        yield found
    finally:
        found.end()


# --- API --------------------------------------------------------------------------------------------------------------


def test_health_and_liveness_are_told_by_status_code(daemon: Daemon) -> None:
    assert daemon.get("/healthz").status_code == 200
    alive = daemon.get("/livez")
    assert alive.status_code == 200
    assert alive.json()["loop_age_s"] < alive.json()["limit_s"]


def test_a_killed_rank_shows_in_history_decisions_status_and_metrics(daemon: Daemon) -> None:
    daemon.kill_and_heal(1)
    newest = daemon.get("/incidents").json()[-1]
    assert (newest["causes"], newest["slots"], newest["outcome"]) == (["process-death"], [1], "healed")
    timeline = daemon.get(f"/incidents/{newest['id']}").json()
    assert {"evidence", "verdict", "decision", "action", "outcome"} <= {e["kind"] for e in timeline["entries"]}
    decisions = [d["body"]["sentence"] for d in daemon.get("/decisions?limit=20").json()]
    assert any(s.startswith("replaces slot 1") for s in decisions)
    group = daemon.get("/status").json()["group"]
    assert group["slots"][1]["member"]["incarnation"] == 1
    metrics = daemon.get("/metrics").text
    for line in (
        r'healer_incidents_total\{cause="process-death"\} [1-9]',
        r'healer_decisions_total\{reason="rule-matched",step="replace"\} [1-9]',
        r"healer_reaction_seconds_count [1-9]",
        r'healer_build_info\{version="',
        r'elastic_sequences_total\{kind="loss",outcome="committed"\} [1-9]',
        r'elastic_pause_seconds_count\{kind="loss"\} [1-9]',
        r'elastic_phase_seconds_count\{kind="loss",phase="release"\} [1-9]',
        r'elastic_moved_bytes_total\{source="peer"\} 1000',
        r"elastic_live_ranks 4\.0",
        r"elastic_target_ranks 4\.0",
        r"elastic_losses_survivable 1\.0",
        r'elastic_captures_total\{incarnation="0",slot="0"\} 4\.0',
        r'elastic_address_changes_total\{incarnation="0",slot="0"\} 0\.0',
        r"healer_journal_entries [1-9]",
    ):
        assert re.search(line, metrics), line


def test_a_daemon_that_was_stopped_for_longer_than_the_stall_time_condemns_nobody(daemon: Daemon) -> None:
    before = len(daemon.get("/incidents").json())
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    daemon.process.send_signal(signal.SIGCONT)
    wait(lambda: 'what="telemetry-lost"' in daemon.get("/metrics").text, "it notices that it was late")
    wait(daemon.is_ok, "healthy again")
    assert len(daemon.get("/incidents").json()) == before


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"ranks": 99}, 409, "outside 1..6"),
        ({"ranks": 1}, 409, "below spec.bounds.minRanks 2"),
        ({"ranks": "four"}, 400, "Expected `int | null`"),
        ({"ranks": True}, 400, "Expected `int | null`"),
        ({"ranks": 4.5}, 400, "Expected `int | null`"),
        ({"slots": [0, "a"]}, 400, "Expected `int`"),
        ({"ranks": 3, "slots": [0]}, 400, "exactly one"),
        ({}, 400, "exactly one"),
        ({"rank": 3}, 400, "unknown field `rank`"),
        ([], 400, "Expected `object`"),
    ],
)
def test_a_scale_request_that_cannot_be_met_is_refused_with_the_reason(
    daemon: Daemon, body: object, status: int, why: str
) -> None:
    before = daemon.get("/status").json()["group"]["target"]
    answer = daemon.post("/scale", json=body)
    assert answer.status_code == status
    assert why in answer.json()["error"]
    assert daemon.get("/status").json()["group"]["target"] == before


def test_malformed_requests_get_clear_answers(daemon: Daemon) -> None:
    plain = {"Content-Type": "text/plain"}
    assert daemon.post("/scale", content='{"ranks": 4}', headers=plain).status_code == 415
    as_json = {"Content-Type": "application/json"}
    broken = daemon.post("/scale", content='{"ranks": 4', headers=as_json)
    assert (broken.status_code, "expected" in broken.json()["error"]) == (400, True)
    assert daemon.post("/scale", content=b" " * 100_000, headers=as_json).status_code == 413
    assert daemon.get("/scale").status_code == 405
    assert daemon.get("/nothing").status_code == 404
    assert daemon.get("/incidents/inc-999").status_code == 404
    for limit in ("0", "-1", "x", "1" * 30):
        answer = daemon.get(f"/decisions?limit={limit}")
        assert (answer.status_code, "expected 1 to" in answer.json()["error"]) == (400, True)


def test_control_needs_the_token_where_there_is_one_and_reading_does_not(fresh: Daemon) -> None:
    token = "correct-horse-battery-staple"
    (fresh.folder / "token").write_text(token + "\n")
    fresh.policy.write_text(POLICY + SPEC.replace("{port: 0}", "{host: 0.0.0.0, port: 0, tokenFile: token}"))
    fresh.start()
    assert fresh.get("/status").status_code == 200
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {token}"}):
        answer = fresh.post("/scale", json={"ranks": 3}, headers=header)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert fresh.post("/scale", json={"ranks": 3}, headers={"Authorization": f"Bearer {token}"}).status_code == 202
    done = fresh.cli("scale", "4", "--wait")
    assert (done.returncode, done.stdout) == (0, "live: 4 ranks on slots 0, 1, 2, 3\n"), done.stderr
    assert token not in fresh.log()


# --- command line -----------------------------------------------------------------------------------------------------


def test_status_prints_a_table_of_at_most_100_columns_and_json(daemon: Daemon) -> None:
    shown = daemon.cli("status")
    assert shown.returncode == 0, shown.stderr
    assert "test is ok: epoch" in shown.stdout
    assert "VERDICT" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 100
    assert json.loads(daemon.cli("status", "--json").stdout)["state"] == "ok"
    by_policy = healer("status", "--policy", str(daemon.policy), "--json")
    assert json.loads(by_policy.stdout)["pid"] == daemon.get("/status").json()["pid"]


def test_history_shows_incidents_and_one_as_a_timeline(daemon: Daemon) -> None:
    daemon.kill_and_heal(3)
    newest = json.loads(daemon.cli("history", "--json").stdout)[-1]["id"]
    table = daemon.cli("history")
    assert newest in table.stdout
    assert "process-death" in table.stdout
    story = daemon.cli("history", newest).stdout
    for word in ("evidence", "unhealthy", "replaces slot 3", "loss of slots [3] committed", "pause on slot", "weights"):
        assert word in story
    assert max(map(len, (table.stdout + story).splitlines())) <= 100
    unknown = daemon.cli("history", "inc-999")
    assert unknown.returncode == 1
    assert "no incident" in unknown.stderr


def test_scale_says_the_target_and_refuses_with_the_reason(daemon: Daemon) -> None:
    done = daemon.cli("scale", "5", "--wait")
    assert (done.returncode, done.stdout) == (0, "live: 5 ranks on slots 0, 1, 2, 3, 4\n"), done.stderr
    assert daemon.cli("scale", "4", "--wait").returncode == 0
    refused = daemon.cli("scale", "1")
    assert refused.returncode == 1
    assert refused.stderr == "error: a target of 1 is below spec.bounds.minRanks 2\n"


def test_status_of_a_degraded_group_has_its_own_exit_code(fresh: Daemon) -> None:
    fresh.start()
    assert fresh.process is not None
    fresh.policy.write_text(POLICY + SPEC + "  dryRun: true\n")
    fresh.process.send_signal(signal.SIGHUP)
    wait(lambda: fresh.get("/status").json()["dry_run"], "a dry run from now on")
    os.kill(fresh.pid(2), signal.SIGKILL)
    wait(lambda: fresh.get("/status").json()["state"] == "degraded", "degraded")
    shown = fresh.cli("status")
    assert shown.returncode == 3
    assert "dry run" in shown.stdout
    # nobody may go on without it, so nobody is served
    assert fresh.get("/healthz").status_code == 503
    refused = fresh.cli("stop", "--policy", str(fresh.policy))
    assert (refused.returncode, "dryRun" in refused.stderr) == (1, True)
    fresh.policy.write_text(POLICY + SPEC)
    fresh.process.send_signal(signal.SIGHUP)
    wait(fresh.is_ok, "it acts again")


def test_sigterm_leaves_the_ranks_alone_and_the_history_readable(fresh: Daemon) -> None:
    fresh.start("--log-format", "json")
    fresh.kill_and_heal(0)
    pids = [fresh.pid(slot) for slot in range(4)]
    assert fresh.process is not None
    fresh.process.send_signal(signal.SIGTERM)
    assert fresh.process.wait(30) == 0
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not (fresh.run_dir / "healer.json").exists()
    assert "process-death" in fresh.cli("history").stdout
    assert "replaces slot 0" in fresh.cli("history", "inc-1").stdout
    gone = fresh.cli("status")
    assert (gone.returncode, "healer run" in gone.stderr) == (1, True)
    events = [json.loads(line)["event"] for line in fresh.log().splitlines()]
    assert {"daemon.listening", "target.started", "decision", "incident.closed", "daemon.ended"} <= set(events)


def test_a_recorded_run_can_be_judged_again_and_the_sensors_tell_how_they_are(fresh: Daemon) -> None:
    trace = fresh.folder / "trace.jsonl"
    fresh.start("--record", str(trace))
    fresh.kill_and_heal(2)
    sensors = json.loads(fresh.cli("sensors", "--json").stdout)
    by_name = {s["name"]: s for s in sensors}
    assert by_name["heartbeats"]["state"] == "ok"
    assert by_name["heartbeats"]["readings"] > 10
    assert {"liveness", "processes", "stragglers", "nvml"} <= by_name.keys()
    shown = fresh.cli("sensors").stdout
    assert "heartbeats" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert fresh.process is not None
    fresh.process.send_signal(signal.SIGTERM)
    assert fresh.process.wait(30) == 0
    judged = json.loads(healer("diagnose", str(trace), "--json").stdout)
    assert [(one["cause"], one["slots"]) for one in judged["incidents"]] == [("process-death", [2])]
    assert judged["incidents"][0]["closed_at"] is not None


def test_stop_ends_the_ranks_and_the_daemon(fresh: Daemon) -> None:
    fresh.start()
    pids = [fresh.pid(slot) for slot in range(4)]
    done = fresh.cli("stop")
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr
    assert fresh.process is not None
    assert fresh.process.wait(10) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_second_daemon_for_the_same_directory_is_refused_and_the_first_undisturbed(daemon: Daemon) -> None:
    other = daemon.cli("status", "--json")
    second = healer("run", "--policy", str(daemon.policy))
    assert second.returncode == 1
    assert "another daemon runs here" in second.stderr
    assert "Traceback" not in second.stderr
    assert json.loads(daemon.cli("status", "--json").stdout)["pid"] == json.loads(other.stdout)["pid"]


def test_an_address_file_that_somebody_removes_is_there_again_within_seconds(daemon: Daemon) -> None:
    (daemon.run_dir / "healer.json").unlink()
    wait(lambda: (daemon.run_dir / "healer.json").exists(), "it is written again", 10)
    assert daemon.cli("status").returncode == 0


def test_an_address_in_use_is_one_clear_error(fresh: Daemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fresh.policy.write_text(POLICY + SPEC.replace("{port: 0}", f"{{port: {port}}}"))
        done = healer("run", "--policy", str(fresh.policy))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_bad_policies_end_in_messages_and_an_exit_code(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(POLICY.replace("ranks: 4", "ranks: -4") + "  dryrun: true\n")
    for command in (("run", "--policy"), ("policy", "check")):
        done = healer(*command, str(tmp_path / "bad.yaml"))
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[0] == "error: the policy has 2 problems"
        assert done.stderr.splitlines()[1].endswith(":10:12: spec.target.ranks: -4 is not valid, expected at least 1")
    report = json.loads(healer("policy", "check", str(tmp_path / "bad.yaml"), "--json").stdout)
    assert (report["ok"], len(report["problems"])) == (False, 2)


def test_a_missing_checkpoint_is_one_clear_error_and_leaves_no_address_behind(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY + SPEC)
    done = healer("run", "--policy", str(tmp_path / "policy.yaml"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    assert "model/config.json: no such file" in done.stderr
    assert not (tmp_path / "run" / "healer.json").exists()


def test_wrong_usage_has_its_own_exit_code_and_help_documents_all(tmp_path: Path) -> None:
    assert healer("scale", "four").returncode == 2
    assert healer("status").returncode == 2
    assert healer("nonsense").returncode == 2
    assert "Exit codes" in healer("--help").stdout
    assert healer("--version").stdout.startswith("healer ")


def test_the_daemon_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, healer.daemon, healer.cli, healer.policy.load; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
