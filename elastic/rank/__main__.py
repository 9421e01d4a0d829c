"""A rank process: `python -m elastic.rank --run-dir DIR --slot N --incarnation N`, or, with `--spare N` instead, one that
waits to become a rank.

The group's configuration is `DIR/config.json`. A failure at start ends in one line `error: …` on stderr and exit code 1.
"""

import argparse
import sys
from pathlib import Path

from elastic.cores import confine_rank
from elastic.errors import ElasticError
from elastic.output import forgive_output
from elastic.paths import config_path, read_config, socket_path


def main() -> int:
    parser = argparse.ArgumentParser(prog="elastic.rank")
    parser.add_argument("--run-dir", required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--slot", type=int)
    what.add_argument("--spare", type=int, metavar="N", help="wait to become a rank")
    parser.add_argument("--incarnation", type=int, default=1)
    options = parser.parse_args()
    forgive_output()
    try:
        config = read_config(config_path(Path(options.run_dir)))
        if options.slot is not None and not 0 <= options.slot < config.max_ranks:
            raise ElasticError(f"--slot {options.slot} is outside 0..{config.max_ranks - 1}")
        # torch is imported here, so that a wrong argument costs no seconds
        if options.spare is not None:
            from elastic.rank.spare import stand_by

            stand_by(config, options.spare)
        else:
            from elastic.rank.boot import prepare, serve

            confine_rank(config, options.slot)
            address = socket_path(config.root, options.slot, options.incarnation)
            serve(prepare(config, options.slot), options.slot, options.incarnation, address)
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
