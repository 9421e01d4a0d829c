"""vLLM's own DP coordinator in a process without ranks: `python -m elastic.vllm.coordination.waves COUNT FRONT OUTPUT PUBLISH`.

It serves when COUNT engines have subscribed. Engines and API servers reconnect and subscribe by themselves to one that is
started again at the same addresses, and wave numbers catch up: it starts at 0 and takes every higher one. It ends with its
parent, which holds the other end of its standard input.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import os
import sys
import threading


def main() -> None:
    count, front, output, publish = int(sys.argv[1]), *sys.argv[2:5]

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    DPCoordinatorProc.run_coordinator(
        engine_count=count,
        front_publish_address=front,
        back_output_address=output,
        back_publish_address=publish,
    )


if __name__ == "__main__":
    main()
