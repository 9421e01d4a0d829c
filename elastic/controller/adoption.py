"""Finding a running group again: who is there, and which view they last agreed on. The ranks are the truth."""

import asyncio
import re
from collections.abc import Callable, Collection
from pathlib import Path

from elastic.config import GroupConfig
from elastic.controller.link import RankLink
from elastic.controller.records import Event
from elastic.controller.state import GatewayProcess, GroupState
from elastic.errors import ElasticError, Superseded
from elastic.launch.base import Launched, Launcher
from elastic.paths import config_path, gateway_path, log_path, read_config, read_json
from elastic.view import View

ANSWER_S = 5.0

FIXED = (
    "name",
    "checkpoint",
    "max_ranks",
    "slots_per_rank",
    "max_tokens",
    "max_seqs",
    "max_model_len",
    "capture_sizes",
    "ep_backend",
)
"""What a running group cannot change."""

_SOCKET = re.compile(r"rank-(\d+)\.(\d+)\.sock")
_LOG = re.compile(r"rank-(\d+)\.(\d+)\.log")


def used_incarnations(config: GroupConfig) -> dict[int, int]:
    """The highest incarnation of each slot that has left a log: what was given must not be given again, also when the
    state file is lost, since peers and the gateway know a rank by it."""
    used: dict[int, int] = {}
    for path in log_path(config.root, "any").parent.glob("rank-*.log"):
        if match := _LOG.fullmatch(path.name):
            used[int(match[1])] = max(used.get(int(match[1]), 0), int(match[2]))
    return used


async def find_members(
    config: GroupConfig,
    state: GroupState | None,
    launcher: Launcher,
    on_event: Callable[[Event], None],
    spares: Collection[int] = (),
    term: int = 0,
) -> dict[int, list[RankLink]]:
    """Connect to every rank that answers, by the sockets in the run directory; usually one a slot. Processes of this
    group that do not answer are ended: half-booted, stopped, or of a slot that was given up. Sockets of the dead are
    removed. The pids in `spares` are spared.

    Raises Superseded, with nothing ended, where any of them has seen a controller of a higher `term`."""

    async def ask(path: Path, slot: int, incarnation: int) -> RankLink | None:
        try:
            return await RankLink.open(
                slot, incarnation, str(path), config.name, on_event, deadline_s=ANSWER_S, term=term
            )
        except Superseded:
            raise
        except ElasticError:
            path.unlink(missing_ok=True)
            return None

    sockets = [(path, m) for path in config.root.glob("rank-*.sock") if (m := _SOCKET.fullmatch(path.name))]
    answers = await asyncio.gather(
        *(ask(path, int(match[1]), int(match[2])) for path, match in sockets), return_exceptions=True
    )
    links = [answer for answer in answers if isinstance(answer, RankLink)]
    for answer in answers:
        if isinstance(answer, BaseException):
            await asyncio.gather(*(link.aclose() for link in links))
            raise answer
    found: dict[int, list[RankLink]] = {}
    for link in links:
        found.setdefault(link.member.slot, []).append(link)
    keep = {link.member.pid for link in links} | {gateway_pid(config), *spares}
    known = [Launched(m.pid, m.pid_start) for m in state.members] if state else []
    for stray in {*launcher.strays(), *known}:
        if stray.pid not in keep:
            launcher.end(stray)
    return found


def refuse_other_shape(config: GroupConfig) -> None:
    """Raise ElasticError where the running group was started with sizes that this configuration contradicts: buffers and
    graphs are sized once."""
    running = read_config(config_path(config.root))
    different = [
        f"{name} {getattr(running, name)!r} (now {getattr(config, name)!r})"
        for name in FIXED
        if getattr(running, name) != getattr(config, name)
    ]
    if different:
        raise ElasticError(
            f"{config.run_dir}: a group runs here that was started with {', '.join(different)}; "
            "stop it first (healer stop) or restore these values"
        )


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


def gateway_pid(config: GroupConfig) -> int:
    """0 where no gateway was ever started."""
    try:
        return read_json(gateway_path(config.root), GatewayProcess).pid
    except ElasticError:
        return 0
