"""Starts the processes of simulated groups by fork, so that none pays for imports: `python -m tests.durable.forkserver SOCKET`.

A process of one thread that has everything loaded and runs nothing. Each child has a session of its own, no file of its
parent, and a name in /proc/<pid>/comm from its first instruction on, by which a launcher finds it whoever asked for it.
"""

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from elastic import process

BACKLOG = 64


class Order(msgspec.Struct, frozen=True):
    what: str
    """"rank", "gateway", "daemon" or "holder"."""
    comm: str
    """At most 15 bytes."""
    log: str
    arguments: tuple[str, ...]


class Forked(msgspec.Struct, frozen=True):
    pid: int
    pid_start: int


def ask(address: str, order: Order) -> Forked:
    """Have a process started; returns when it exists."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30.0)
        client.connect(address)
        client.sendall(msgspec.json.encode(order) + b"\n")
        return msgspec.json.decode(_line(client), type=Forked)


def named(comm: str) -> list[Forked]:
    """The processes of this name, zombies left out."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                name = Path(f"/proc/{entry}/comm").read_text().rstrip("\n")
            except OSError:
                continue
            pid = int(entry)
            if name == comm and process.is_alive(pid, start := process.start_time(pid)):
                found.append(Forked(pid, start))
    return found


def serve(address: str, bodies: dict[str, Callable[[tuple[str, ...]], None]]) -> None:
    # ended children leave no zombie
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(BACKLOG)
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                try:
                    order = msgspec.json.decode(_line(connection), type=Order)
                except (OSError, msgspec.MsgspecError):
                    continue
                # a child inherits the name, so it never lives without it
                _name(order.comm)
                pid = os.fork()
                if pid == 0:
                    _child(order, bodies[order.what])
                _name("forkserver")
                forked = Forked(pid, process.start_time(pid))
                try:
                    connection.sendall(msgspec.json.encode(forked) + b"\n")
                except OSError:
                    continue  # whoever asked is gone: what it asked for is an orphan, as it would be in life


def _child(order: Order, body: Callable[[tuple[str, ...]], None]) -> None:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.closerange(3, 1024)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        Path(order.log).parent.mkdir(parents=True, exist_ok=True)
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        body(order.arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _name(comm: str) -> None:
    Path("/proc/self/comm").write_text(comm)


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            raise OSError("the connection ended before the line did")
        data += part
    return data


def main() -> None:
    from tests.durable import crashing_daemon, holder, simulated_rank

    def gateway(arguments: tuple[str, ...]) -> None:
        from elastic.gateway.__main__ import main as gateway_main

        sys.argv = ["elastic.gateway", *arguments]
        sys.exit(gateway_main())

    import elastic.gateway.__main__  # noqa: F401 (loaded before the first fork)

    bodies = {"rank": simulated_rank.run, "daemon": crashing_daemon.run, "holder": holder.run, "gateway": gateway}
    serve(sys.argv[1], bodies)


if __name__ == "__main__":
    main()
