"""vLLM's own DP coordinator in a process without ranks: `python -m elastic.vllm.coordination.waves COUNT FRONT OUTPUT PUBLISH`.

It serves when COUNT engines have subscribed. Engines and API servers reconnect and subscribe by themselves to one that is
started again at the same addresses, and wave numbers catch up: it starts at 0 and takes every higher one. It ends with its
parent, which holds the other end of its standard input.

With `--wake` it calls all idle engines once (`waking`): what the coordinator before it was told and did not pass on is lost, and an
engine that asked for the others would wait for them for ever.

With `--stand-by` alone it imports vLLM and waits for these arguments, a JSON list in one line of its standard input.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import importlib
import json
import os
import sys
import threading
from typing import Any

from elastic.vllm.waking import WAKE

STAND_BY = "--stand-by"


def call_all(output: str) -> Any:
    """Say, as an engine would, that a wave starts: read when all engines have subscribed. Returns the socket, to be kept."""
    import zmq
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackEncoder

    caller = zmq.Context.instance().socket(zmq.PUSH)
    caller.connect(output)
    caller.send_multipart(MsgpackEncoder().encode(EngineCoreOutputs(engine_index=WAKE, start_wave=0)))
    return caller


def main() -> None:
    given = sys.argv[1:]
    if given == [STAND_BY]:
        importlib.import_module("vllm.v1.engine.coordinator")
        given = json.loads(sys.stdin.readline() or "[]")
        if not given:
            return  # its parent has ended
    count, front, output, publish = int(given[0]), *given[1:4]

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    caller = call_all(output) if "--wake" in given[4:] else None
    DPCoordinatorProc.run_coordinator(
        engine_count=count,
        front_publish_address=front,
        back_output_address=output,
        back_publish_address=publish,
    )
    del caller


if __name__ == "__main__":
    main()
