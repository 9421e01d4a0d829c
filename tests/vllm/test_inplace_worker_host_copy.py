"""The host copy of experts: what a rank wrote is there after its death, and nothing half-written is ever read."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from elastic.errors import ElasticError
from elastic.vllm.worker.host_copy import HostCopy, Layout

LAYOUT = Layout(model="tiny", layers=3, experts=5, row_bytes=(64, 1000))

WRITER = """
import os, signal, sys
from pathlib import Path
import numpy as np
from elastic.vllm.worker.host_copy import HostCopy, Layout
copy = HostCopy(Path(sys.argv[1]), Layout(model="tiny", layers=3, experts=5, row_bytes=(64, 1000)))
for layer in range(3):
    for piece in copy.row(layer, 1):
        piece[:] = 10 * layer + 1
    copy.written(layer, 1)
copy.row(0, 2)[0][:] = 99  # not ended
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def path() -> Iterator[Path]:
    found = Path(f"/dev/shm/healer-test-experts-{os.getpid()}")
    yield found
    found.unlink(missing_ok=True)


def test_what_a_killed_rank_had_written_is_there_and_what_it_was_writing_is_not(path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", WRITER, str(path)], cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == -signal.SIGKILL
    copy = HostCopy(path, LAYOUT)
    assert copy.absent() == 3 * 5 - 3
    for layer in range(3):
        assert copy.has(layer, 1)
        assert [set(piece.tolist()) for piece in copy.row(layer, 1)] == [{10 * layer + 1}, {10 * layer + 1}]
    assert not copy.has(0, 2)
    copy.close()


def test_rows_do_not_overlap(path: Path) -> None:
    copy = HostCopy(path, LAYOUT)
    keys = [(layer, expert) for layer in range(3) for expert in range(5)]
    for number, key in enumerate(keys):
        for at, piece in enumerate(copy.row(*key)):
            piece[:] = 2 * number + at
    for number, key in enumerate(keys):
        assert [piece.size for piece in copy.row(*key)] == [64, 1000]
        assert all((piece == 2 * number + at).all() for at, piece in enumerate(copy.row(*key)))
    copy.close()


@pytest.mark.parametrize(
    "other",
    [
        Layout(model="large", layers=3, experts=5, row_bytes=(64, 1000)),
        Layout(model="tiny", layers=3, experts=5, row_bytes=(64, 1001)),
    ],
)
def test_the_copy_of_another_model_is_refused_with_the_name_of_the_file(path: Path, other: Layout) -> None:
    HostCopy(path, LAYOUT).close()
    with pytest.raises(ElasticError, match=f"{path}: holds the experts of another model"):
        HostCopy(path, other)


def test_a_file_that_is_no_copy_is_refused(path: Path) -> None:
    path.write_text(json.dumps({"something": "else"}))
    with pytest.raises(ElasticError, match="another model"):
        HostCopy(path, LAYOUT)


def test_too_little_memory_is_an_error_at_the_start_and_leaves_nothing_taken(path: Path) -> None:
    huge = Layout(model="tiny", layers=1000, experts=1000, row_bytes=(1 << 30,))
    with pytest.raises(ElasticError, match="no room for"):
        HostCopy(path, huge)
    assert path.stat().st_size == 0


def test_a_row_in_use_survives_the_close_of_the_copy(path: Path) -> None:
    copy = HostCopy(path, LAYOUT)
    row = copy.row(2, 4)[1]
    row[:] = 7
    copy.close()
    assert np.all(row == 7)
