"""What a spare's own process does before and after it becomes a rank (`elastic.vllm.spare`)."""

import os
import subprocess
import sys
from pathlib import Path

from elastic.vllm import spare

ROOT = Path(__file__).parents[2]


def test_a_forked_engine_has_no_listening_or_bound_port_of_its_parent_and_all_else() -> None:
    """In a process of its own, since there is no way back."""
    text = """
import os, socket, stat
from elastic.vllm.spare import let_go_of_listeners
listening = socket.create_server(("127.0.0.1", 0))
bound = socket.socket(); bound.bind(("127.0.0.1", 0))
unix = socket.socket(socket.AF_UNIX); unix.bind(os.environ["SOCKET"]); unix.listen()
client = socket.create_connection(listening.getsockname()); served, _ = listening.accept()
fresh = socket.socket()
ends = os.pipe()
before = os.listdir("/proc/self/fd")
os.register_at_fork(after_in_child=let_go_of_listeners)
if (pid := os.fork()) == 0:
    kept = []
    for one in (listening, bound, unix, client, served, fresh):
        kept.append(stat.S_ISSOCK(os.fstat(one.fileno()).st_mode))
    pipes = len([fd for fd in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + fd) and fd not in before])
    later = os.open(os.devnull, os.O_RDONLY)
    listening.close(); bound.close()
    os.fstat(later)  # has no number that one of them would close
    os._exit(0 if pipes == 0 and kept == [False, False, True, True, True, True] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
client.send(b"x"); assert served.recv(1) == b"x"
"""
    path = f"/tmp/healer-spare-test-{os.getpid()}.sock"
    try:
        subprocess.run([sys.executable, "-c", text], check=True, cwd=ROOT, env={**os.environ, "SOCKET": path})
    finally:
        Path(path).unlink(missing_ok=True)


def test_the_environment_is_as_ordered_with_what_the_imports_would_have_changed_in_a_rank_too() -> None:
    before = {"HOME": "/h", "LEVEL": "1", "GONE": "x", "MINE": "1"}
    after = {"HOME": "/h", "LEVEL": "2", "MADE": "y", "MINE": "3"}
    order = {"HOME": "/h", "LEVEL": "1", "GONE": "x", "MINE": "7", "CUDA_VISIBLE_DEVICES": "3"}
    assert spare.merged(order, before, after) == {
        "HOME": "/h",
        "LEVEL": "2",
        "MADE": "y",
        "MINE": "7",
        "CUDA_VISIBLE_DEVICES": "3",
    }


def test_a_driver_that_nobody_has_loaded_is_not_initialised() -> None:
    assert not spare.cuda_begun()
