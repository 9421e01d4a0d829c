"""A group as somebody sees it who has no say in it: the view, the ranks and their beats, whoever commands them.

An observer holds no lock and no lease, has no term, and gives no order: ranks answer its questions whatever term they have
seen, and would refuse it everything else. It follows the group through losses and joins by looking at the sockets in the run
directory and asking whoever listens there.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from elastic import process
from elastic.config import GroupConfig, read_model_shape
from elastic.controller.adoption import refuse_other_shape, view_of
from elastic.controller.group import Group
from elastic.controller.link import RankLink
from elastic.controller.records import Event, GroupStatus, RankBeat, RankGone
from elastic.controller.state import GatewayProcess, GroupState
from elastic.controller.status import group_status
from elastic.errors import ElasticError
from elastic.paths import gateway_path, read_json, state_path

ANSWER_S = 5.0
LOOK_S = 0.5
"""Between two looks at who is there, where nothing else asks for one."""

_SOCKET = re.compile(r"rank-(\d+)\.(\d+)\.sock")
_Key = tuple[int, int]


class _Nothing:
    """What an observer knows of ranks on their way, and of spares: nothing."""

    booting: Collection[int] = ()
    ready: Mapping[int, RankLink] = {}
    quarantined: Mapping[int, str] = {}


class Observer:
    """Lives in the owner's event loop."""

    def __init__(self, config: GroupConfig, on_event: Callable[[Event], None]) -> None:
        """Raises ElasticError for a bad checkpoint."""
        self._config, self._on_event = config, on_event
        self._group = Group(config, read_model_shape(config.checkpoint))
        self._links: dict[_Key, RankLink] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Find the group. Raises ElasticError where none runs, or one of other sizes."""
        await self._look()
        if self._group.view is None:
            await self.close()
            raise ElasticError(f"{self._config.run_dir}: no group serves here, and an observer starts none")
        refuse_other_shape(self._config)
        self._task = asyncio.create_task(self._follow(), name="observer")
        return f"observes the running group: slots {list(self._group.live)} at epoch {self._group.epoch}"

    def status(self) -> GroupStatus:
        group = self._group
        return group_status(
            group,
            _Nothing(),
            (),
            target=self._target(),
            lost=(),
            sequence=None,
            gateway="" if self.gateway_http else "no gateway: its process is gone",
            term=max((link.status.term for link in group.links.values()), default=0),
            fenced="",
        )

    @property
    def gateway_http(self) -> str:
        with contextlib.suppress(ElasticError):
            found = read_json(gateway_path(self._config.root), GatewayProcess)
            if process.is_alive(found.pid, found.pid_start):
                return found.http
        return ""

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for link in self._links.values():
            await link.aclose()

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            self._wake.clear()
            # whatever is there at this moment, it is looked at again
            with contextlib.suppress(ElasticError, OSError):
                await self._look()

    async def _look(self) -> None:
        paths = {
            (int(m[1]), int(m[2])): p for p in self._config.root.glob("rank-*.sock") if (m := _SOCKET.fullmatch(p.name))
        }
        await asyncio.gather(
            *(self._meet(key, path) for key, path in paths.items() if key not in self._links),
            *(self._ask(link) for link in self._links.values() if not link.gone and _moved_on(link)),
        )
        alive: dict[int, list[RankLink]] = {}
        for (slot, _), link in self._links.items():
            if not link.gone:
                alive.setdefault(slot, []).append(link)
        links, view, _ = view_of(alive)
        group = self._group
        if view is not None and (group.view is None or view.epoch >= group.view.epoch):
            group.view = view
        if group.view is None:
            return
        group.epoch = max(group.epoch, group.view.epoch)
        # one that has died stays, as what it was, until the group has a view without it
        held = {slot: link for slot, link in links.items() if link.status.view is not None}
        group.links = {
            slot: held.get(slot) or group.links[slot] for slot in group.live if slot in {*held, *group.links}
        }
        for key, link in list(self._links.items()):
            if link.gone and group.links.get(key[0]) is not link:
                await link.aclose()
                if key not in paths:
                    del self._links[key]

    async def _meet(self, key: _Key, path: Path) -> None:
        # a socket of the dead, or of one that is stopped: no rank for now
        with contextlib.suppress(ElasticError):
            self._links[key] = await RankLink.open(
                *key, str(path), self._config.name, self._event, deadline_s=ANSWER_S, observe=True
            )

    async def _ask(self, link: RankLink) -> None:
        with contextlib.suppress(ElasticError):
            await link.refresh(deadline_s=ANSWER_S)

    def _event(self, event: Event) -> None:
        if isinstance(event, RankGone) or (isinstance(event, RankBeat) and self._stale(event)):
            self._wake.set()
        self._on_event(event)

    def _stale(self, event: RankBeat) -> bool:
        link = self._links.get((event.member.slot, event.member.incarnation))
        return link is not None and _moved_on(link)

    def _target(self) -> tuple[int, ...]:
        """As whoever commands the group has written it down."""
        with contextlib.suppress(ElasticError):
            return read_json(state_path(self._config.root), GroupState).target
        return self._group.live


def _moved_on(link: RankLink) -> bool:
    """Its beats tell of more than it last answered."""
    beat, said = link.beat, link.status
    return beat is not None and (beat.epoch, beat.phase) != (said.epoch, said.phase)
