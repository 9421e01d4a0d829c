"""A rank process: `python -m elastic.rank --run-dir DIR --slot N --incarnation N`.

The group's configuration is `DIR/config.json`. A failure at start ends in one line `error: …` on stderr and exit code 1.
"""

import argparse
import sys
from pathlib import Path

from elastic.errors import ElasticError
from elastic.paths import config_path, read_config, socket_path


def main() -> int:
    parser = argparse.ArgumentParser(prog="elastic.rank")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    options = parser.parse_args()
    try:
        config = read_config(config_path(Path(options.run_dir)))
        if not 0 <= options.slot < config.max_ranks:
            raise ElasticError(f"--slot {options.slot} is outside 0..{config.max_ranks - 1}")
        # torch is imported here, so that a wrong argument costs no seconds
        from elastic.rank.boot import serve

        serve(config, options.slot, options.incarnation, socket_path(config.root, options.slot, options.incarnation))
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
