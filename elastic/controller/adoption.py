"""Finding a running group again: who is there, and which view they last agreed on. The ranks are the truth."""

import re
from collections.abc import Callable

from elastic.config import GroupConfig
from elastic.controller.link import RankLink
from elastic.controller.records import Event
from elastic.controller.state import GroupState
from elastic.errors import ElasticError
from elastic.launch.base import Launched, Launcher
from elastic.view import View

ANSWER_S = 5.0

_SOCKET = re.compile(r"rank-(\d+)\.(\d+)\.sock")


async def find_members(
    config: GroupConfig, state: GroupState | None, launcher: Launcher, on_event: Callable[[Event], None]
) -> dict[int, list[RankLink]]:
    """Connect to every rank that answers, by the sockets in the run directory; usually one a slot. Processes of this
    group that do not answer are ended: half-booted, stopped, or of a slot that was given up. Sockets of the dead are
    removed."""
    found: dict[int, list[RankLink]] = {}
    answered: set[int] = set()
    for path in sorted(config.root.glob("rank-*.sock")):
        if (match := _SOCKET.fullmatch(path.name)) is None:
            continue
        slot, incarnation = int(match[1]), int(match[2])
        try:
            link = await RankLink.open(slot, incarnation, str(path), config.name, on_event, deadline_s=ANSWER_S)
        except ElasticError:
            path.unlink(missing_ok=True)
            continue
        found.setdefault(slot, []).append(link)
        answered.add(link.member.pid)
    known_gateway = _gateway_pid(config)
    for stray in launcher.strays():
        if stray.pid not in answered and stray.pid != known_gateway:
            launcher.end(stray)
    for member in state.members if state else ():
        if member.pid not in answered:
            launcher.end(Launched(member.pid, member.pid_start))
    return found


def view_of(found: dict[int, list[RankLink]]) -> tuple[dict[int, RankLink], View | None, list[RankLink]]:
    """The newest view that any rank committed, the link for each slot, and processes that have no place: older
    incarnations of a slot. Ranks that are in no view, or only in an older one, are joiners again."""
    views = [link.status.view for links in found.values() for link in links if link.status.view is not None]
    newest = max(views, key=lambda v: v.epoch, default=None)
    chosen: dict[int, RankLink] = {}
    strays: list[RankLink] = []
    for slot, links in found.items():
        links = sorted(links, key=lambda link: link.member.incarnation)
        chosen[slot] = links[-1]
        strays += links[:-1]
    return chosen, newest, strays


def _gateway_pid(config: GroupConfig) -> int:
    from elastic.controller.state import GatewayProcess
    from elastic.paths import gateway_path, read_json

    try:
        return read_json(gateway_path(config.root), GatewayProcess).pid
    except ElasticError:
        return 0
