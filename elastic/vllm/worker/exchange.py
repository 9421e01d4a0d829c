"""NIXL EP in a vLLM worker, by sets of ranks instead of counts, and the early release of its waiting kernels.

vLLM's manager connects, masks and disconnects the ranks below a number. Here the ranks that are connected and those that are
active are sets, so any of them may be missing. Buffer, mask and signal words stay where they are: captured graphs go on.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

from elastic.vllm.worker import ipc_cache
from elastic.vllm.worker.ipc_cache import Closed
from elastic.vllm.worker.release import WordWriter
from elastic.vllm.worker.words import Words

log = logging.getLogger("vllm.healer.in_place")

DISCONNECT_S = 10.0
"""15 to 34 ms were seen for each peer on an H200; what takes longer than this never ends."""
FROZEN_AFTER_S = 1.0
WORDS_S = 0.05
"""Of a millisecond's work; longer where the kernels of another library stand in front."""
METADATA_POLL_S = 0.01


class Exchange(Protocol):
    """What a shrink needs of the way in which ranks exchange tokens. Main thread unless said otherwise."""

    def release(self, ranks: Collection[int]) -> None:
        """Free what waits for these ranks. Any thread; returns at once; ranks that were released already are no error."""

    def words_first(self) -> None:
        """Returns when what waits for released ranks has been told so once, or shortly after."""

    def settled(self) -> None:
        """The device has ended all steps: stop releasing."""

    def drop(self, ranks: Collection[int]) -> None:
        """Disconnect these ranks and make the buffers as new. All live ranks have settled; afterwards they meet again."""

    def disconnect(self, ranks: Collection[int]) -> None:
        """Of those that were connected for a refill and never took part. Any thread; unknown ranks are no error."""

    def steps_end(self, wanted: Callable[[], bool]) -> None:
        """Wait for the steps that the device has now, if one waits for a dead rank until it has been freed, for as long as that is
        `wanted`. Any thread. Under load there is no moment without steps."""

    def close_dead(self) -> Closed:
        """Give back the GPU memory of dead processes. The device has ended all steps, no expert is being moved, and no link is being
        made or cut."""


