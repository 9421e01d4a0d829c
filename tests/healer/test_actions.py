"""Healing end to end in the real supervisor: real processes as ranks, real hooks, a real journal across restarts."""

import signal
from pathlib import Path

from healer.journal import Kind
from healer.orders import Scale
from healer.policy.memory import Memory
from tests.healer.supervised import Rig
from tests.healer.support import eventually


def rules(rules_: str, more: str = "") -> str:
    return f"  healing: {{rules: [{rules_}]}}\n{more}"


async def test_a_gpu_is_reset_in_an_emptied_slot_before_a_rank_is_started_there_again(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    hooks = (
        f'  hooks: {{reset: {{kind: reset, command: [/bin/sh, -c, "echo slot $HEALER_SLOT $HEALER_CAUSE > {seen}"], '
        "deadline: 20s}}\n"
    )
    rig = Rig(tmp_path, rules("{name: all, actions: [{hook: reset}, replace]}", hooks))
    try:
        await rig.start()
        rig.executor.signal(2, signal.SIGKILL)
        await rig.healed()
        assert seen.read_text() == "slot 2 process-death\n"
        assert [call[:2] for call in rig.executor.calls] == [("scale-down", (2,)), ("scale", (0, 1, 2, 3))]
        outcomes = [e.body for e in rig.journal.recent(Kind.OUTCOME, 10) if "hook" in e.body]
        assert [(one["hook"], one["slot"], one["ok"]) for one in outcomes] == [("reset", 2, True)]
        assert rig.executor.status().live == (0, 1, 2, 3)
    finally:
        await rig.end()


async def test_a_hook_that_tells_somebody_holds_no_survivor_up(tmp_path: Path) -> None:
    hooks = '  hooks: {page: {kind: exec, command: ["/bin/sleep", "600"], deadline: 10m}}\n'
    rig = Rig(tmp_path, rules("{name: all, actions: [{hook: page}, replace]}", hooks))
    try:
        await rig.start()
        rig.executor.signal(1, signal.SIGKILL)
        await rig.healed()
        assert [call[:2] for call in rig.executor.calls] == [("replace", (1,))]
    finally:
        await rig.end()


async def test_a_slot_that_is_quarantined_stays_so_when_the_daemon_is_started_again(tmp_path: Path) -> None:
    more = "  bounds: {minRanks: 2, faultBudget: {failures: 1, window: 1h, quarantine: 1h}}\n"
    first = Rig(tmp_path, rules("{name: all, actions: [replace, human]}", more))
    try:
        await first.start()
        first.executor.signal(3, signal.SIGKILL)
        await eventually(lambda: first.executor.status().live == (0, 1, 2), "the slot is given up")
    finally:
        await first.end()
    second = Rig(tmp_path, rules("{name: all, actions: [replace, human]}", more))
    try:
        held = second.supervisor._roster.memory.quarantined
        assert set(held) == {3}
        assert held[3].removed
    finally:
        second.executor.end()
        second.journal.close()


async def test_a_healed_group_leaves_nothing_to_remember_but_its_faults(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rules("{name: all, actions: [replace]}"))
    try:
        await rig.start()
        rig.executor.signal(0, signal.SIGKILL)
        await rig.healed()
        memory = rig.supervisor._roster.memory
        await eventually(lambda: not rig.supervisor._roster.memory.ladders, "the ladder is over")
        assert set(memory.faults) == {0}
        assert rig.supervisor._roster.memory == Memory(faults=memory.faults)
    finally:
        await rig.end()


async def test_a_group_that_an_operator_sets_while_a_slot_is_repaired_stays_as_he_set_it(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    hooks = (
        f'  hooks: {{reset: {{kind: reset, command: [/bin/sh, -c, "until [ -e {go_on} ]; do sleep 0.05; done"], '
        "deadline: 60s}}\n"
    )
    rig = Rig(tmp_path, rules("{name: all, actions: [{hook: reset}, replace]}", hooks))
    try:
        await rig.start()
        rig.executor.signal(2, signal.SIGKILL)
        await eventually(lambda: rig.executor.status().live == (0, 1, 3), "the slot is emptied for its repair")
        rig.supervisor.order(Scale(slots=[0, 1, 3]), who="alice")
        go_on.touch()
        await eventually(lambda: [e for e in rig.journal.recent(Kind.OUTCOME, 10) if "hook" in e.body], "the hook ends")
        await rig.rounds(20)
        assert rig.executor.status().target == (0, 1, 3)
        assert [call[0] for call in rig.executor.calls] == ["scale-down", "scale"]
        assert rig.incidents()[0].outcome == "reduced"
    finally:
        await rig.end()
