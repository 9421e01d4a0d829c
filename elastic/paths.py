"""Where a group keeps its files: sockets, logs, configuration and state, all below `run_dir`."""

import hashlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from elastic.config import GroupConfig
from elastic.errors import ElasticError

T = TypeVar("T")


def config_path(run_dir: Path) -> Path:
    return run_dir / "config.json"


def state_path(run_dir: Path) -> Path:
    """Who holds which slot, as the controller of the highest term wrote it; see `elastic.controller.state`."""
    written = states_by_term(run_dir)
    return written[max(written)] if written else state_path_of(run_dir, 0)


def state_path_of(run_dir: Path, term: int) -> Path:
    """Where the controller of this term writes. One file each, so that a controller which is stopped just before it writes,
    and wakes when its term is over, spoils nothing."""
    return run_dir / (f"group.{term}.json" if term else "group.json")


def states_by_term(run_dir: Path) -> dict[int, Path]:
    """The files that controllers with a lease have written."""
    terms = {path: path.name.removeprefix("group.").removesuffix(".json") for path in run_dir.glob("group.*.json")}
    return {int(term): path for path, term in terms.items() if term.isdigit()}


def lock_path(run_dir: Path) -> Path:
    return run_dir / "controller.lock"


def gateway_path(run_dir: Path) -> Path:
    """Written by the gateway when it listens."""
    return run_dir / "gateway.json"


def gateway_socket(run_dir: Path) -> str:
    return str(run_dir / "gateway.sock")


def socket_path(run_dir: Path, slot: int, incarnation: int) -> str:
    return str(run_dir / f"rank-{slot}.{incarnation}.sock")


def spare_socket(run_dir: Path, number: int) -> str:
    """Of a process that stands by to become a rank."""
    return str(run_dir / f"spare-{number}.sock")


def unnamed_socket(address: str) -> str:
    """What a socket is called until its owner listens."""
    return f"{address}~"


def fault_path(run_dir: Path, slot: int, incarnation: int) -> Path:
    """The name of the fault that a rank is asked to commit; see `elastic.rank.faults`."""
    return run_dir / f"fault-{slot}.{incarnation}"


def steps_path(run_dir: Path, slot: int) -> Path:
    """What the ranks of a slot write of each step; see `elastic.flight`."""
    return run_dir / "steps" / f"slot-{slot}.jsonl"


def log_path(run_dir: Path, name: str) -> Path:
    return run_dir / "logs" / f"{name}.log"


def tier_path(run_dir: Path) -> Path:
    """The host-memory tier: in shared memory where the host has it, named after the run directory."""
    shm = Path("/dev/shm")
    base = shm if shm.is_dir() and os.access(shm, os.W_OK) else run_dir
    path = str(run_dir.absolute())
    digest = hashlib.blake2b(path.encode(), digest_size=4).hexdigest()
    return base / f"elastic-tier-{path.strip('/').replace('/', '-')[-100:]}-{digest}"


def write_json(path: Path, value: object) -> None:
    """Replace a file as a whole: a reader sees the old content or the new, never half. Each file here has one writer, so
    what one that was killed half-way left behind is used again by the next."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value)))
    temporary.replace(path)


def read_json(path: Path, kind: type[T]) -> T:
    """Raises ElasticError naming the file and the place in it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ElasticError(f"{path}: no such file") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ElasticError(f"{path}: cannot be read: {error}") from error


def read_config(path: Path) -> GroupConfig:
    return read_json(path, GroupConfig)
