"""vLLM's own groups over live slots: formed in the controller's store, left at once, and aborted where a member is dead.

A coordinator of vLLM keeps the numbers that it was configured with (`ranks`, `world_size`, `rank_in_group`): slots are frozen,
and whatever vLLM sizes by them stays right. Only the process groups in it are dense over the live ranks.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported"
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from elastic.vllm import groups
from elastic.vllm.worker.slots import Slots

log = logging.getLogger("vllm.healer.in_place")


CONNECT_AGAIN_S = 0.1
SLOW_S = 0.5


@dataclass(frozen=True)
class Meeting:
    """Where the members of a change meet."""

    host: str
    port: int
    prefix: str
    timeout_s: float

    def store(self) -> Any:
        """A client of its own: a call that waits holds up no other user. Raises groups.NotMet where nobody answers in time."""
        until = time.monotonic() + self.timeout_s
        while True:
            try:
                found = groups.connect(self.host, self.port)
                break
            except groups.NotMet:
                # a busy host answers late
                if time.monotonic() > until:
                    raise
                time.sleep(CONNECT_AGAIN_S)
        found.set_timeout(timedelta(seconds=self.timeout_s))
        return found

    def gloo(
        self,
        name: str,
        rank: int,
        members: tuple[int, ...],
        deadline: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Any:
        """A gloo group over ranks; nobody enters the rendezvous before all are there. Raises groups.NotMet."""
        store, prefix = self.store(), f"{self.prefix}/{name}"
        groups.gather(store, prefix, rank, members, deadline, cancelled)
        return groups.form(store, prefix, rank, members, deadline)


def lone_group() -> Any:
    """A gloo group of this process alone: what stands where a group was left, since vLLM does not expect None."""
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.distributed_c10d import PrefixStore
    from vllm.distributed.utils import init_gloo_process_group

    return init_gloo_process_group(PrefixStore("healer/left", HashStore()), 0, 1, timedelta(minutes=30))


def leave(*coordinators: Any) -> None:
    """Close the gloo groups of coordinators, so that peers that wait in them fail.

    Only the end of the last reference closes a gloo group's sockets (torch 2.13: neither `abort` nor `shutdown` does).
    """
    for coordinator in coordinators:
        if coordinator is None:
            continue
        old, coordinator.cpu_group = coordinator.cpu_group, lone_group()
        groups.close(old)
        if (communicator := getattr(coordinator, "device_communicator", None)) is not None:
            communicator.cpu_group = coordinator.cpu_group
            if (manager := getattr(communicator, "all2all_manager", None)) is not None:
                manager.cpu_group = coordinator.cpu_group


_aborts = threading.Lock()


def abort_device_groups(*coordinators: Any) -> threading.Thread:
    """Abort the NCCL communicators of groups with a dead member, in threads: kernels that wait in them end.

    Never the collective `destroy`. An abort can block while graphs that captured the communicator live (vLLM gives it 5 s), so nobody
    waits for the thread for long; it ends with the process. Nor does one abort wait for another: the one that blocks may not be the
    one in whose kernel the device stands. Any thread; a communicator that has been aborted, or is being, is not aborted again.
    """
    with _aborts:
        threads = [thread for each in coordinators if each is not None for thread in _aborts_of(each)]

    def wait() -> None:
        for one in threads:
            one.join()

    thread = threading.Thread(target=wait, name="healer abort", daemon=True)
    thread.start()
    return thread


def _aborts_of(coordinator: Any) -> list[threading.Thread]:
    """Of what it has by now: one that is still being made may have more later."""
    known: dict[int, threading.Thread] = coordinator.__dict__.setdefault("healer_aborts", {})
    group = getattr(coordinator, "device_group", None)
    pynccl = getattr(getattr(coordinator, "device_communicator", None), "pynccl_comm", None)
    works = (
        (group, lambda: _abort_device_group(coordinator.device, group)),
        (pynccl, lambda: _abort_pynccl(pynccl)),
    )
    for target, work in works:
        if target is not None and id(target) not in known:
            known[id(target)] = threading.Thread(target=work, name="healer abort of one", daemon=True)
            known[id(target)].start()
    return list(known.values())


def _abort_device_group(device: Any, group: Any) -> None:
    import torch

    began = time.monotonic()
    try:
        found = torch.device(device)
        backend = group._get_backend(found)
        if found.type != "cpu":
            backend.abort()
    except Exception as error:
        log.warning("[in-place] a device group cannot be aborted: %s: %s", type(error).__name__, error)
    _say_if_slow("a device group", began)


def _abort_pynccl(pynccl: Any) -> None:
    began = time.monotonic()
    try:
        pynccl.destroy()
    except Exception as error:
        log.warning("[in-place] a communicator cannot be aborted: %s: %s", type(error).__name__, error)
    _say_if_slow("a communicator", began)


def _say_if_slow(what: str, began: float) -> None:
    if (took := time.monotonic() - began) > SLOW_S:
        log.info("[in-place] the abort of %s took %.2f s", what, took)


def retire(coordinators: tuple[Any, ...]) -> threading.Thread:
    """Let go of groups that were replaced, in a thread: communicators aborted, sockets closed, no peer waited for."""

    def run() -> None:
        aborting = abort_device_groups(*coordinators)
        aborting.join(30.0)
        for coordinator in coordinators:
            if coordinator is None:
                continue
            groups.close(getattr(coordinator, "cpu_group", None))
            coordinator.cpu_group = coordinator.device_group = coordinator.tcp_store_group = None
            communicator = getattr(coordinator, "device_communicator", None)
            if communicator is not None:
                communicator.cpu_group = communicator.device_group = None
                if communicator.all2all_manager is not None:
                    communicator.all2all_manager.tcp_store_group = None

    thread = threading.Thread(target=run, name="healer retire", daemon=True)
    thread.start()
    return thread


def never() -> bool:
    return False


class Formation(NamedTuple):
    meeting: Meeting
    slots: Slots
    cancelled: Callable[[], bool]
    made: list[Any]
    """Coordinators, as they are made: whoever gives the change up retires them."""


class Forming:
    """While it is set, vLLM's group coordinators are formed over live ranks, in the meeting's store."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._for_all: Formation | None = None

    def current(self) -> "Formation | None":
        return getattr(self._local, "value", None) or self._for_all

    @contextlib.contextmanager
    def here(self, formation: Formation) -> Iterator[None]:
        """For the coordinators that this thread makes; `cancelled` ends a wait for members that have not come."""
        self._local.value = formation
        try:
            yield
        finally:
            self._local.value = None

    def always(self, meeting: Meeting, slots: Slots) -> None:
        """For all of a joiner's first coordinators, which vLLM makes in `init_device`."""
        self._for_all = Formation(meeting, slots, never, [])

    def done(self) -> None:
        self._for_all = None


