"""A process that stands by to become a rank's `vllm serve`: everything is imported, nothing has begun.

Run by vLLM's own interpreter, `python -m elastic.vllm.spare`, with a socket of the daemon's as its standard input. Messages are
JSON, one on a line:

    to the daemon     {"ready": true}             all is imported
                      {"unfit": "MODULE"}         importing this has initialised CUDA, which does not bear a fork; it ends
    from the daemon   {"argv": […], "env": {…}, "log": "PATH"}
    to the daemon     {"taken": true}             from here on it is that rank

Who has the other end of the socket is the only one who can give an order, and the end of the socket is the end of a spare:
none outlives its daemon. A secret comes in `env`, and so stands in no file and on no command line.

Of this package it needs nothing else, and of vLLM its command, and the modules below as far as they are there.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import Any

COMMAND = "vllm.entrypoints.cli.main"
WARM = (
    COMMAND,
    # what the command imports when it is called
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.collect_env",
    "vllm.entrypoints.cli.download_kernels",
    "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.preload",
    "vllm.entrypoints.cli.run_batch",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.snapshot",
    # API server
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.serve.tokenize.api_router",
    "model_hosting_container_standards.sagemaker",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core_client",
    # engine
    "vllm.v1.engine.core",
    "vllm.v1.engine.coordinator",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.executor.multiproc_executor",
    # worker
    "vllm.v1.worker.worker_base",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.registry",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.v1.worker.gpu_worker",
)
NOT_INITIALISED = 3
"""CUDA_ERROR_NOT_INITIALIZED of the driver's interface (cuda.h)."""
INET = (socket.AF_INET, socket.AF_INET6)


def cuda_begun() -> bool:
    """Whether the driver is initialised in this process, asked without initialising it."""
    try:
        # not loaded: nobody has called it
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        found = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except (OSError, AttributeError):
        return False
    return bool(found != NOT_INITIALISED)


def warm(without: Sequence[str]) -> str:
    """Import all but these. The name of the module that initialised CUDA; empty: none did. Raises ImportError where vLLM's command
    is not there, RuntimeError where it is that one."""
    for name in WARM:
        if name in without:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            # another version, or a platform that does not have it: a rank imports what it needs
            if name == COMMAND:
                raise
            sys.stderr.write(f"not imported: {name}: {error}\n")
        if cuda_begun():
            if name == COMMAND:
                raise RuntimeError(f"importing {name} initialises CUDA, so there can be no spares")
            return name
    return ""


def let_go_of_listeners() -> None:
    """In a forked child. vLLM's API server starts its engine while it listens for the engine's handshake; an engine that keeps
    that socket makes every later scaling fail, for which rank 0 listens on the same port again (address in use). The port for
    clients is bound by then and does not listen yet; kept, it would take connections after the death of the API server.

    The numbers stay taken: an object of the parent's that is collected in the child closes its number once more, and that must not
    be a file that was opened since."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            one = socket.socket(fileno=number)
        except OSError:
            continue  # of the listing itself
        waits = one.family in INET and one.type == socket.SOCK_STREAM and _waits(one)
        one.detach()
        if waits:
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _waits(one: socket.socket) -> bool:
    """Bound to a port for whoever connects."""
    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return True
    try:
        one.getpeername()
    except OSError as error:
        return error.errno == errno.ENOTCONN and one.getsockname()[1] != 0
    return False


def merged(order: Mapping[str, str], before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank: as ordered, with what the imports changed (`before` to `after`), as they would have changed it in
    the rank. What the order has otherwise than this process had it stays as ordered."""
    found = dict(order)
    for name in {*before, *after}:
        if before.get(name) != after.get(name) and order.get(name) == before.get(name):
            if name in after:
                found[name] = after[name]
            else:
                found.pop(name, None)
    return found


class Order:
    def __init__(self, line: bytes) -> None:
        """Raises ValueError, KeyError, TypeError."""
        found: Any = json.loads(line)
        self.argv, self.log = [str(word) for word in found["argv"]], str(found["log"])
        self.environment = {str(name): str(value) for name, value in found["env"].items()}


def become(order: Order, environment: Mapping[str, str]) -> None:
    """Take the rank's log, environment and arguments. Raises OSError."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = order.argv
    os.register_at_fork(after_in_child=let_go_of_listeners)


def find_title() -> None:
    """vLLM names its engines and workers, which is how they are told apart. Where the name stands in memory is found by way of the
    first environment, so before that is another one. Nothing is written: it would go over /proc/self/environ."""
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.getproctitle()


def main(without: Sequence[str]) -> int:
    daemon = socket.socket(fileno=os.dup(0))
    find_title()
    before = dict(os.environ)
    # or torch initialises the driver when it is asked whether there is a GPU; vLLM sets it too, and it must stay until the forks
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    unfit = warm(without)
    # children share these pages for as long as nobody writes to them, as a collection would
    gc.collect()
    gc.freeze()
    # in its log, for whoever finds a rank that was forked and hangs
    sys.stderr.write(f"all is imported, in {len(os.listdir('/proc/self/task'))} threads\n")
    try:
        _say(daemon, {"unfit": unfit} if unfit else {"ready": True})
        if unfit:
            return 1
        with daemon.makefile("rb") as lines:
            line = lines.readline()
        if not line.endswith(b"\n"):
            return 0  # the daemon has ended, or needs no spare
        order = Order(line)
        become(order, merged(order.environment, before, os.environ))
        _say(daemon, {"taken": True})
    except ConnectionError:
        return 0
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    daemon.close()
    sys.exit(sys.modules[COMMAND].main())


def _say(daemon: socket.socket, message: Mapping[str, object]) -> None:
    daemon.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working folder, which is no place of modules for vLLM's command
    sys.exit(main(sys.argv[1:]))
