"""Who was started for which slot, and which slots are wanted: what a controller writes down for the next one."""

import logging
from collections.abc import Callable, Collection, Mapping

from elastic.config import GroupConfig
from elastic.controller.group import Group
from elastic.controller.state import GroupState, save_state
from elastic.launch.base import Launched
from elastic.paths import socket_path
from elastic.view import Member

log = logging.getLogger(__name__)


class Roster:
    """Lives in the executor's loop. Saved before and after each launch and with each view."""

    def __init__(
        self,
        config: GroupConfig,
        group: Group,
        coming: Callable[[], Collection[int]],
        why_not: Callable[[], str],
        term: int = 0,
    ) -> None:
        """`coming`: the slots whose processes boot, or wait to join. `why_not`: why this controller may not act, in words;
        then nothing is written."""
        self.target: tuple[int, ...] = ()
        self.incarnations: dict[int, int] = {}
        """The highest that each slot was given."""
        self._config, self._group, self._term = config, group, term
        self._coming, self._why_not = coming, why_not
        self._started: dict[int, Member] = {}
        self._error = ""

    def recall(self, used: Mapping[int, int], state: GroupState | None) -> None:
        """What an earlier controller left: incarnations that are `used`, and its `state`."""
        self.incarnations = dict(used)
        for slot, incarnation in (state.incarnations if state is not None else {}).items():
            self.incarnations[slot] = max(self.incarnations.get(slot, 0), incarnation)

    def next_incarnation(self, slot: int) -> int:
        self.incarnations[slot] = self.incarnations.get(slot, 0) + 1
        return self.incarnations[slot]

    def meet(self, member: Member) -> None:
        """A process that runs already."""
        self._started[member.slot] = member
        self.incarnations[member.slot] = max(self.incarnations.get(member.slot, 0), member.incarnation)

    def remember(self, slot: int, incarnation: int, started: Launched | None) -> None:
        """`started`: None when that process is gone."""
        if started is None:
            self._started.pop(slot, None)
        else:
            address = socket_path(self._config.root, slot, incarnation)
            self._started[slot] = Member(slot, incarnation, started.pid, started.pid_start, address)
        self.save()

    def forget(self) -> None:
        """The group has ended."""
        self._started.clear()
        self.save()

    def save(self) -> None:
        if self._why_not():
            return
        coming = self._coming()
        members = {s: m for s, m in self._started.items() if s in coming}
        members |= {s: link.member for s, link in self._group.links.items()}
        state = GroupState(
            group=self._config.name,
            epoch=self._group.epoch,
            target=self.target,
            members=tuple(members[s] for s in sorted(members)),
            incarnations=dict(self.incarnations),
        )
        error = ""
        try:
            save_state(self._config, state, self._term)
        except OSError as failure:
            # a hint for the next controller, which asks the ranks in any case: a full disk must not end healing
            error = str(failure)
        if error and error != self._error:
            log.error("the group's state cannot be saved: %s", error)
        self._error = error
