"""Faults are sent to real processes, and only to the ranks of the group that was named."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from chaos import cli, inject
from elastic import process
from elastic.controller.state import GroupState
from elastic.errors import ElasticError, Retryable
from elastic.paths import state_path, write_json
from elastic.view import Member


class Group:
    """Processes that stand for ranks, listed in a run directory as the executor lists them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.children: list[subprocess.Popen[bytes]] = []
        self.members: list[Member] = []

    def spawn(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        self.children.append(child)
        return child

    def add(self, slot: int, *, incarnation: int = 1, pid_start_off_by: int = 0) -> subprocess.Popen[bytes]:
        child = self.spawn()
        start = process.start_time(child.pid) + pid_start_off_by
        self.members.append(Member(slot, incarnation, child.pid, start, str(self.run_dir / f"rank-{slot}.sock")))
        self.write()
        return child

    def write(self) -> None:
        highest = {m.slot: m.incarnation for m in self.members}
        state = GroupState("test", 1, tuple(highest), tuple(self.members), highest)
        write_json(state_path(self.run_dir), state)

    def end(self) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait(timeout=10)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path)
    yield group
    group.end()


@pytest.fixture
def command(group: Group) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli.app, ["inject", *arguments, "--run-dir", str(group.run_dir)])

    return run


def test_kill_ends_the_ranks_of_the_named_slots_and_no_other(group: Group) -> None:
    ranks = [group.add(slot) for slot in range(3)]
    done = inject.kill(group.run_dir, [2, 0])
    inject.await_effect(done, deadline_s=10)
    assert [i.member.slot for i in done] == [0, 2]
    assert ranks[0].wait(timeout=10) == ranks[2].wait(timeout=10) == -signal.SIGKILL
    assert ranks[1].poll() is None
    assert done[0].sent <= time.monotonic()


def test_a_stopped_rank_hangs_until_it_is_continued(group: Group) -> None:
    rank = group.add(1)
    stopped = inject.stop(group.run_dir, [1])
    inject.await_effect(stopped, deadline_s=10)
    assert process.state(rank.pid, group.members[0].pid_start) == "T"
    resumed = inject.cont(group.run_dir, [1])
    inject.await_effect(resumed, deadline_s=10)
    assert resumed[0].state_before == "T"
    assert process.state(rank.pid, group.members[0].pid_start) not in "TZX"


def test_a_stopped_rank_can_be_killed(group: Group) -> None:
    rank = group.add(0)
    inject.await_effect(inject.stop(group.run_dir, [0]), deadline_s=10)
    inject.await_effect(inject.kill(group.run_dir, [0]), deadline_s=10)
    assert rank.wait(timeout=10) == -signal.SIGKILL


@pytest.mark.parametrize("fault", [inject.kill, inject.stop, inject.cont])
def test_a_recycled_pid_is_never_signalled(group: Group, fault: cli.Injector) -> None:
    stranger = group.add(1, pid_start_off_by=-1)
    with pytest.raises(ElasticError, match="no living rank in slot 1"):
        fault(group.run_dir, [1])
    assert process.state(stranger.pid, process.start_time(stranger.pid)) not in "TZX"
    assert stranger.poll() is None


def test_one_wrong_slot_stops_the_whole_injection(group: Group) -> None:
    ranks = [group.add(slot) for slot in range(2)]
    with pytest.raises(ElasticError, match="no living rank in slot 5, 7; slots with one: 0, 1"):
        inject.kill(group.run_dir, [0, 1, 5, 7])
    assert all(rank.poll() is None for rank in ranks)


def test_a_dead_rank_is_refused_even_while_it_is_a_zombie(group: Group) -> None:
    rank = group.add(0)
    inject.await_effect(inject.kill(group.run_dir, [0]), deadline_s=10)
    # exits without being collected: waits until it can be collected, and leaves it so
    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
    assert process.state(rank.pid, group.members[0].pid_start) == "Z"
    with pytest.raises(ElasticError, match="slots with one: none"):
        inject.kill(group.run_dir, [0])


