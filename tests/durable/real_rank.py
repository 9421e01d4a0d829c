"""A real rank that writes down which commands it accepted, under which term and epoch, before it carries them out.

`python -m tests.durable.real_rank elastic.rank --run-dir DIR …`: by the second word the launcher finds what it has started.
"""

import sys


def main() -> int:
    del sys.argv[1]
    from elastic.rank import __main__, boot
    from tests.durable.simulated_rank import RecordingAgent

    boot.Agent = RecordingAgent  # type: ignore[attr-defined]
    return __main__.main()


if __name__ == "__main__":
    sys.exit(main())
