import contextlib
import heapq
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import ElasticError
from healer.lease import LeaseStore, Record, Versioned
from healer.lease.election import Election, Role, Timing
from healer.lease.folder import FolderStore
from healer.lease.keeper import Keeper
from healer.lease.kubernetes import KubernetesStore
from tests.healer.kubernetes_api import ApiServer

TIMING = Timing(ttl_s=3.0, renew_s=0.5, call_deadline_s=0.5, margin_s=0.5)
QUICK = Timing(ttl_s=1.0, renew_s=0.1, call_deadline_s=0.2, margin_s=0.2)


class MemoryStore:
    def __init__(self) -> None:
        self.now: Versioned | None = None
        self.broken = False

    def read(self, *, deadline_s: float) -> Versioned | None:
        if self.broken:
            raise ElasticError("store: no answer")
        return self.now

    def replace(self, record: Record, version: str | None, *, deadline_s: float) -> bool:
        if self.broken:
            raise ElasticError("store: no answer")
        if (self.now.version if self.now else None) != version:
            return False
        self.now = Versioned(record, f"{record.term}.{record.beat}")
        return True


class Time:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def keeper(store: LeaseStore, name: str, clock: Time, said: list[Role] | None = None) -> Keeper:
    return Keeper(store, TIMING, (said if said is not None else []).append, name=name, monotonic=clock)


def test_the_first_daemon_acts_and_a_second_waits() -> None:
    store, clock = MemoryStore(), Time()
    first, second = keeper(store, "a", clock), keeper(store, "b", clock)
    first.turn()
    second.turn()
    assert (first.armed(), second.armed()) == (True, False)
    for _ in range(20):
        clock.at += 0.5
        first.turn()
        second.turn()
        assert (first.armed(), second.armed()) == (True, False)
    assert second.holder == "a"


def test_a_standby_takes_over_within_the_lifetime_when_the_holder_is_gone_with_a_higher_term() -> None:
    store, clock = MemoryStore(), Time()
    first, second = keeper(store, "a", clock), keeper(store, "b", clock)
    first.turn()
    second.turn()
    gone = clock.at
    while not second.armed():
        clock.at += 0.5
        second.turn()
    assert clock.at - gone <= TIMING.ttl_s + TIMING.renew_s
    assert second.term == first.term + 1
    assert not first.armed(), "by its own clock, without asking anybody"


def test_a_holder_that_cannot_reach_the_store_stops_acting_before_anybody_else_starts() -> None:
    store, clock, said = MemoryStore(), Time(), list[Role]()
    first, second = keeper(store, "a", clock, said), keeper(store, "b", clock)
    first.turn()
    second.turn()
    store.broken = True
    clock.at += TIMING.ttl_s - TIMING.margin_s
    first.turn()
    assert not first.armed()
    assert "no answer" in first.error
    assert said == [Role.HOLDER, Role.LAPSED]
    store.broken = False
    second.turn()
    assert not second.armed(), "its time is not over for others yet"
    clock.at += TIMING.margin_s
    second.turn()
    assert second.armed()
    first.turn()
    assert not first.armed()


def test_a_holder_whose_time_ran_out_takes_it_again_under_a_new_term_when_nobody_else_did() -> None:
    store, clock = MemoryStore(), Time()
    first = keeper(store, "a", clock)
    first.turn()
    clock.at += 60
    assert not first.armed()
    first.turn()
    assert first.armed()
    assert first.term == 2


def test_a_lease_that_is_given_back_is_taken_without_waiting() -> None:
    store = MemoryStore()
    first = Keeper(store, QUICK, lambda _: None, name="a")
    first.start()
    _wait(first.armed)
    first.close()
    second = Keeper(store, QUICK, lambda _: None, name="b")
    second.turn()
    assert second.armed()
    assert not first.armed()


def test_timing_that_one_slow_call_would_break_is_refused_with_the_numbers() -> None:
    with pytest.raises(ElasticError, match="one slow call"):
        Keeper(MemoryStore(), Timing(ttl_s=3, renew_s=1, call_deadline_s=1, margin_s=1), lambda _: None)


