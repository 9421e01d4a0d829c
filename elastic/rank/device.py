"""The device of a rank, and the number type of its weights: the CPU in float32, or one NVIDIA GPU in bfloat16."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from elastic.config import GroupConfig
from elastic.errors import ElasticError


@dataclass(frozen=True)
class Device:
    """Where the rank's tensors live. Equal for all ranks of a group but for the index."""

    place: torch.device
    dtype: torch.dtype
    """Of weights, activations and KV cache; routing weights and logits are float32 on every device."""

    @property
    def is_gpu(self) -> bool:
        return self.place.type == "cuda"

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype or self.dtype, device=self.place)

    def host(self, *shape: int, dtype: torch.dtype, value: int = 0) -> torch.Tensor:
        """Host memory that the device copies from and to by itself."""
        return torch.full(shape, value, dtype=dtype, pin_memory=self.is_gpu)

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor made on the host, moved; its type is kept."""
        return tensor.to(self.place)

    def bind(self) -> None:
        """Make it the current device of the calling thread: CUDA's is a matter of each thread."""
        if self.is_gpu:
            torch.cuda.set_device(self.place)

    def queue(self, priority: int = 0) -> "Queue":
        """A queue of work beside the one of the steps; -1 goes before it."""
        return Queue(torch.cuda.Stream(self.place, priority=priority) if self.is_gpu else None)  # type: ignore[no-untyped-call]

    def wait_for_step(self) -> None:
        """Wait for the work of the calling thread's current queue: the steps', in the round loop."""
        if self.is_gpu:
            torch.cuda.current_stream(self.place).synchronize()

    def settle(self) -> None:
        """Wait for all work of this process on the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.place)


class Queue:
    """A CUDA stream; on a CPU work is done when its call returns, and nothing is left to wait for."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Work of the block goes to this queue and has ended with the block; the device is bound to the thread."""
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self._stream.device)
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()


CPU = Device(torch.device("cpu"), torch.float32)


def gpu_of(config: GroupConfig, slot: int, count: int) -> int:
    """The GPU of a slot: as `gpus` says, else slots in turn over the `count` visible ones. Raises ElasticError."""
    index = config.gpus[slot % len(config.gpus)] if config.gpus else slot % count
    if index >= count:
        raise ElasticError(f"slot {slot}: GPU {index} is not there, {count} are visible; see `gpus`")
    return index


def open_device(config: GroupConfig, slot: int) -> Device:
    """The device of a rank's process, made current in the calling thread; on a GPU its CUDA context is created.

    Raises ElasticError where the GPU, the driver or a CUDA build of torch is missing.
    """
    if not config.on_gpu:
        return CPU
    if not torch.cuda.is_available():
        build = torch.version.cuda or "no CUDA"
        raise ElasticError(
            f"epBackend nixl-ep needs a GPU: torch {torch.__version__} (built for {build}) sees none here"
        )
    device = Device(torch.device("cuda", gpu_of(config, slot, torch.cuda.device_count())), torch.bfloat16)
    device.bind()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    device.zeros(1)
    # a row of a batch must not depend on how the batch was split over thread blocks
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return device
