import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.errors import ElasticError
from healer.incidents import summarise
from healer.journal import Answer, Journal, Kind, exported, open_readonly, recent, timeline
from healer.journal_file import FIRST_SCHEMA
from healer.retention import Retention
from tests.healer.support import FakeClock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def test_what_was_flushed_is_there_after_reopening_and_numbers_go_on(path: Path) -> None:
    journal = Journal.open(path, FakeClock())
    first = journal.add(Kind.DECISION, {"n": 1}, "inc-1")
    journal.flush()
    journal.close()
    journal = Journal.open(path, FakeClock())
    assert journal.set_aside is None
    assert journal.add(Kind.DECISION, {"n": 2}) == first + 1
    journal.flush()
    assert [e.body["n"] for e in journal.recent(Kind.DECISION, 10)] == [2, 1]
    assert journal.entries == 2
    journal.close()


def test_what_was_flushed_survives_a_sigkill_of_the_writer(path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from healer.clock import SystemClock\n"
        "from healer.journal import Journal, Kind\n"
        "journal = Journal.open(Path(sys.argv[1]), SystemClock())\n"
        "for n in range(100): journal.add(Kind.ACTION, {'n': n}); journal.flush()\n"
        "journal.add(Kind.ACTION, {'n': 'never flushed'})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)
    assert done.returncode == -9
    journal = Journal.open(path, FakeClock())
    assert journal.set_aside is None
    assert [e.body["n"] for e in journal.recent(Kind.ACTION, 1000)] == list(range(99, -1, -1))
    journal.close()


@pytest.mark.parametrize("damage", ["text", "header", "truncated", "middle"])
def test_a_damaged_journal_is_set_aside_whole_and_a_fresh_one_begun(path: Path, damage: str) -> None:
    journal = Journal.open(path, FakeClock())
    for n in range(2000):
        journal.add(Kind.EVIDENCE, {"n": n, "text": "x" * 50}, "inc-1")
    journal.flush()
    journal.checkpoint()
    journal.close()
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(
        {
            "text": b"this is no database at all" * 200,
            "header": os.urandom(100) + content[100:],
            "truncated": content[:half],
            "middle": content[:4096] + os.urandom(len(content) - 8192) + content[-4096:],
        }[damage]
    )
    left = path.read_bytes()
    journal = Journal.open(path, FakeClock())
    assert journal.set_aside is not None
    assert journal.set_aside.name.startswith("journal.db.corrupt-2023")
    assert journal.set_aside.read_bytes() == left, "kept for a human"
    assert journal.entries == 0
    assert journal.add(Kind.ACTION, {}) == 1
    assert journal.flush()
    journal.close()


def test_a_journal_of_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=9")
    connection.close()
    with pytest.raises(ElasticError, match="schema 9"):
        Journal.open(path, FakeClock())
    assert path.exists()


def test_a_place_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "journal.db").mkdir()
    with pytest.raises(ElasticError, match=r"journal\.db"):
        Journal.open(tmp_path / "journal.db", FakeClock())


def test_entries_wait_in_order_while_the_journal_cannot_be_written(path: Path) -> None:
    journal = Journal.open(path, FakeClock())
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal.add(Kind.ACTION, {"n": 1})
    assert not journal.flush()
    assert "locked" in journal.error
    journal.add(Kind.ACTION, {"n": 2})
    assert not journal.flush()
    other.execute("COMMIT")
    assert journal.flush()
    assert journal.error == ""
    assert [e.body["n"] for e in journal.recent(Kind.ACTION, 10)] == [2, 1]
    other.close()
    journal.close()


def test_a_journal_whose_file_cannot_be_opened_for_writing_begins_without_it_and_finds_it_later(path: Path) -> None:
    before = Journal.open(path, FakeClock())
    before.add(Kind.ACTION, {"n": 1})
    before.answer("id-1", Answer("digest", 202, "{}"))
    before.flush()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal = Journal.open(path, FakeClock())
    assert "locked" in journal.error
    assert [e.body["n"] for e in journal.recent(Kind.ACTION, 10)] == [1], "what can be read is known"
    assert journal.answered("id-1") is not None
    assert journal.add(Kind.ACTION, {"n": 2}) == 2
    assert not journal.flush()
    journal.answer("id-2", Answer("digest", 202, "{}"))
    journal.reopen()
    assert not journal.flush()
    assert "locked" in journal.error
    other.execute("COMMIT")
    other.close()
    journal.reopen()
    assert journal.flush()
    assert journal.error == ""
    assert not journal.lost_its_file()
    assert [e.body["n"] for e in before.recent(Kind.ACTION, 10)] == [2, 1]
    assert before.answered("id-2") is not None
    assert journal.close() == before.close() == 0