CALM_FROM_S = 120.0
"""Simulated: from then on calls are quick and no answer is lost."""


class _Candidate:
    """Between its calls to the store any time may pass: a frozen process, a slow disk, a lost packet."""

    def __init__(self, name: str, timing: Timing) -> None:
        self.election = Election(name, timing)
        self.armed_spans: list[tuple[float, float]] = []

    def script(self, store: MemoryStore, delay: random.Random, ttl_s: float) -> Generator[float, float, None]:
        """Yields how long it waits; what is written between two yields happens at once."""

        def wait(now: float, *longer_s: float) -> float:
            return delay.choice((0.0, 0.01) if now >= CALM_FROM_S else (0.0, 0.01, 0.3, *longer_s))

        now = yield 0.0
        while True:
            seen = store.read(deadline_s=1)
            now = yield wait(now, ttl_s, 3 * ttl_s)
            self.election.observed(seen, now)
            proposal = self.election.proposal(now)
            if proposal is not None:
                began = now
                now = yield wait(now, ttl_s, 3 * ttl_s)
                done = store.replace(*proposal, deadline_s=1)
                now = yield wait(now, ttl_s)
                if done and (delay.random() < 0.9 or now >= CALM_FROM_S):  # else the answer is lost
                    self.election.written(proposal[0], began)
                    self.armed_spans.append((now, began + self.election.timing.ttl_s - self.election.timing.margin_s))
            now = yield delay.choice((0.1, 0.5))


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), candidates=st.integers(2, 4))
def test_never_two_holders_whatever_is_delayed_frozen_or_lost(seed: int, candidates: int) -> None:
    delay, store, now = random.Random(seed), MemoryStore(), 0.0
    all_ = [_Candidate(str(i), TIMING) for i in range(candidates)]
    due: list[tuple[float, int, Generator[float, float, None]]] = []
    for order, each in enumerate(all_):
        script = each.script(store, delay, TIMING.ttl_s)
        next(script)
        heapq.heappush(due, (delay.random(), order, script))
    while now < CALM_FROM_S + 5 * TIMING.ttl_s:
        now, order, script = heapq.heappop(due)
        heapq.heappush(due, (now + script.send(now), order, script))
    spans = [(start, end, c.election.name) for c in all_ for start, end in c.armed_spans if start < end]
    assert any(end > CALM_FROM_S for _, end, _ in spans), "once nothing is delayed any more, somebody gets to act"
    for start, end, name in spans:
        for other_start, other_end, other in spans:
            if name != other:
                assert end <= other_start or other_end <= start
    terms: dict[int, str] = {}
    for each in all_:
        if each.election.term:
            assert terms.setdefault(each.election.term, each.election.name) == each.election.name


# --- stores -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(params=["folder", "kubernetes"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LeaseStore:
    if request.param == "folder":
        return FolderStore(tmp_path / "lease")
    return kubernetes(request.getfixturevalue("api"), tmp_path)


def kubernetes(server: ApiServer, folder: Path, namespace: str = "serving") -> KubernetesStore:
    (folder / "token").write_text(server.token + "\n")
    (folder / "namespace").write_text(namespace)
    return KubernetesStore("group-a", api=server.url, account=folder)


def test_a_store_replaces_only_what_was_read(store: LeaseStore) -> None:
    assert store.read(deadline_s=5) is None
    assert store.replace(Record("a", 1, 1, 3.0), None, deadline_s=5)
    assert not store.replace(Record("b", 1, 1, 3.0), None, deadline_s=5), "somebody was first"
    seen = store.read(deadline_s=5)
    assert seen is not None
    assert seen.record == Record("a", 1, 1, 3.0)
    assert store.replace(Record("a", 1, 2, 3.0), seen.version, deadline_s=5)
    assert not store.replace(Record("b", 2, 2, 3.0), seen.version, deadline_s=5)
    now = store.read(deadline_s=5)
    assert now is not None
    assert now.record == Record("a", 1, 2, 3.0)
    assert store.replace(Record("", 1, 3, 3.0), now.version, deadline_s=5)
    given_back = store.read(deadline_s=5)
    assert given_back is not None
    assert given_back.record.holder == ""


