"""`python -m healer.router`: exit code 0 after SIGTERM, 1 with one line when it cannot start, 2 for wrong usage."""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

# before the imports that take long: until the loop listens to it, the signal that says "read the file" would end the process
signal.signal(signal.SIGHUP, signal.SIG_IGN)

from elastic.front import run_to_exit_code, stop_event  # noqa: E402
from healer.router.server import Router  # noqa: E402


def parse_path(argv: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(
        prog="python -m healer.router",
        description="One OpenAI address in front of vLLM's ranks; requests of a lost rank continue on another.",
        epilog="example: python -m healer.router --config run/routes.json; SIGHUP: read it again; SIGTERM: end",
    )
    parser.add_argument(
        "--config", required=True, type=Path, help="the file that names the ranks; see docs/vllm-router.md"
    )
    path: Path = parser.parse_args(argv).config
    return path


async def _serve(router: Router) -> None:
    stop = stop_event()
    ready = asyncio.Event()
    reload = asyncio.create_task(_reload_when(router, ready), name="signals")
    try:
        await router.serve(stop, ready)
    finally:
        reload.cancel()


async def _reload_when(router: Router, ready: asyncio.Event) -> None:
    """Take SIGHUP once the router runs, and read the file again, for signals that came before were ignored."""
    await ready.wait()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, router.reload)
    router.reload()


def main() -> int:
    path = parse_path()
    return run_to_exit_code(lambda: _serve(Router(path)))


if __name__ == "__main__":
    sys.exit(main())
