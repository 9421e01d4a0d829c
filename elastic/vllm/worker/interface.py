"""What the engine's part asks of the worker's part, in every worker of a rank.

The engine reaches it through vLLM's own `collective_rpc(name, args=…)`, so every method is found on the worker class by its
name; arguments and answers are plain values that msgpack and pickle carry. A worker of the rank at data-parallel slot S with
tensor-parallel size T is one of T that get the same call. Slots never change: a slot is `data_parallel_rank`.

`collective_rpc` queues behind a step that the worker's main thread stands in. What must reach a worker *while* it stands in a
step, which is only the release of waiting kernels, is therefore sent as a datagram to `release_address`.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import json
import os
import socket
from contextlib import suppress
from typing import Any, NamedTuple, Protocol


class Vote(NamedTuple):
    """A worker's answer to a shrink; vLLM's RPC carries it as a plain tuple."""

    ready: bool
    """False: this worker must not serve in the group that was formed (it holds a sticky device error, a peer did not come)."""
    detail: str
    """One line for the journal: what was done, or why not."""


class RefillOrder(NamedTuple):
    """One refill, the same on all members; `_asdict()` goes over the wire."""

    epoch: int
    live: tuple[int, ...]
    """Slots that serve now, ascending."""
    joiners: tuple[int, ...]
    """Empty slots that are filled by this order, ascending. The first version may insist on one."""
    source: int
    """The live slot whose expert map, sizes and non-expert weights count."""
    store_host: str
    store_port: int
    """A TCPStore that the controller hosts; use the prefix `refill/{epoch}/worker`."""
    timeout_s: float

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted(self.live + self.joiners))


class InPlaceWorker(Protocol):
    """Called in the worker's main thread (the RPC loop) unless said otherwise, one call at a time."""

    def healer_probe(self) -> tuple[str, str]:
        """State of the worker's part and a line of detail: ("ready", ""), or ("stock", why it left vLLM as it is).

        Called once, when the engine has started. A worker that is not ready makes the engine refuse in-place orders.
        """

    def healer_leave(self, epoch: int) -> None:
        """Close the groups over which this worker meets its peers in a step, so that peers that wait in them fail at once.

        Gloo closes a group's sockets when nothing refers to it any more (`groups.leave`, `groups.forget`), not before.

        The engine's loop is parked and every step has returned or failed. Called before `healer_shrink` of the same epoch,
        and before the engines meet: a peer whose worker still waits for this one could not come otherwise. Waits for nobody
        and does not raise; groups that are closed already are no error.
        """

    def healer_shrink(
        self, epoch: int, survivors: list[int], store_host: str, store_port: int, timeout_s: float
    ) -> tuple[bool, str]:
        """Leave the old groups and form those over `survivors`: a `Vote`.

        The engine's loop is parked: no step follows before this has returned on every worker of every survivor. Called again
        with a higher epoch when somebody voted no or died, so it must be safe to repeat from any half-done state, the
        groups of a failed attempt included. Old groups with a dead member are aborted, never destroyed collectively.
        Rendezvous through the controller's store under the prefix `shrink/{epoch}/worker`. Forget the state of requests:
        vLLM's scheduler sends those that it keeps again (model runner V2: as new ones; V1: as cached ones). Ends
        within `timeout_s`; an exception is a vote of no.
        """

    def healer_refill_prepare(self, order: dict[str, Any], request: Any) -> str:
        """Start, in a thread of the worker's own, to form the groups over all members and send the joiners what they need.

        `request` is vLLM's ReconfigureDistributedRequest (addresses and ports of the new group). Steps go on meanwhile. Returns
        the key that the thread sets to b"1" in the store of `order` when it has ended, well or not.
        """

    def healer_refill_prepared(self) -> None:
        """After the key is set. Raises what the preparation raised."""

    def healer_refill_commit(self) -> None:
        """At a step boundary, on all live members at once, scheduler paused: switch to the prepared groups."""

    def healer_refill_abort(self) -> None:
        """Drop a preparation that is under way, failed or done, but not committed. Nothing to drop: no error.

        Never waits for a peer: the joiner may be dead.
        """

    # On a joiner. Its groups are formed in `init_device` already, over the members of the order, not over all slots: the order
    # is `read_order()` then.

    def healer_join(self, order: dict[str, Any], phase: str) -> None:
        """Phases in this order, each once; blocks until done:

        "receive"  meet the others in the new groups, receive weights and sizes (before the KV cache is sized);
        "warm"     warm up and capture, alone;
        "commit"   receive the expert map from `order["source"]` and take part from the next step on.
        """


ORDER_KEY = "healer/refill"
"""In the store of a refill: the order as JSON, set before the joiner's handshake is answered."""
REFILL_VARIABLE = "HEALER_REFILL"
"""Set to 1 in the environment of a joiner that fills a slot, and of its engine and workers."""


def read_order(parallel_config: Any) -> RefillOrder | None:
    """The refill that this process joins; None: it is not a joiner of a refill. From the engine's handshake on."""
    if os.environ.get(REFILL_VARIABLE) != "1":
        return None
    from vllm.distributed.utils import get_cached_tcp_store_client

    store = get_cached_tcp_store_client(parallel_config.data_parallel_master_ip, parallel_config._coord_store_port)
    return order_of(json.loads(store.get(ORDER_KEY)))


def order_of(found: dict[str, Any]) -> RefillOrder:
    """From what `_asdict()` became on the wire. Raises TypeError for other fields."""
    return RefillOrder(**found | {"live": tuple(found["live"]), "joiners": tuple(found["joiners"])})


def release_address(engine_pid: int, local_rank: int) -> bytes:
    """Abstract datagram address of a worker; `engine_pid` is the worker's parent, `local_rank` counts within the rank."""
    return f"\0healer-in-place/{engine_pid}/{local_rank}".encode()


def send_release(engine_pid: int, world_size: int, epoch: int, dead: list[int]) -> int:
    """Tell the workers of this engine that the slots in `dead` are gone; returns how many listen.

    A worker's listener thread (the worker's part starts it) masks those peers and frees the kernels that wait for them. Idempotent;
    an epoch below the last one that was seen is ignored there.
    """
    message, heard = json.dumps({"epoch": epoch, "dead": dead}).encode(), 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for rank in range(world_size):
            with suppress(OSError):
                sender.sendto(message, release_address(engine_pid, rank))
                heard += 1
    return heard
