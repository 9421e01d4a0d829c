"""GPU faults where there is no GPU: through the stand-in for NVML, and as lines of a kernel log."""

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from chaos.fake_nvml import Script, pci_of
from chaos.injectors.base import Done, Family, Injector, Place, members_in
from chaos.nvml_faults import FAULTS
from elastic.errors import ElasticError
from elastic.view import Member

WRITING = threading.Lock()
"""The script is read, changed and written as a whole."""

Gpu = Annotated[int, Field(ge=0, le=63)]
Number = Annotated[int, Field(ge=0)]


class Nvml(Injector):
    """What the driver says of a GPU. The GPU of a rank has the number of its slot."""

    family: ClassVar[Family] = "nvml"
    needs: ClassVar[tuple[str, ...]] = ("gpu_script",)
    lasts: ClassVar[bool] = True
    kind: Literal["nvml"]
    gpu: Gpu
    fault: str
    value: Number | None = None
    is_fault: bool = True
    """Whether healing may remove the rank on it."""

    @field_validator("fault")
    @classmethod
    def _known(cls, fault: str) -> str:
        if fault not in FAULTS or fault == "heal":
            raise ValueError(
                f"{fault!r} is not valid, expected one of {', '.join(name for name in FAULTS if name != 'heal')}"
            )
        return fault

    def inject(self, place: Place) -> Done:
        self.checked(place)
        assert place.gpu_script is not None
        _, usual, play = FAULTS[self.fault]
        script = Script.open(place.gpu_script)
        if self.gpu >= script.gpus:
            raise ElasticError(f"{place.gpu_script}: has the GPUs 0 to {script.gpus - 1}, no {self.gpu}")
        # before: the daemon may be quicker
        members = _on_gpu(place.run_dir, self.gpu)
        at = time.monotonic()
        with WRITING:
            script = Script.open(place.gpu_script)
            play(script, self.gpu, usual if self.value is None else self.value)

        def heal() -> None:
            with WRITING:
                FAULTS["heal"][2](Script.open(script.path), self.gpu, 0)

        return Done(
            at=at,
            undo=f"healer-chaos inject nvml heal --gpu {self.gpu} --script {place.gpu_script}",
            take_back=heal,
            must_be_replaced=self.is_fault,
            members=members,
        )


class KernelLine(Injector):
    """Lines in the kernel's log, in the driver's words."""

    family: ClassVar[Family] = "kernel-log"
    needs: ClassVar[tuple[str, ...]] = ("kernel_log",)
    kind: Literal["kernel-line"]
    gpu: Gpu
    xid: Annotated[int, Field(ge=1, le=999)] | None = None
    text: str = ""
    """Instead of an XID: any line, in which {pci} stands for the GPU's address."""
    count: Annotated[int, Field(ge=1, le=10_000)] = 1
    is_fault: bool = False

    def inject(self, place: Place) -> Done:
        self.checked(place)
        assert place.kernel_log is not None
        if (self.xid is None) == (not self.text):
            raise ElasticError("kernel-line: expected either xid or text")
        pci = pci_of(self.gpu)
        told = (
            self.text.replace("{pci}", pci) or f"NVRM: Xid (PCI:{pci[:-2]}): {self.xid}, pid=0, name=python, injected"
        )
        members, at = _on_gpu(place.run_dir, self.gpu), time.monotonic()
        with place.kernel_log.open("a") as log:
            for number in range(self.count):
                log.write(kernel_record(told, number))
        return Done(at=at, must_be_replaced=self.is_fault, members=members)


def kernel_record(text: str, number: int) -> str:
    """As /dev/kmsg gives it: priority, sequence, microseconds since boot, flags."""
    moment_us = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6) + number
    return f"3,{moment_us},{moment_us},-;{text}\n"


def follow_ranks(path: Path, pids: Iterable[tuple[int, int]]) -> None:
    """Have the stand-in list the processes (GPU, pid) and no others."""
    with WRITING:
        script = Script.open(path)
        script.say(
            *(f"process {gpu} 0 0" for gpu in range(script.gpus)),
            *(f"process {gpu} {pid} 1000000000" for gpu, pid in pids),
        )


def _on_gpu(run_dir: Path, gpu: int) -> tuple[Member, ...]:
    return members_in(run_dir, [gpu])
