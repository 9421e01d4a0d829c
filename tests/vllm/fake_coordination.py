"""What `python -m elastic.vllm.coordination RUN_DIR` says and does, for the ranks of fake_vllm.py; they meet in the folder FAKE_VLLM."""

import json
import os
import socketserver
import sys
from pathlib import Path

DIR, RUN_DIR = Path(os.environ["FAKE_VLLM"]), Path(sys.argv[1])
KEEP: dict = {"expected": [], "refill": None, "refill_epoch": 0, "members": []}


def read(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def obey(order: dict) -> None:
    with (DIR / "coordination").open("a") as log:
        log.write(json.dumps(order) + "\n")
    match order["do"]:
        case "start":
            KEEP["expected"] = order["slots"]
        case "refill":
            given = order["order"]
            KEEP["expected"], KEEP["members"] = given["joiners"], [*given["live"], *given["joiners"]]
            KEEP["refill"] = {"size": order["size"], "host": "127.0.0.1", "port": 1, "ports": [2], "store_port": 3}
            KEEP["refill_epoch"] = given["epoch"]
            for slot in given["joiners"]:
                (DIR / f"hello/{slot}").unlink(missing_ok=True)
            (DIR / "refill").write_text(str(given["epoch"]))
        case "answer":
            (DIR / "answered").write_text(str(read(DIR / f"hello/{KEEP['expected'][0]}")))
        case "end":
            KEEP["refill"] = None
        case "quit":
            (RUN_DIR / "coordination.sock").unlink()
            os._exit(0)


def info() -> dict:
    hello = [slot for slot in KEEP["expected"] if (DIR / f"hello/{slot}").exists()]
    keys = [f"eep_ready/{slot}" for slot in KEEP["members"] if read(DIR / f"eep/{slot}") == KEEP["refill_epoch"]]
    return {
        "pid": os.getpid(), "host": "127.0.0.1", "rpc_port": 9, "store_port": 5, "coordinator_addresses": ["", "", ""],
        "coordinator_pid": os.getpid(), "coordinator_starts": 1, "expected": KEEP["expected"], "hello": hello,
        "answered": [], "ready": [], "trouble": "", "refill": KEEP["refill"], "refill_epoch": KEEP["refill_epoch"],
        "refill_keys": keys if KEEP["refill"] else [],
    }  # fmt: skip


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            obey(json.loads(line))
            self.wfile.write(json.dumps(info()).encode() + b"\n")


if __name__ == "__main__":
    (RUN_DIR / "coordination.sock").unlink(missing_ok=True)
    socketserver.ThreadingUnixStreamServer(str(RUN_DIR / "coordination.sock"), Handler).serve_forever()
