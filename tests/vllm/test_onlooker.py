"""Daemons that must not touch what another one has: dry runs, and daemons whose lease is over."""

import json
import os
import signal
from pathlib import Path

import pytest

from elastic import process
from elastic.controller.records import Event, RankGone
from elastic.errors import ElasticError
from elastic.paths import log_path
from healer.authority import Authority
from healer.targets.vllm import polling
from healer.targets.vllm.records import Part
from healer.targets.vllm.target import VllmGroupTarget
from tests.vllm.stand import Stand, standing

pytestmark = pytest.mark.timeout(120)


async def test_a_dry_run_watches_and_changes_nothing(tmp_path: Path) -> None:
    def written() -> dict[str, bytes]:
        return {name: (tmp_path / "run" / name).read_bytes() for name in ("group.json", "routes.json", "router.json")}

    async with standing(tmp_path) as stand:
        await stand.until(lambda: json.loads(written()["router.json"])["epoch"] > 0)
        await stand.target.close()
        before, files = stand.pids(), written()
        onlooker = stand.another(observe_only=True)
        await onlooker.start()
        assert stand.pids() == before
        stand.fault("hang")
        stand.target.lose([1], cause="hang", detected=0.0, replace=True)
        os.kill(stand.pid(1, Part.ENGINE), signal.SIGKILL)
        await stand.until(lambda: any(isinstance(e, RankGone) for e in stand.events))
        polls = onlooker._poller._polls
        await stand.until(lambda: onlooker._poller._polls > polls + 20)
        await onlooker.stop()
        assert stand.incarnations() == {0: 0, 1: 0}
        assert written() == files
        router = json.loads(files["router.json"])
        assert process.is_alive(router["pid"], router["pid_start"])
        stand.fault("hang", on=False)
        await stand.another().start()


async def test_a_dry_run_starts_no_group(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        await stand.target.stop()
        with pytest.raises(ElasticError, match="no group 'fake' serves here, and a dry run starts none"):
            await stand.another(observe_only=True).start()
        assert not stand.pids()
        assert not (tmp_path / "run/logs/rank-0.1.log").exists()


async def heal(stand: Stand, acting: VllmGroupTarget, incarnations: dict[int, int]) -> None:
    os.kill(stand.pid(1, Part.ENGINE), signal.SIGKILL)
    await stand.until(lambda: any(isinstance(e, RankGone) for e in stand.events))
    acting.lose([1], cause="process-death", detected=0.0, replace=True)
    await stand.until(lambda: stand.incarnations() == incarnations)
    stand.clean()
    await stand.serves(0, 1)
    stand.events.clear()


async def test_a_dry_run_follows_what_the_acting_daemon_does(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        acting, seen = stand.target, list[Event]()
        onlooker = VllmGroupTarget(stand.policy, seen.append, observe_only=True)
        await onlooker.start()
        try:
            await heal(stand, acting, {0: 1, 1: 1})
            await stand.until(lambda: {h.slot: h.pid for h in onlooker.group.held()} == pids(acting))
            seen.clear()
            os.kill(stand.pid(1, Part.ENGINE), signal.SIGKILL)
            await stand.until(lambda: [e.member.slot for e in seen if isinstance(e, RankGone)] == [1])
            acting.lose([1], cause="process-death", detected=0.0, replace=True)
            await stand.until(lambda: stand.incarnations() == {0: 2, 1: 2})
            stand.clean()
            await stand.serves(0, 1)
            acting.scale(3, reason="test")
            await stand.serves(0, 1, 2)
            await stand.until(lambda: onlooker.observe().live == (0, 1, 2))
        finally:
            await onlooker.close()


def pids(target: VllmGroupTarget) -> dict[int, int]:
    return {held.slot: held.pid for held in target.group.held()}


async def test_a_dry_run_leaves_a_file_alone_that_it_cannot_read(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        acting, path = stand.target, tmp_path / "run/group.json"
        found = json.loads(path.read_text())
        del found["rpc_port"]  # as another version would write it
        path.write_text(json.dumps(found))
        with pytest.raises(ElasticError, match="a dry run starts none"):
            await stand.another(observe_only=True).start()
        stand.target = acting
        assert json.loads(path.read_text()) == found


async def test_a_dry_run_cuts_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "LOOK_AFTER_LOGS", 2)
    async with standing(tmp_path) as stand:
        acting, cut = stand.target, list[str]()
        onlooker = stand.another(observe_only=True)
        monkeypatch.setattr(onlooker._processes, "cut_log", lambda name, limit: cut.append(name))
        await onlooker.start()
        polls = onlooker._poller._polls
        await stand.until(lambda: onlooker._poller._polls > polls + 4)
        await onlooker.close()
        stand.target = acting
        assert not cut
        assert log_path(tmp_path / "run", "rank-0.0").exists()


async def test_a_daemon_whose_lease_is_over_writes_nothing_any_more(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        await stand.target.close()
        authority = Authority()
        old = stand.target = VllmGroupTarget(stand.policy, stand.events.append, authority=authority)
        await old.start()
        authority.end("another daemon has the lease")
        acting = stand.another()
        await acting.start()
        await heal(stand, acting, {0: 1, 1: 1})
        files = {name: (tmp_path / "run" / name).read_bytes() for name in ("group.json", "routes.json")}
        await old.close()
        assert {name: (tmp_path / "run" / name).read_bytes() for name in files} == files