class NixlExchange:
    """Of one process: NIXL's buffer is one for all managers that vLLM makes in turn."""

    def __init__(self) -> None:
        self.connected: set[int] = set()
        self.active: set[int] = set()
        self.rank = -1
        self._writer: WordWriter | None = None
        self._words: Words | None = None
        self._side: Any = None
        self._step_stream: Any = None
        self._interest: Any = None
        self._links = threading.RLock()
        """Held while links are made or cut: a refill is given up in a thread of its own."""
        self._staged = False
        """Ranks were connected and NIXL may not have taken up the views that it made for them. 1.5.1 does so at the next change of the
        mask, and waits for the device first, with Python's lock held: to NIXL's timeout if a kernel waits for a release."""
        self._masking = threading.Lock()
        """A mask set by a release is either through or not begun when ranks are staged."""
        self._released: Any = None
        self._one: Any = None
        self.releases_early = False

    # --- state -----------------------------------------------------------------------------------------------------------

    @property
    def _state(self) -> Any:
        from vllm.distributed.device_communicators.all2all import NixlEPAll2AllManager

        return NixlEPAll2AllManager._buffer

    def _take_sets(self, ranks: Collection[int]) -> None:
        self.active = set(ranks)
        state = self._state
        state.active_ep_size = max(self.active) + 1
        state.connected_ep_size = max(self.connected) + 1
        self._set_interest()

    def _set_interest(self) -> None:
        """In place: the check of the mask may be under way on another stream."""
        import torch

        state = self._state
        wanted = torch.tensor([rank in self.active for rank in range(state.max_num_ep_ranks)])
        if self._interest is None:
            self._interest = torch.zeros(state.max_num_ep_ranks, dtype=torch.bool, device=_device())
        self._interest.copy_(wanted)

    def interest(self, size: int) -> Any:
        return self._interest[:size]

    @property
    def released(self) -> Any:
        """On the device: a step may have been freed by words, so its result is wrong whatever the mask says."""
        return self._released

    def started(self, rank: int, connected: Collection[int]) -> None:
        """The buffer was made and connected."""
        import torch

        self.rank, self.connected = rank, set(connected)
        self._released = torch.zeros((), dtype=torch.bool, device=_device())
        self._one = torch.ones((), dtype=torch.bool, pin_memory=torch.cuda.is_available())
        self._take_sets(connected)

    def made(self, buffer: Any, rank: int, capacity: int, experts: int, max_tokens: int, hidden: int) -> None:
        """The buffer has its memory and no peer yet: find out whether waiting kernels can be released early."""
        import torch

        if not torch.cuda.is_available():
            return
        self._words = Words(buffer, capacity, experts)
        try:
            self.releases_early = self._words.found(rank, max_tokens, hidden)
        except Exception:  # the trial must not cost the start of a rank
            log.exception("[in-place] the trial of the signal words failed")
            self.releases_early = False
        if not self.releases_early:
            log.warning("[in-place] early release is off: NIXL's signal words are not where they were expected")
        self._step_stream = torch.cuda.current_stream()
        self._side = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        write = self._words.write if self.releases_early else _nothing
        self._writer = self._writer_of(buffer, write, self._on_side)

    def _writer_of(self, buffer: Any, write: Callable[[Collection[int]], None], on_side: Any) -> WordWriter:
        def mask(peer: int) -> bool:
            with self._masking:
                if self._staged:
                    return False
                buffer.update_mask_buffer(peer, mask=True)
                return True

        return WordWriter(self._sign, mask, write, on_side)

    def _sign(self) -> None:
        # by a copy, as the words: the first launch of a kernel may wait for the device while CUDA loads it
        self._released.copy_(self._one, non_blocking=True)

    # --- shrink ----------------------------------------------------------------------------------------------------------

    def release(self, ranks: Collection[int]) -> None:
        waiting = {rank for rank in ranks if rank in self.active and rank != self.rank}
        if self._writer is not None and waiting:
            self._writer.release(waiting)

    def words_first(self) -> None:
        if self._writer is not None:
            self._writer.wait_for_words(WORDS_S)

    def settled(self) -> None:
        if self._writer is not None:
            self._writer.end()

    def drop(self, ranks: Collection[int]) -> None:
        from elastic.rank.frozen import ends_within

        state = self._state
        with self._links:
            # with those that were to join: whoever drops a rank has given that up
            gone = sorted(set(ranks) & self.connected | self.connected - self.active - {self.rank})
            if gone:
                with ends_within(DISCONNECT_S):
                    state.buffer.disconnect_ranks(gone)
                self.connected -= set(gone)
            self._clean(gone)

    def _clean(self, gone: Collection[int]) -> None:
        import torch

        state = self._state
        # before the words are zeroed the dead must be gone: cleaning the mask unmasks every rank that is connected
        state.buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
        torch.accelerator.synchronize()
        state.buffer.clean_mask_buffer()
        self._staged = False
        self.forget_release()
        torch.accelerator.synchronize()
        self._take_sets(self.active - set(gone))
        self.accept_mask()

    def forget_release(self) -> None:
        """Every step that words may have freed has ended, and its check with it."""
        if self._released is not None:
            self._released.zero_()

    def accept_mask(self) -> None:
        """What the mask is now is no fault: vLLM compares with the last one that it took for right, and only that."""
        from vllm.distributed.device_communicators.all2all import NixlEPAll2AllManager as Manager

        state = self._state
        if Manager._mask is None:
            import torch

            Manager._mask = torch.zeros(state.max_num_ep_ranks, device=_device(), dtype=torch.int32)
        state.buffer.query_mask_buffer(Manager._mask)
        Manager._last_mask = Manager._mask[: state.active_ep_size].clone()

    @contextlib.contextmanager
    def _on_side(self) -> Iterator[None]:
        import torch

        torch.cuda.set_device(self._side.device)
        with torch.cuda.stream(self._side):
            yield
            self._side.synchronize()

    # --- refill ----------------------------------------------------------------------------------------------------------

    def connect(
        self, ranks: Collection[int], store: Any, deadline: float, *, active: bool, cancelled: Callable[[], bool]
    ) -> None:
        """Connect ranks, masked unless `active`; a thread of its own while steps go on. Raises TimeoutError, InterruptedError.

        NIXL keeps Python's lock while it connects: it is entered when the peers have published their addresses, so that they
        are about to connect too, and a connection that never comes about ends the process (NIXL 2182, 2084).
        """
        from elastic.rank.frozen import ends_within

        new = sorted(set(ranks) - self.connected - {self.rank})
        if not new:
            return
        state = self._state
        keys = [f"NIXL_EP/{rank}" for rank in new]
        while not store.check(keys):
            if cancelled():
                raise InterruptedError(f"connecting ranks {new} was given up")
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {new} published no address of their exchange buffers in time")
            time.sleep(METADATA_POLL_S)
        handing = _Handing(store)
        state.buffer.set_tcp_store_group(handing)
        with self._links, ends_within(max(1.0, deadline - time.monotonic()) + FROZEN_AFTER_S), _own_stream():
            if cancelled():
                raise InterruptedError(f"connecting ranks {new} was given up")
            with self._masking:
                before, self._staged = self._staged, True
            try:
                state.buffer.connect_ranks(new, activate=active)
            except Exception:
                if handing.handed:
                    self._back_out(new)
                else:
                    self._staged = before
                raise
            self.connected |= set(new)
        state.connected_ep_size = max(self.connected) + 1

    def _back_out(self, new: list[int]) -> None:
        """NIXL takes a peer for connected as soon as it has its metadata (1.4.1), so that a second try would do nothing."""
        from elastic.rank.fatal import EXCHANGE_EXIT

        try:
            self._state.buffer.disconnect_ranks(new)
            self._staged = False
        except Exception:
            # its kernels would reach into memory that is not theirs: as a lost rank this one can be replaced
            log.exception("[in-place] the exchange is in no known state")
            os._exit(EXCHANGE_EXIT)

    def disconnect(self, ranks: Collection[int]) -> None:
        from elastic.rank.frozen import ends_within

        # NIXL waits for the steps that are under way with Python's lock held, and if one waits for a dead rank nobody could free it
        self.steps_end(lambda: bool(self._to_cut(ranks)))
        with self._links:
            gone = self._to_cut(ranks)
            if not gone:
                return
            with ends_within(DISCONNECT_S), _own_stream():
                self._state.buffer.disconnect_ranks(gone)
            self._staged = False
            self.connected -= set(gone)
            self._state.connected_ep_size = max(self.connected) + 1

    def _to_cut(self, ranks: Collection[int]) -> list[int]:
        """What of these is connected and takes no part; a shrink may see to it first."""
        return sorted(set(ranks) & self.connected - self.active)

    def _bind(self) -> None:
        """A thread of its own begins on the first device."""
        import torch

        if self._side is not None:
            torch.cuda.set_device(self._side.device)

    def steps_end(self, wanted: Callable[[], bool]) -> None:
        self._bind()
        passed = self._step_stream.record_event() if self._step_stream is not None else None
        while wanted() and not (
            (passed is None or passed.query()) and (self._writer is None or not self._writer.writes)
        ):
            time.sleep(METADATA_POLL_S)

    def close_dead(self) -> Closed:
        with self._links:
            return ipc_cache.close_dead()

    def activate(self, ranks: Collection[int]) -> None:
        """Unmask connected ranks, at a step boundary between two barriers."""
        import torch

        # What was released stays a fault: a rank may die after the first barrier, and `accept_mask` takes its mask for right.
        joining = sorted(set(ranks) - self.active - {self.rank})
        for rank in joining:
            self._state.buffer.update_mask_buffer(rank, mask=False)
        if joining:
            self._staged = False
        torch.accelerator.synchronize()
        self._take_sets(set(ranks))
        self.accept_mask()

    def deactivate(self, ranks: Collection[int]) -> None:
        """Disconnect ranks that a stock scaling removes."""
        gone = sorted(set(ranks) & self.connected)
        if gone:
            self._state.buffer.disconnect_ranks(gone)
            self._staged = False
        self.connected -= set(gone)
        self._take_sets(self.active - set(gone))


class _Handing:
    """What NIXL uses of a store, and whether it has got the peers' metadata out of it."""

    def __init__(self, store: Any) -> None:
        self.set, self.wait, self.delete_key = store.set, store.wait, store.delete_key
        self._store = store
        self.handed = False

    def multi_get(self, keys: list[str]) -> Any:
        found = self._store.multi_get(keys)
        self.handed = True
        return found


def _nothing(_: Collection[int]) -> None:
    """Where the words are not known only the mask is set: a kernel that waits already ends at NIXL's timeout."""


def _device() -> Any:
    import torch

    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


@contextlib.contextmanager
def _own_stream() -> Iterator[None]:
    """Beside the steps."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()


exchange = NixlExchange()