def test_entries_that_could_not_be_written_to_the_end_are_counted(path: Path) -> None:
    journal = Journal.open(path, FakeClock())
    journal.may_write = lambda: False
    journal.add(Kind.ACTION, {})
    journal.add(Kind.ACTION, {})
    assert journal.waiting == 2
    assert journal.close() == 2


def test_an_incident_is_told_with_the_evidence_that_came_before_it(path: Path) -> None:
    journal = Journal.open(path, FakeClock())
    unrelated = journal.add(Kind.EVIDENCE, {"n": "other"})
    early = journal.add(Kind.EVIDENCE, {"n": "early"})
    journal.add(Kind.VERDICT, {"entries": [early]}, "inc-1")
    journal.add(Kind.OUTCOME, {"n": "end"}, "inc-1")
    journal.add(Kind.OUTCOME, {"n": "another"}, "inc-2")
    journal.flush()
    seqs = [e.seq for e in journal.timeline("inc-1")]
    assert seqs == [early, early + 1, early + 2]
    assert unrelated not in seqs
    assert journal.timeline("inc-9") == []
    assert journal.timeline("") == []
    assert {e.incident for e in journal.incidents(limit=1)} == {"inc-2"}
    journal.close()


def test_history_can_be_read_beside_a_running_daemon_and_never_changes_it(path: Path) -> None:
    journal = Journal.open(path, FakeClock())
    journal.add(Kind.DECISION, {"n": 1}, "inc-1")
    journal.flush()
    reader = open_readonly(path)
    assert [e.body["n"] for e in recent(reader, Kind.DECISION, 5)] == [1]
    assert len(timeline(reader, "inc-1")) == 1
    with pytest.raises(sqlite3.OperationalError):
        reader.execute("DELETE FROM entries")
    reader.close()
    journal.close()


def test_reading_where_there_is_no_journal_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ElasticError, match="healer run"):
        open_readonly(tmp_path / "journal.db")


def test_check_pointing_keeps_the_write_ahead_log_short(path: Path) -> None:
    journal = Journal.open(path, FakeClock())
    for n in range(500):
        journal.add(Kind.EVIDENCE, {"n": n})
        journal.flush()
    before = journal.wal_bytes
    journal.checkpoint()
    journal.add(Kind.EVIDENCE, {"n": 500})
    journal.flush()
    assert 0 < journal.wal_bytes <= before
    assert journal.entries == 501
    journal.close()


def test_a_journal_that_runs_for_ever_keeps_its_size_and_the_newest(path: Path) -> None:
    journal, keep = Journal.open(path, FakeClock()), Retention(incidents=5, entries=200)
    sizes = []
    for n in range(200):
        incident = f"inc-{n}"
        for kind in (Kind.VERDICT, Kind.DECISION, Kind.ACTION, Kind.OUTCOME):
            journal.add(kind, {"n": n, "text": "x" * 200}, incident)
        for _ in range(20):
            journal.add(Kind.EVIDENCE, {"n": n, "text": "x" * 200})
        journal.flush()
        while journal.prune(keep, ""):
            pass
        journal.checkpoint()
        sizes.append(path.stat().st_size)
    assert max(sizes[50:]) <= 1.2 * sizes[50]
    assert journal.entries == 220
    assert [e.body["n"] for e in journal.recent(Kind.ACTION, 100)] == [199, 198, 197, 196, 195]
    assert len(journal.timeline("inc-199")) == 4
    journal.close()
    reopened = Journal.open(path, FakeClock())
    assert reopened.entries == 220
    reopened.close()


def test_an_open_incident_is_remembered_whole_however_many_came_after_it(path: Path) -> None:
    journal, keep = Journal.open(path, FakeClock()), Retention(incidents=2, entries=0)
    journal.add(Kind.DECISION, {"n": "open"}, "inc-1")
    for n in range(2, 9):
        journal.add(Kind.DECISION, {"n": n}, f"inc-{n}")
    journal.flush()
    while journal.prune(keep, "inc-1"):
        pass
    assert {e.incident for e in journal.incidents(100)} == {"inc-1", "inc-7", "inc-8"}
    journal.close()


def test_a_journal_of_the_first_version_is_taken_over_with_all_its_entries(path: Path) -> None:
    old = sqlite3.connect(path)
    old.executescript(
        "CREATE TABLE entries (seq INTEGER PRIMARY KEY, wall REAL NOT NULL, monotonic REAL NOT NULL, kind TEXT NOT NULL,"
        " incident TEXT NOT NULL, body TEXT NOT NULL) STRICT;"
        "CREATE INDEX by_incident ON entries (incident, seq) WHERE incident != '';"
        "CREATE INDEX by_kind ON entries (kind, seq);"
        "INSERT INTO entries VALUES (7, 1.0, 1.0, 'decision', 'inc-3', '{\"n\": 1}');"
        "PRAGMA user_version=1;"
    )
    old.close()
    journal = Journal.open(path, FakeClock())
    assert journal.set_aside is None
    assert [e.body["n"] for e in journal.timeline("inc-3")] == [1]
    assert journal.add(Kind.ACTION, {}) == 8
    assert journal.flush()
    assert not journal.prune(Retention(), "")
    journal.close()


