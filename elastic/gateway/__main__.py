"""`python -m elastic.gateway`: exit code 0 after SIGTERM, 1 with one line when it cannot start, 2 for wrong usage."""

import argparse
import sys
from collections.abc import Callable

from elastic.front import run_to_exit_code, stop_event
from elastic.gateway.server import Options, serve
from elastic.output import forgive_output


def _number(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not {least:g} or more")
        return value

    parse.__name__ = kind.__name__
    return parse


def parse_options(argv: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m elastic.gateway",
        description="OpenAI-compatible gateway of one group.",
        epilog="example: python -m elastic.gateway --group demo --run-dir run --checkpoint model --model tiny --port 8000",
    )
    parser.add_argument("--group", required=True, help="name of the group; a controller of another is refused")
    parser.add_argument("--run-dir", required=True, help="where gateway.sock, gateway.json and gateway.lock are")
    parser.add_argument("--checkpoint", required=True, help="Hugging Face folder: config.json, tokenizer.json")
    parser.add_argument("--model", required=True, help="what clients call the model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_number(int, 0), default=0, help="0 picks a free one")
    parser.add_argument("--max-queued", type=_number(int, 1), default=256, help="requests in flight, 429 beyond")
    parser.add_argument(
        "--max-model-len", type=_number(int, 2), default=0, help="prompt and answer together; 0: what the model allows"
    )
    parser.add_argument(
        "--request-timeout", type=_number(float, 0.001), default=300.0, help="seconds without a token, then an error"
    )
    parser.add_argument(
        "--grace", type=_number(float, 0), default=30.0, help="seconds that requests in flight get after SIGTERM"
    )
    args = parser.parse_args(argv)
    return Options(
        group=args.group,
        run_dir=args.run_dir,
        checkpoint=args.checkpoint,
        model=args.model,
        host=args.host,
        port=args.port,
        max_queued=args.max_queued,
        max_model_len=args.max_model_len,
        request_timeout_s=args.request_timeout,
        grace_s=args.grace,
    )


async def _serve(options: Options) -> None:
    stop = stop_event()
    await serve(options, stop=stop)


def main() -> int:
    options = parse_options()
    forgive_output()
    return run_to_exit_code(lambda: _serve(options))


if __name__ == "__main__":
    sys.exit(main())
