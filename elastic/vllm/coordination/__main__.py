"""`python -m elastic.vllm.coordination RUN_DIR [--host ADDRESS]`"""

import argparse
import asyncio
import signal
from pathlib import Path

from elastic.vllm.coordination.host import Host


async def serve(run_dir: Path, host: str) -> None:
    found = Host(run_dir, host)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, found.stop)
    await found.run()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m elastic.vllm.coordination", description=serve.__doc__)
    parser.add_argument("run_dir", type=Path, help="for its socket and coordination.json")
    parser.add_argument("--host", default="127.0.0.1", help="address at which all ranks reach this host")
    given = parser.parse_args()
    asyncio.run(serve(given.run_dir, given.host))


if __name__ == "__main__":
    main()
