"""`python -m healer.router`: exit code 0 after SIGTERM, 1 with one line when it cannot start, 2 for wrong usage."""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

# before the imports that take long: until the loop listens to it, the signal that says "read the file" would end the process
signal.signal(signal.SIGHUP, signal.SIG_IGN)

import structlog  # noqa: E402

from elastic.errors import ElasticError  # noqa: E402
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
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
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
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    try:
        asyncio.run(_serve(Router(path)))
    except ElasticError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
