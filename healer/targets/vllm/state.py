"""What a daemon must remember across its own death, in `group.json` of the run directory. Written before and after every
launch, and before a request to scale: the file is a hint, the servers are asked."""

from pathlib import Path

import msgspec

from elastic.errors import ElasticError
from elastic.paths import read_json, state_path, write_json
from healer.targets.vllm.records import Held


class Pending(msgspec.Struct, frozen=True):
    """A request to scale that may be under way."""

    size: int
    joiners: tuple[int, ...]
    """Slots."""
    leavers: tuple[int, ...]


class VllmState(msgspec.Struct, frozen=True):
    group: str
    epoch: int
    """Of the router's file; grows with every change."""
    target: tuple[int, ...]
    ranks: tuple[Held, ...]
    """All that were launched and not seen dead."""
    incarnations: dict[int, int]
    """The highest given to each slot."""
    rpc_port: int
    """Of the DP coordinator; joiners must know it."""
    scaled: bool
    """A scale has ended since the launch: from then on vLLM's `retry` builds groups of the old size."""
    reference: tuple[int, ...]
    """The tokens of the first canary of this launch; empty: none yet."""
    pending: Pending | None = None
    launch_size: int = 0
    """Ranks of the launch: what one rank holds of the experts follows from it. 0: not known."""
    removed: tuple[int, ...] = ()
    """DP ranks of this launch that the others go on without."""
    removing: bool = False
    """Ranks are being removed: a daemon that dies now leaves survivors that wait for an instruction, or are half through."""
    holes: dict[int, int] = {}
    """DP ranks of this launch that are empty inside the running group, with the slot that each was of."""
    coordinated: bool = False
    """The ranks of this launch have the plugin, and ask healer's coordination process."""
    ordered: bool = False
    """The plugin has carried out an order in this launch: vLLM's own retry is refused from then on."""
    unbalanced: bool = False
    """It has ended the threads that rebalance experts, and no refill has started them since."""
    redundant: int | None = None
    """Redundant experts of the launch, where they are others than the user's: joiners must have the same."""


def load(run_dir: Path, group: str, *, set_aside: bool = True) -> VllmState | None:
    """None where there is none, or it is of another group or damaged (then set aside, unless it is another daemon's)."""
    path = state_path(run_dir)
    if not path.exists():
        return None
    try:
        found = read_json(path, VllmState)
    except ElasticError:
        if set_aside:
            path.replace(path.with_suffix(".damaged"))
        return None
    return found if found.group == group else None


def save(run_dir: Path, state: VllmState) -> None:
    """Raises ElasticError naming the file."""
    try:
        write_json(state_path(run_dir), state)
    except OSError as error:
        raise ElasticError(f"{state_path(run_dir)}: cannot be written: {error.strerror}") from error
