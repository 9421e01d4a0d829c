"""`PYTHON inplace_waves.py FOLDER WHO`, in vLLM's interpreter: the real coordination process with vLLM's own coordinator, and three
engines that are nothing but the sockets they have. WHO dies while they are idle, `coordinator` or `process`; at that moment engine 2
gets a request and says so. Prints what each engine hears after that, as one JSON line."""

# mypy: disable-error-code="import-not-found, import-untyped"
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec
import zmq
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackEncoder

START_S, QUIET_S = 180.0, 3.0
LOST_WAVE = 5


def start(folder: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "elastic.vllm.coordination", folder], start_new_session=True)


async def order(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    until = time.monotonic() + START_S
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(f"{folder}/coordination.sock")
            break
        except OSError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.1)
    writer.write(json.dumps(given).encode() + b"\n")
    found: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    return found


class Engines:
    def __init__(self, output: str, publish: str) -> None:
        context, self._poller = zmq.Context(), zmq.Poller()
        self.subscribed, self.says = [], []
        for _ in range(3):
            hears, says = context.socket(zmq.XSUB), context.socket(zmq.PUSH)
            hears.connect(publish)
            hears.send(b"\x01")
            says.connect(output)
            self._poller.register(hears, zmq.POLLIN)
            self.subscribed.append(hears)
            self.says.append(says)

    def hear(self, deadline_s: float) -> list[list[Any]]:
        """What each heard, until all are quiet after something was heard."""
        heard: list[list[Any]] = [[], [], []]
        until = time.monotonic() + deadline_s
        while (left := until - time.monotonic()) > 0:
            for found, _ in self._poller.poll(1e3 * (min(left, QUIET_S) if any(heard) else left)):
                first, *more = found.recv_multipart()
                words = "ready" if first == b"READY" else msgspec.msgpack.decode(more[0])
                heard[self.subscribed.index(found)].append(words)
                break
            else:
                return heard
        return heard


def main() -> None:
    folder, who = sys.argv[1:]
    process = start(folder)
    try:
        info = asyncio.run(order(folder, {"do": "start", "slots": [0, 1, 2]}))
        engines = Engines(*info["coordinator_addresses"][1:])
        first = engines.hear(START_S)
        if who == "coordinator":
            pid = asyncio.run(order(folder, {"do": "info"}))["coordinator_pid"]
            os.kill(pid, signal.SIGSTOP)  # it is told of the wave, and dies before it can pass that on
            engines.says[2].send_multipart(
                MsgpackEncoder().encode(EngineCoreOutputs(engine_index=2, start_wave=LOST_WAVE))
            )
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
        else:
            process.kill()
            process.wait()
            process = start(folder)
            asyncio.run(order(folder, {"do": "live", "count": 3}))
        again = engines.hear(START_S)
        starts = asyncio.run(order(folder, {"do": "info"}))["coordinator_starts"]
        print(json.dumps({"first": first, "again": again, "starts": starts}))
    finally:
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # sockets that still have something to say
