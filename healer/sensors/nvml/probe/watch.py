"""The thread that opens NVML, says which GPUs there are, and waits for events."""

import threading
import time
from typing import Any

import pynvml as nv

from .gpus import BLIND_CODES, Gpu
from .output import Output

WAIT_MS = 500
"""One wait for events; also how long an orderly end may take."""
RETRY_S = 1.0
"""After a wait that failed: a lost GPU makes every wait fail at once."""
OPEN_S = 0.25
"""For all GPUs to open, before those that have are announced; the others are told of with the code TIMEOUT until they are
open too."""


class _Slot:
    """One of NVML's numbers: the GPU behind it, and the thread that opens and then reads it."""

    def __init__(self) -> None:
        self.gpu: Gpu | None = None
        self.code = nv.NVML_ERROR_TIMEOUT
        self.settled = threading.Event()


class Watch:
    """`run` is the thread; `over` is set when it has returned, and then the process may end."""

    def __init__(self, options: dict[str, Any], output: Output, stopping: threading.Event) -> None:
        self.gpus: dict[str, Gpu] = {}
        self.open = False
        self.over = threading.Event()
        self._options, self._output, self._stopping = options, output, stopping
        self._slots: dict[int, _Slot] = {}
        self._said: Any = None
        self._by_handle: dict[int, Gpu] = {}
        self._events: Any = None

    def run(self) -> None:
        try:
            nv.nvmlInit()
            self.open = True
            self._events = nv.nvmlEventSetCreate()
            self._search()
            self._wait_for_events()
        except nv.NVMLError as error:
            self._output.say("blind", code=error.value, call="finding the GPUs" if self.open else "nvmlInit")
        finally:
            self.over.set()

    def _search(self) -> None:
        """Which GPUs are there? Each number is looked up by a thread of its own, unless an earlier one still hangs in that."""
        count = nv.nvmlDeviceGetCount()
        self._slots = {
            index: slot for index, slot in self._slots.items() if index < count and not slot.settled.is_set()
        }
        for index in set(range(count)) - set(self._slots):
            self._slots[index] = _Slot()
            arguments = (index, self._slots[index])
            threading.Thread(target=self._look_up, args=arguments, name=f"gpu {index}", daemon=True).start()
        end = time.monotonic() + OPEN_S
        for slot in self._slots.values():
            slot.settled.wait(max(0.0, end - time.monotonic()))
        self._announce()

    def _look_up(self, index: int, slot: _Slot) -> None:
        try:
            found = Gpu(nv.nvmlDeviceGetHandleByIndex(index), self._options["periods_s"], self._output, self._stopping)
        except nv.NVMLError as error:
            slot.code = error.value
        else:
            slot.gpu = self.gpus.get(found.uuid, found)
        slot.settled.set()

    def _announce(self) -> None:
        """Before the first reading of a new GPU, so that the daemon knows whose it is."""
        open_, new, broken = [], [], []
        for index, slot in sorted(self._slots.items()):
            if slot.gpu is None:
                broken.append({"index": index, "code": slot.code})
                continue
            open_.append(slot.gpu.describe(index))
            if slot.gpu.uuid not in self.gpus:
                self.gpus[slot.gpu.uuid] = slot.gpu
                new.append(slot.gpu)
        refused = [each["code"] for each in broken if each["code"] in BLIND_CODES]
        if refused:
            raise nv.NVMLError(refused[0])
        if (open_, broken) != self._said:
            self._said = (open_, broken)
            self._output.say("gpus", driver=nv.nvmlSystemGetDriverVersion(), gpus=open_, broken=broken)
        for gpu in new:
            self._by_handle[_address(gpu.handle)] = gpu
            threading.Thread(target=self._serve, args=(gpu,), name=gpu.pci, daemon=True).start()

    def _serve(self, gpu: Gpu) -> None:
        gpu.register(self._options["events"], self._events)
        gpu.run()

    def _wait_for_events(self) -> None:
        next_search = time.monotonic() + self._options["search_s"]
        while not self._stopping.is_set():
            self._announce()  # one that took longer to open may be there by now
            if time.monotonic() >= next_search:
                self._search()
                next_search = time.monotonic() + self._options["search_s"]
            try:
                self._event(nv.nvmlEventSetWait(self._events, WAIT_MS))
            except nv.NVMLError as error:
                if error.value in BLIND_CODES:
                    raise
                if error.value != nv.NVML_ERROR_TIMEOUT:
                    self._output.say("failed", call="nvmlEventSetWait", code=error.value)
                    self._stopping.wait(RETRY_S)

    def _event(self, data: Any) -> None:
        gpu = self._by_handle.get(_address(data.device))
        if gpu is not None:
            self._output.say(
                "event", gpu=gpu.uuid, kind=data.eventType, data=data.eventData, instance=data.gpuInstanceId
            )
            gpu.poke()


def _address(handle: Any) -> int:
    return nv.cast(handle, nv.c_void_p).value or 0
