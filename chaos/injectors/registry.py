"""All injectors by kind: the union that a scenario's fault is one of."""

from typing import Annotated, Union, get_args

from pydantic import Field

from chaos.injectors import daemons, files, gpus, load, network, processes, resources, within
from chaos.injectors.base import Injector

ALL: tuple[type[Injector], ...] = (
    processes.Kill,
    processes.Stop,
    processes.Terminate,
    processes.KillGateway,
    resources.Oom,
    resources.Throttle,
    within.Within,
    within.Slow,
    within.TransferLate,
    within.TransferDrop,
    within.TransferKill,
    within.LinkLost,
    within.LinkDelay,
    within.CompletionLate,
    within.CompletionDrop,
    within.Mask,
    gpus.Nvml,
    gpus.KernelLine,
    network.Partition,
    network.Loss,
    network.Delay,
    daemons.DaemonKill,
    daemons.DaemonStop,
    daemons.DaemonSecond,
    daemons.DiskFull,
    daemons.DiskSlow,
    daemons.JournalLocked,
    daemons.ClockJump,
    daemons.Scale,
    daemons.Order,
    files.CheckpointMissing,
    files.CheckpointTorn,
    load.Burst,
)

AnyInjector = Annotated[Union[ALL], Field(discriminator="kind")]  # type: ignore[valid-type]  # noqa: UP007


def kinds() -> dict[str, type[Injector]]:
    """By the name that a scenario gives."""
    return {kind: one for one in ALL for kind in get_args(one.model_fields["kind"].annotation)}
