"""Gloo groups over some of the slots, which meet in a store that the controller hosts.

Stock vLLM lets the lowest member listen; a member that comes before it waits 0.5 to 0.75 s for its next try. A store that
always listens has nothing to wait for, and survives every rank.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

POLL_S = 0.002
CONNECT_S = 5.0
"""For a connection to the store, which is on this host or beside it."""
FOREVER = timedelta(minutes=30)
"""Gloo's own default for an operation."""


class NotMet(Exception):
    """Not all members came in time, or the caller does not wait any longer."""


class Left:
    """Stands where a group was left. To leave it again is harmless, any other use fails."""

    group_name = ""

    def shutdown(self) -> None:
        pass


def connect(host: str, port: int) -> Any:
    """A client of the store. Raises NotMet where nothing listens."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        timeout = timedelta(seconds=CONNECT_S)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except Exception as error:
        raise NotMet(f"no store at {host}:{port}: {error}") from error


def exchange(
    store: Any,
    prefix: str,
    slot: int,
    members: Sequence[int],
    word: str,
    deadline: float,
    cancelled: Callable[[], bool],
) -> dict[int, str]:
    """Say a word and hear those of all others, by slot (deadline: monotonic). Raises NotMet, naming who said nothing."""
    keys = {member: f"{prefix}/{member}" for member in members}
    store.set(keys[slot], word.encode())
    while not store.check(list(keys.values())):
        missing = [member for member, key in keys.items() if not store.check([key])]
        if cancelled():
            raise NotMet(f"a newer order has come; slots {missing} had not")
        if time.monotonic() > deadline:
            raise NotMet(f"slots {missing} did not come in time")
        time.sleep(POLL_S)
    return {member: store.get(key).decode() for member, key in keys.items()}


def gather(
    store: Any, prefix: str, slot: int, members: Sequence[int], deadline: float, cancelled: Callable[[], bool]
) -> None:
    """Say that this slot is here and wait for the others. Raises NotMet.

    A gloo rendezvous cannot be broken off: nobody enters it before all have come.
    """
    exchange(store, f"{prefix}/here", slot, members, "here", deadline, cancelled)


def form(store: Any, prefix: str, slot: int, members: Sequence[int], deadline: float) -> Any:
    """A gloo group over the members, dense in their order; blocks until all are connected. Raises NotMet.

    The timeout that a gloo group is made with is that of all its waits for ever, so it is made with a long one, in a thread that
    is left to itself at the deadline: a member that dies in the middle would hold it up.
    """
    ordered = sorted(members)
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def make() -> None:
        try:
            made.put(_gloo(store, f"{prefix}/gloo", ordered.index(slot), len(ordered)))
        except Exception as error:
            made.put(error)

    threading.Thread(target=make, name=f"healer forms {prefix}", daemon=True).start()
    try:
        found = made.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise NotMet(f"no group over slots {ordered} in time") from None
    if isinstance(found, Exception):
        raise NotMet(f"no group over slots {ordered}: {found}") from found
    return found


def _gloo(store: Any, prefix: str, rank: int, size: int) -> Any:
    """As vLLM's init_gloo_process_group makes it, which takes this process's standard output away meanwhile."""
    import torch
    from torch.distributed import PrefixStore, ProcessGroup  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    prefixed = PrefixStore(prefix, store)
    group, kind = ProcessGroup(prefixed, rank, size), ProcessGroup.BackendType.GLOO
    backend = ProcessGroupGloo(prefixed, rank, size, timeout=FOREVER)
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


def settle(group: Any, timeout: timedelta | None) -> None:
    """The limit of its collectives from here on; waits of single messages keep theirs."""
    group.set_timeout(timeout or FOREVER)


def leave(owner: Any, name: str) -> None:
    """Leave the group that `owner` holds, at once, so that peers that wait in it fail. It may have dead members.

    Its sockets are closed when nobody refers to it any more: what was caught in it needs `forget`.
    """
    close(getattr(owner, name))
    setattr(owner, name, Left())


def close(group: Any) -> None:
    from vllm.distributed.utils import stateless_destroy_torch_distributed_process_group

    with contextlib.suppress(Exception):
        stateless_destroy_torch_distributed_process_group(group)


def forget(error: BaseException | None) -> None:
    """Clear the frames that an exception went through: their variables keep groups open as long as it is held."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
