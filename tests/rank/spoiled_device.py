"""Spoils the device of a rank's process at the lowest layer, as an illegal address in any kernel does.

Becomes `sitecustomize` of the ranks: which call finds the error first is named by a file `spoil-<place>-<slot>` in the run
directory; from then on every call to the device fails in that process. With `unreachable` in the file that one call fails, as
where a peer does not come, with `stops` the process stands still in it, and with `waits SLOT INCARNATION` it fails when the process of that slot is dead, as NIXL's connect.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

PLACES = {
    "elastic.rank.copies": [("copy", "Copier", "queue")],
    "elastic.rank.comm.cpu": [
        ("step", "CpuEpBackend", "end_step"),
        ("connect", "CpuEpBackend", "connect"),
        ("disconnect", "CpuEpBackend", "disconnect"),
    ],
}

spoiled = False


def option(name: str) -> str:
    return sys.orig_argv[sys.orig_argv.index(name) + 1]


def spoil(owner: Any, name: str, file: Path) -> None:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        import torch

        global spoiled
        if file.exists():
            kind = file.read_text()
            file.unlink()
            if kind:
                refuse(*kind.split())
            spoiled = True
        if spoiled:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with DSA")
        return original(*args, **kwargs)

    setattr(owner, name, call)


def refuse(kind: str, slot: str = "", incarnation: str = "") -> None:
    import psutil

    from elastic import process
    from elastic.errors import Unreachable

    if kind == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind in ("unreachable", "stops"):
        raise Unreachable("nobody came", [0])
    mine = f"--run-dir {option('--run-dir')} --slot {slot} --incarnation {incarnation}"
    lines = {one.pid: " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])}
    born = {pid: process.start_time(pid) for pid, line in lines.items() if mine in line}
    until = time.monotonic() + 60.0
    while any(process.is_alive(pid, start) for pid, start in born.items()) and time.monotonic() < until:
        time.sleep(0.01)
    raise Unreachable(f"slot {slot} died", [int(slot)])


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in PLACES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            for place, owner, method in PLACES[name]:
                file = Path(option("--run-dir")) / f"spoil-{place}-{option('--slot')}"
                spoil(getattr(module, owner), method, file)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "elastic.rank" in sys.orig_argv and "--slot" in sys.orig_argv:
    sys.meta_path.insert(0, Finder())
