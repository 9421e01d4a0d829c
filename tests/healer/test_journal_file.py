"""What somebody may do to the journal's files while the daemon runs, and between two of them."""

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

from elastic.errors import ElasticError
from healer.journal import Journal, Kind, open_readonly, recent, timeline
from tests.healer.support import FakeClock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.mark.parametrize("fate", ["removed", "replaced", "emptied", "overwritten"])
def test_a_journal_that_loses_its_file_while_it_runs_goes_on_in_a_new_one(path: Path, fate: str) -> None:
    journal = Journal.open(path, FakeClock())
    for n in range(500):
        journal.add(Kind.ACTION, {"n": n, "text": "x" * 50})
    journal.flush()
    journal.checkpoint()
    if fate == "removed":
        path.unlink()
    elif fate == "replaced":
        path.rename(path.with_name("kept-by-somebody.db"))
        Journal.open(path, FakeClock()).close()
    elif fate == "emptied":
        os.truncate(path, 0)
    else:
        with path.open("r+b") as file:
            file.write(os.urandom(path.stat().st_size))
    journal.add(Kind.ACTION, {"n": "after"}, "inc-9")
    journal.flush()
    with contextlib.suppress(ElasticError):
        # a look at what is damaged tells that it is
        journal.recent(Kind.ACTION, 1000)
    if not journal.lost_its_file():
        assert [e.body["n"] for e in journal.timeline("inc-9")] == ["after"]
        journal.close()
        return
    journal.let_go()
    assert journal.error
    journal.add(Kind.ACTION, {"n": "meanwhile"}, "inc-9")
    assert not journal.flush()
    journal.reopen()
    assert journal.flush()
    assert not journal.lost_its_file()
    journal.add(Kind.ACTION, {"n": "later"}, "inc-9")
    assert journal.flush()
    assert journal.close() == 0
    with contextlib.closing(open_readonly(path)) as reader:
        kept = [e.body["n"] for e in timeline(reader, "inc-9")]
    assert kept[-2:] == ["meanwhile", "later"]


def test_a_log_that_somebody_removes_takes_no_entry_with_it(path: Path) -> None:
    """What is written last is in the log alone, under whatever name; a daemon that is killed then must have left it behind."""
    journal = Journal.open(path, FakeClock())
    journal.add(Kind.ACTION, {"n": 1})
    journal.flush()
    assert not journal.lost_its_file()
    Path(f"{path}-wal").unlink()
    journal.add(Kind.ACTION, {"n": 2})
    journal.flush()
    assert journal.lost_its_file()
    journal.let_go()
    journal.reopen()
    journal.add(Kind.ACTION, {"n": 3})
    assert journal.flush()
    assert not journal.lost_its_file()
    with contextlib.closing(open_readonly(path)) as reader:
        assert [e.body["n"] for e in recent(reader, Kind.ACTION, 10)] == [3, 2, 1]
    journal.close()


def test_a_file_whose_tables_are_gone_is_damaged_and_set_aside_while_the_daemon_runs(path: Path) -> None:
    journal = Journal.open(path, FakeClock())
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("DROP TABLE entries")
    journal.add(Kind.ACTION, {"n": 1})
    assert not journal.flush()
    assert journal.lost_its_file()
    journal.let_go()
    journal.reopen()
    assert journal.flush()
    assert journal.set_aside is not None
    assert [e.body["n"] for e in journal.recent(Kind.ACTION, 10)] == [1]
    journal.close()


def test_a_file_whose_tables_are_gone_is_set_aside_at_the_start(path: Path) -> None:
    Journal.open(path, FakeClock()).close()
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("DROP TABLE entries")
    journal = Journal.open(path, FakeClock())
    assert journal.set_aside is not None
    assert journal.set_aside.exists()
    journal.add(Kind.ACTION, {"n": 1})
    assert journal.flush()
    journal.close()