def test_the_answer_to_a_control_call_is_remembered_across_a_restart(path: Path) -> None:
    journal = Journal.open(path, FakeClock())
    assert journal.answered("id-1") is None
    journal.answer("id-1", Answer("digest", 202, "{}"))
    journal.answer("id-1", Answer("digest", 500, "late"))
    journal.close()
    journal = Journal.open(path, FakeClock())
    assert journal.answered("id-1") == Answer("digest", 202, "{}")
    journal.close()


def test_a_slow_disk_does_not_hold_up_a_flush(path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from healer.clock import SystemClock\n"
        "from healer.journal import Journal, Kind\n"
        "journal = Journal.open(Path(sys.argv[1]), SystemClock())\n"
        "began = time.monotonic()\n"
        "for n in range(50): journal.add(Kind.ACTION, {'n': n}); assert journal.flush()\n"
        "print(time.monotonic() - began)\n"
        "journal.harden()\n"
        "print(time.monotonic() - began)\n"
        "import os; os._exit(0)\n"
    )
    library = path.parent / "slow.so"
    source = path.parent / "slow.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <unistd.h>\nint fsync(int fd) { sleep(3); return 0; }\n"
        "int fdatasync(int fd) { sleep(3); return 0; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    Journal.open(path, FakeClock()).close()
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
        env=os.environ | {"LD_PRELOAD": str(library)},
    )
    flushed, hardened = map(float, done.stdout.split())
    assert flushed < hardened
    assert hardened - flushed >= 3.0, "the disk was as slow as meant"
    assert flushed < 3.0, "no flush waited for it"


def test_verdicts_and_evidence_of_the_first_version_are_told_as_todays(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as old:
        old.executescript(f"{FIRST_SCHEMA} PRAGMA user_version=1;")
        rank = {"slot": 1, "incarnation": 2}
        bodies = (
            ("evidence", {"subject": rank, "what": "pidfd-fired", "source": "processes", "value": 0, "reporter": None}),
            ("verdict", {"verdict": {"rank": rank, "health": "unhealthy", "cause": "process-death"}, "entries": [1]}),
            ("evidence", {"subject": rank | {"kind": "rank"}, "what": "silence"}),
        )
        for kind, body in bodies:
            row = (1.0, 1.0, kind, "inc-1", json.dumps(body))
            old.execute("INSERT INTO entries (wall, monotonic, kind, incident, body) VALUES (?, ?, ?, ?, ?)", row)
        old.commit()
    journal = Journal.open(path, FakeClock())
    seen, verdict, new = journal.timeline("inc-1")
    assert seen.body["subject"] == {"kind": "rank", "slot": 1, "incarnation": 2}
    assert verdict.body["verdict"]["subject"] == {"kind": "rank", "slot": 1, "incarnation": 2}
    assert "rank" not in verdict.body["verdict"]
    assert new.body == bodies[2][1]
    (told,) = summarise([seen, verdict])
    assert (told.causes, told.slots) == (("process-death",), (1,))
    journal.close()


def test_an_export_has_every_entry_in_order_and_one_incident_alone(path: Path) -> None:
    journal = Journal.open(path, FakeClock())
    for n in range(3):
        journal.add(Kind.EVIDENCE, {"n": n}, "inc-1" if n else "")
    journal.flush()
    with contextlib.closing(open_readonly(path)) as reader:
        assert [e.body["n"] for e in exported(reader)] == [0, 1, 2]
        assert [e.body["n"] for e in exported(reader, "inc-1")] == [1, 2]
        assert list(exported(reader, "inc-9")) == []
    journal.close()


def test_a_daemon_that_lost_its_lease_writes_nothing_more(path: Path) -> None:
    former, present = Journal.open(path, FakeClock()), Journal.open(path, FakeClock())
    former.may_write = lambda: False
    former.add(Kind.ACTION, {"by": "former"})
    assert not former.flush()
    assert former.error
    present.add(Kind.ACTION, {"by": "present"})
    assert present.flush()
    former.close()
    assert [e.body["by"] for e in present.recent(Kind.ACTION, 10)] == ["present"]
    present.close()


def test_entries_of_a_former_daemon_in_the_last_moment_do_not_stop_the_present_one(path: Path) -> None:
    former, present = Journal.open(path, FakeClock()), Journal.open(path, FakeClock())
    former.add(Kind.ACTION, {"by": "former"})
    assert former.flush()
    present.add(Kind.ACTION, {"by": "present"})
    present.flush()
    present.add(Kind.ACTION, {"by": "present again"})
    assert present.flush()
    assert [e.body["by"] for e in present.recent(Kind.ACTION, 10)] == ["present again", "present", "former"]
    former.close()
    present.close()