def test_of_many_writers_at_once_exactly_one_wins_each_round(store: LeaseStore) -> None:
    won: list[int] = []

    def write(name: int, version: str | None, beat: int) -> None:
        if store.replace(Record(str(name), beat, beat, 3.0), version, deadline_s=5):
            won.append(name)

    for beat in range(1, 6):
        seen = store.read(deadline_s=5)
        version = seen.version if seen else None
        threads = [threading.Thread(target=write, args=(n, version, beat)) for n in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(won) == beat


def test_a_store_that_does_not_answer_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-token")
    nowhere = KubernetesStore("x", namespace="serving", api="http://127.0.0.1:9", account=tmp_path)
    with pytest.raises(ElasticError, match=r"lease serving/x at .*no answer") as error:
        nowhere.read(deadline_s=1)
    assert "secret" not in str(error.value)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ElasticError, match="file"):
        FolderStore(file).read(deadline_s=1)


def test_what_others_put_on_the_kubernetes_object_stays_and_people_can_read_it(api: ApiServer, tmp_path: Path) -> None:
    store = kubernetes(api, tmp_path)
    assert store.replace(Record("a", 1, 1, 10.0), None, deadline_s=5)
    (found,) = api.objects.values()
    found["metadata"]["labels"] = {"app": "moe"}
    found["metadata"]["annotations"]["theirs"] = "kept"
    acquired = found["spec"]["acquireTime"]
    seen = store.read(deadline_s=5)
    assert seen is not None
    assert store.replace(Record("a", 1, 2, 10.0), seen.version, deadline_s=5)
    (found,) = api.objects.values()
    assert found["metadata"]["labels"] == {"app": "moe"}
    assert found["metadata"]["annotations"]["theirs"] == "kept"
    assert (found["spec"]["holderIdentity"], found["spec"]["leaseTransitions"]) == ("a", 1)
    assert found["spec"]["acquireTime"] == acquired < found["spec"]["renewTime"]
    seen = store.read(deadline_s=5)
    assert seen is not None
    assert store.replace(Record("b", 2, 3, 10.0), seen.version, deadline_s=5)
    assert next(iter(api.objects.values()))["spec"]["acquireTime"] > acquired


def test_a_token_that_the_kubelet_rotates_is_taken_up_and_a_refusal_tells_why(api: ApiServer, tmp_path: Path) -> None:
    store = kubernetes(api, tmp_path)
    assert store.read(deadline_s=5) is None
    api.token = "rotated"
    with pytest.raises(ElasticError, match="status 401: Unauthorized") as error:
        store.read(deadline_s=5)
    assert "rotated" not in str(error.value)
    (tmp_path / "token").write_text("rotated")
    assert store.read(deadline_s=5) is None
    api.refuse = {"POST": (403, 'leases.coordination.k8s.io is forbidden: cannot create resource "leases"')}
    with pytest.raises(ElasticError, match=r"status 403: leases.*cannot create"):
        store.replace(Record("a", 1, 1, 3.0), None, deadline_s=5)
    api.refuse = {"POST": (429, "too many requests, please try again later")}
    with pytest.raises(ElasticError, match="429"):
        store.replace(Record("a", 1, 1, 3.0), None, deadline_s=5)


def test_a_namespace_that_does_not_exist_is_an_error_and_not_a_lost_race(api: ApiServer, tmp_path: Path) -> None:
    store = kubernetes(api, tmp_path, namespace="no-such")
    assert store.read(deadline_s=5) is None
    with pytest.raises(ElasticError, match='namespaces "no-such" not found'):
        store.replace(Record("a", 1, 1, 3.0), None, deadline_s=5)