forming = Forming()


def form_coordinator(
    self: Any,
    group_ranks: list[list[int]],
    local_rank: int,
    torch_distributed_backend: Any,
    use_device_communicator: bool,
    coord_store: Any,
    use_message_queue_broadcaster: bool = False,
    group_name: str | None = None,
    host: str = "127.0.0.1",
    global_rank: int = 0,
    global_world_size: int = 1,
    use_all2all: bool = False,
) -> None:
    """`StatelessGroupCoordinator.__init__` while `forming` is set. vLLM's own lets the lowest rank listen at `host`, which is the
    old master; here everything is in the meeting's store."""
    import torch
    from torch.distributed.distributed_c10d import PrefixStore
    from vllm.distributed import parallel_state
    from vllm.distributed.utils import (
        StatelessProcessGroup,
        get_cpu_distributed_timeout_or_none,
        get_distributed_timeout_or_none,
    )
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    found = forming.current()
    assert found is not None
    meeting, slots, cancelled, made = found
    made.append(self)
    name = group_name or "anonymous"
    self.unique_name = parallel_state._get_unique_name(name)
    parallel_state._register_group(self)
    self.rank, self.local_rank = global_rank, local_rank
    world = parallel_state._WORLD
    self.device_index = world.device_index if world is not None else local_rank
    self.backend = str(torch_distributed_backend)
    self.cpu_timeout = get_cpu_distributed_timeout_or_none()
    number, ranks = next((at, ranks) for at, ranks in enumerate(group_ranks) if global_rank in ranks)
    self.ranks, self.world_size, self.rank_in_group = ranks, len(ranks), ranks.index(global_rank)
    live = slots.only_live(ranks)
    dense = live.index(global_rank)

    key = f"{name}_{number}"
    deadline = time.monotonic() + meeting.timeout_s
    self.cpu_group = meeting.gloo(key, global_rank, tuple(live), deadline, cancelled)
    groups.settle(self.cpu_group, self.cpu_timeout)
    _name(self.cpu_group, f"{self.unique_name}_cpu")
    prefix = f"{meeting.prefix}/{key}"
    self.tcp_store_group = StatelessProcessGroup(
        rank=dense, world_size=len(live), store=PrefixStore(f"{prefix}/objects", meeting.store())
    )
    kind = current_platform.device_type
    self.device = torch.device(
        f"{kind}:{current_platform.logical_device_id_to_visible_device_id(self.device_index)}"
        if kind == "cuda"
        else kind
    )
    if kind == "cpu":
        self.device_group = meeting.gloo(f"{key}/device", global_rank, tuple(live), deadline, cancelled)
    else:
        self.device_group = current_platform.stateless_init_device_torch_dist_pg(
            backend=self.backend,
            prefix_store=PrefixStore(f"{prefix}/device", meeting.store()),
            group_rank=dense,
            group_size=len(live),
            timeout=get_distributed_timeout_or_none() or timedelta(minutes=10),
        )
    _name(self.device_group, f"{self.unique_name}_device")
    self.use_device_communicator = use_device_communicator
    self.device_communicator = None
    if use_device_communicator and self.world_size > 1:
        self.device_communicator = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())(
            cpu_group=self.cpu_group,
            device=self.device,
            device_group=self.device_group,
            unique_name=self.unique_name,
            global_ranks=live,
            global_world_size=global_world_size,
            tcp_store_group=self.tcp_store_group,
            use_all2all=use_all2all,
        )
        if (manager := self.device_communicator.all2all_manager) is not None:
            # its rank is the one that NIXL knows, its size the one that buffers are sized by
            manager.rank, manager.world_size = self.rank_in_group, self.world_size
            manager.healer_ranks = tuple(live)
    self.mq_broadcaster = None
    self.use_custom_op_call = current_platform.is_cuda_alike() or current_platform.is_tpu()
    self.use_cpu_custom_send_recv = False


def _name(group: Any, name: str) -> None:
    """As vLLM names its own: functional collectives look groups up by it."""
    from torch._C._distributed_c10d import _register_process_group
    from torch.distributed.distributed_c10d import GroupName

    group._set_group_name(name)
    _register_process_group(GroupName(name), group)


def replace_coordinator(coordinator: Any) -> None:
    """Wrap the constructor of vLLM's stateless group coordinator: its own, but while `forming` is set."""
    original = coordinator.__init__

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **options: Any) -> None:
        (form_coordinator if forming.current() is not None else original)(self, *args, **options)

    coordinator.__init__ = construct