def test_the_newest_incarnation_of_a_slot_is_meant(group: Group) -> None:
    new = group.add(0, incarnation=2)
    old = group.add(0, incarnation=1)
    assert inject.kill(group.run_dir, [0])[0].member.incarnation == 2
    assert new.wait(timeout=10) == -signal.SIGKILL
    assert old.poll() is None


def test_an_effect_that_does_not_show_ends_at_the_deadline(group: Group) -> None:
    group.add(0)
    sent = inject.cont(group.run_dir, [0])[0]
    with pytest.raises(Retryable, match=r"rank 0\.1 .*shows no effect after 0\.05 s"):
        inject.await_effect([msgspec.structs.replace(sent, fault="stop")], deadline_s=0.05)


def test_the_command_prints_how_to_take_a_stop_back(group: Group, command: Callable[..., Result]) -> None:
    rank = group.add(1)
    result = command("stop", "--slot", "1")
    assert result.exit_code == 0
    undo = result.output.split("undo: healer-chaos ")[1].split()
    assert CliRunner().invoke(cli.app, undo).exit_code == 0
    assert process.state(rank.pid, group.members[0].pid_start) not in "TZX"


def test_the_command_tells_in_json_what_was_sent(group: Group, command: Callable[..., Result]) -> None:
    ranks = [group.add(slot) for slot in range(2)]
    result = command("kill", "--slot", "1", "--slot", "0", "--json")
    assert result.exit_code == 0
    injected = json.loads(result.stdout)["injected"]
    assert [(i["fault"], i["member"]["pid"]) for i in injected] == [("kill", rank.pid) for rank in ranks]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "no group runs here; name its run directory with --run-dir"),
        ("{", "cannot be read"),
        ('{"group": "a", "members": [{"slot": "one"}]}', "cannot be read"),
    ],
)
def test_a_run_directory_without_a_group_is_one_clear_error(
    group: Group, command: Callable[..., Result], state: str | None, message: str
) -> None:
    if state is not None:
        state_path(group.run_dir).write_text(state)
    result = command("kill", "--slot", "0")
    assert result.exit_code == cli.REFUSED
    assert message in result.stderr
    assert str(group.run_dir) in result.stderr
    as_json = command("kill", "--slot", "0", "--json")
    assert as_json.exit_code == cli.REFUSED
    assert message in json.loads(as_json.stdout)["error"]


@pytest.mark.parametrize("arguments", [("kill",), ("kill", "--slot", "-1"), ("kill", "--slot", "x"), ("burn",)])
def test_wrong_usage_sends_nothing(group: Group, command: Callable[..., Result], arguments: tuple[str, ...]) -> None:
    rank = group.add(0)
    assert command(*arguments).exit_code == 2
    assert rank.poll() is None


def test_the_installed_command_ends_without_a_traceback(group: Group) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "chaos.cli", "inject", "kill", "--slot", "0", "--run-dir", str(group.run_dir)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == cli.REFUSED
    assert ended.stderr.startswith("healer-chaos: ")
    assert "Traceback" not in ended.stderr


def test_an_armed_fault_is_sent_on_the_order_and_not_before(group: Group) -> None:
    rank = group.add(1)
    command = [sys.executable, "-m", "chaos.cli", "inject", "kill", "--slot", "1", "--armed", "--json"]
    with subprocess.Popen(
        [*command, "--run-dir", str(group.run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as injector:
        assert injector.stderr is not None
        assert "armed" in injector.stderr.readline()
        ordered = time.monotonic()
        assert rank.poll() is None
        out, _ = injector.communicate("\n", timeout=10)
    assert json.loads(out)["injected"][0]["sent"] >= ordered
    assert rank.wait(timeout=10) == -signal.SIGKILL


def test_an_armed_fault_is_dropped_when_nobody_is_left_to_give_the_order(group: Group) -> None:
    rank = group.add(1)
    command = [sys.executable, "-m", "chaos.cli", "inject", "kill", "--slot", "1", "--armed"]
    done = subprocess.run(
        [*command, "--run-dir", str(group.run_dir)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == cli.REFUSED
    assert "nothing was sent" in done.stderr
    assert rank.poll() is None
