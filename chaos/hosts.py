"""Hosts that are network namespaces of this machine, and the switch between them, whose links can fail.

Each namespace has one TUN device; this program holds their other ends and hands packets on. So loss, delay and partitions need
nothing of the kernel but TUN and namespaces: the right to make them (CAP_NET_ADMIN, CAP_SYS_ADMIN), and no `netem`.

``python -m chaos.hosts FOLDER COUNT`` makes them, writes ``hosts.json`` and obeys ``links.json`` until its standard input ends.
"""

import contextlib
import fcntl
import heapq
import os
import random
import select
import shlex
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from elastic.errors import ElasticError

HOSTS, LINKS = "hosts.json", "links.json"
DEVICE = "link0"
"""In each namespace."""
MTU = 16384
LOOK_S = 0.02
"""Between two looks at the rules."""
READY_S = 10.0
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def interpreter_of(host: int) -> str:
    """In the folder, an interpreter that runs in the namespace, with the devices of the namespace in /sys: UCX looks there."""
    return f"python-{host}"


class Rules(msgspec.Struct, frozen=True):
    """What is wrong with the links, now."""

    apart: tuple[int, ...] = ()
    """Hosts that nothing reaches from, or to, the others; among each other they hear."""
    loss: float = 0.0
    """Share of packets that are lost, on every link."""
    delay_s: float = 0.0
    """Of every packet."""


class Made(msgspec.Struct, frozen=True):
    """What a daemon must know to start ranks there."""

    namespaces: tuple[str, ...]


class Hosts:
    """The scenario's side: the switch as a process of its own. Close it. Raises ElasticError where this user may not."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        if shutil.which("ip") is None:
            raise ElasticError("no network namespaces here: the command ip (iproute2) is missing")
        self.set(Rules())
        (folder / HOSTS).unlink(missing_ok=True)
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "chaos.hosts", str(folder), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        end = time.monotonic() + READY_S
        while not (folder / HOSTS).exists():
            if self._switch.poll() is not None or time.monotonic() > end:
                self._switch.kill()
                _, said = self._switch.communicate()
                words = said.decode(errors="replace").strip().splitlines()
                raise ElasticError(f"no network namespaces here: {words[-1] if words else 'no word'}")
            time.sleep(0.01)

    def set(self, rules: Rules) -> None:
        part = self.folder / f".{LINKS}.part"
        part.write_bytes(msgspec.json.encode(rules))
        part.replace(self.folder / LINKS)

    @property
    def rules(self) -> Rules:
        return msgspec.json.decode((self.folder / LINKS).read_bytes(), type=Rules)

    def close(self) -> None:
        if self._switch.poll() is None:
            assert self._switch.stdin is not None
            self._switch.stdin.close()
            try:
                self._switch.wait(5.0)
            except subprocess.TimeoutExpired:
                self._switch.kill()
                self._switch.wait()


class Switch:
    """Hands packets on between TUN devices, by their IPv4 destination 10.77.0.(host + 1)."""

    def __init__(self, links: Path, devices: list[int]) -> None:
        self._links, self._devices = links, devices
        self._rules, self._read_at, self._next_look = Rules(), 0, 0.0
        self._draw = random.Random(1)
        self._late: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        """Until standard input ends."""
        while True:
            now = time.monotonic()
            self._look(now)
            wait_s = LOOK_S if not self._late else min(LOOK_S, max(0.0, self._late[0][0] - now))
            ready, _, _ = select.select([0, *self._devices], [], [], wait_s)
            if 0 in ready and not os.read(0, 1):
                return
            for source, device in enumerate(self._devices):
                if device in ready:
                    self._take(source, device)
            now = time.monotonic()
            while self._late and self._late[0][0] <= now:
                _, _, target, packet = heapq.heappop(self._late)
                self._give(target, packet)

    def _take(self, source: int, device: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(device, MTU + 64)
            except BlockingIOError:
                return
            if len(packet) < 20 or packet[0] >> 4 != 4:
                continue
            target, rules = packet[19] - 1, self._rules
            if not 0 <= target < len(self._devices) or (source in rules.apart) != (target in rules.apart):
                continue
            if rules.loss and self._draw.random() < rules.loss:
                continue
            if rules.delay_s:
                self._count += 1
                heapq.heappush(self._late, (time.monotonic() + rules.delay_s, self._count, target, packet))
            else:
                self._give(target, packet)

    def _give(self, target: int, packet: bytes) -> None:
        # a full queue loses packets, as a switch does
        with contextlib.suppress(OSError):
            os.write(self._devices[target], packet)

    def _look(self, now: float) -> None:
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            changed = self._links.stat().st_mtime_ns
            if changed != self._read_at:
                self._rules, self._read_at = msgspec.json.decode(self._links.read_bytes(), type=Rules), changed


def _device(namespace: str, name: str, host: int) -> int:
    """The near end of a TUN device that lies in `namespace`."""
    from pyroute2 import NetNS, netns  # type: ignore[import-untyped]

    netns.pushns(namespace)
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    finally:
        netns.popns()
    with NetNS(namespace) as inside:
        index = inside.link_lookup(ifname=name)[0]
        inside.addr("add", index=index, address=f"10.77.0.{host + 1}", prefixlen=24)
        inside.link("set", index=index, mtu=MTU, state="up")
        inside.link("set", index=inside.link_lookup(ifname="lo")[0], state="up")
    return device


def main() -> int:
    from pyroute2 import netns

    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    names = [f"healer-{os.getpid()}-{host}" for host in range(count)]
    made = []
    try:
        try:
            for name in names:
                netns.create(name)
                made.append(name)
            devices = [_device(name, DEVICE, host) for host, name in enumerate(names)]
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
        for host, name in enumerate(names):
            path = folder / interpreter_of(host)
            path.write_text(f'#!/bin/sh\nexec ip netns exec {name} {shlex.quote(sys.executable)} "$@"\n')
            path.chmod(0o755)
        part = folder / f".{HOSTS}.part"
        part.write_bytes(msgspec.json.encode(Made(tuple(names))))
        part.replace(folder / HOSTS)
        Switch(folder / LINKS, devices).run()
    finally:
        for name in made:
            with contextlib.suppress(Exception):
                netns.remove(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