def test_an_object_of_somebody_else_is_not_taken(api: ApiServer, tmp_path: Path) -> None:
    store = kubernetes(api, tmp_path)
    assert store.replace(Record("a", 1, 1, 3.0), None, deadline_s=5)
    del next(iter(api.objects.values()))["metadata"]["annotations"]
    with pytest.raises(ElasticError, match="not written by healer"):
        store.read(deadline_s=5)


@pytest.mark.parametrize("kind", ["folder", "kubernetes"])
def test_terms_go_on_where_somebody_deletes_the_lease(kind: str, api: ApiServer, tmp_path: Path) -> None:
    store: LeaseStore = FolderStore(tmp_path / "lease") if kind == "folder" else kubernetes(api, tmp_path)
    clock = Time()
    first = Keeper(store, TIMING, lambda _: None, name="a", monotonic=clock, floor=41)
    first.turn()
    assert (first.armed(), first.term) == (True, 42), "the ranks have seen 41"
    if kind == "folder":
        shutil.rmtree(tmp_path / "lease")
    else:
        api.objects.clear()
    clock.at += TIMING.renew_s
    first.turn()
    assert first.term == 43
    seen = store.read(deadline_s=5)
    assert seen is not None
    assert (seen.record.holder, seen.record.term) == ("a", 43)


def test_a_damaged_record_is_an_error_and_never_taken_for_a_free_lease(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    assert store.replace(Record("a", 7, 1, 3.0), None, deadline_s=1)
    next(tmp_path.glob("lease-*")).write_text('{"holder": "a"')
    with pytest.raises(ElasticError, match="damaged"):
        store.read(deadline_s=1)


def test_a_writer_frozen_since_long_ago_does_not_believe_that_it_wrote(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    assert store.replace(Record("a", 1, 1, 3.0), None, deadline_s=1)
    assert store.replace(Record("b", 2, 2, 3.0), "1", deadline_s=1)
    assert store.replace(Record("b", 2, 3, 3.0), "2", deadline_s=1)
    assert not store.replace(Record("a", 1, 2, 3.0), "1", deadline_s=1), "the name is free again"
    now = store.read(deadline_s=1)
    assert now is not None
    assert now.record.beat == 3
    assert len(list(tmp_path.iterdir())) == 1


HOLDER = """
import sys, time
from pathlib import Path
from healer.lease.election import Timing
from healer.lease.folder import FolderStore
from healer.lease.keeper import Keeper
keeper = Keeper(FolderStore(Path(sys.argv[1])), Timing(ttl_s=1.0, renew_s=0.1, call_deadline_s=0.2, margin_s=0.2),
                lambda role: None)
keeper.start()
log = open(sys.argv[2], "a", buffering=1)
while True:
    at = time.monotonic()  # before the question: a stop between the two is the ranks' business, who know the term
    if keeper.armed():
        log.write(f"{at} {keeper.term}\\n")
    time.sleep(0.002)
"""


def test_a_stopped_holder_that_wakes_after_a_takeover_does_not_act_again(tmp_path: Path) -> None:
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lease")]
    first = subprocess.Popen([*command, str(logs[0])])
    second = None
    try:
        _wait(lambda: _acts(logs[0]))
        second = subprocess.Popen([*command, str(logs[1])])
        os.kill(first.pid, signal.SIGSTOP)
        _wait(lambda: _acts(logs[1]))
        os.kill(first.pid, signal.SIGCONT)
        woken = time.monotonic()
        _wait(lambda: _acts(logs[1])[-1][0] > woken + 0.5)
        assert all(at < woken for at, _ in _acts(logs[0])), "not one act after it woke"
        assert _acts(logs[1])[0][1] == _acts(logs[0])[-1][1] + 1, "under the next term"
    finally:
        for each in filter(None, (first, second)):
            each.kill()
            each.wait()


def _acts(log: Path) -> list[tuple[float, int]]:
    with contextlib.suppress(FileNotFoundError):
        return [(float(a), int(t)) for a, _, t in (line.partition(" ") for line in log.read_text().splitlines()) if t]
    return []


def _wait(condition: Any, deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)
