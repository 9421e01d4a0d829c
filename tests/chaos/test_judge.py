"""The verdict on a run, from what was seen."""

from typing import Any

import msgspec
import pytest

from chaos.judge import Found, judge
from chaos.records import JournalEntry, ProbeResult, Request
from chaos.scenario import Expect, Probe
from elastic.view import Member
from tests.chaos.test_minimise import _fault

BASE = (0, 1, 2)
REFUSED = msgspec.structs.replace(_fault("f1", 1), at=0.0, members=(), refused="no living rank in slot 1")


def _member(slot: int, incarnation: int = 1) -> Member:
    return Member(slot=slot, incarnation=incarnation, pid=1, pid_start=1, address="")


def _request(outcome: Any = "right", gap_s: float = 0.1) -> Request:
    return Request(
        n=0, id="cmpl-1", prompt=0, due_at=0.0, sent_at=0.0, tokens=(1,), times=(0.1,), ended_at=0.2, finish="length",
        status=200, error="", outcome=outcome, expected_hash="", tokens_hash="", longest_gap_s=gap_s,
    )  # fmt: skip


def _found(**change: Any) -> Found:
    seen: dict[str, Any] = {
        "expect": Expect(),
        "base": BASE,
        "before": {slot: _member(slot) for slot in BASE},
        "after": {0: _member(0), 1: _member(1, 2), 2: _member(2)},
        "live": BASE,
        "whole_after_s": 4.0,
        "what_is_open": "",
        "requests": (_request(),),
        "faults": (_fault("f1", 1),),
        "probes": (),
        "asked": (),
        "journal": (),
        "daemon_ended": "",
    }
    return Found(**seen | change)


def _broken(found: Found) -> set[str]:
    return {one.name for one in judge(found) if not one.ok}


def test_a_run_as_it_should_be_breaks_nothing() -> None:
    assert _broken(_found()) == set()


def _action(step: str) -> JournalEntry:
    return JournalEntry(seq=1, wall=0.0, monotonic=0.0, kind="action", incident="", body={"step": step, "slots": [1]})


@pytest.mark.parametrize(
    ("broken", "change"),
    [
        ("requests", {"requests": (_request("lost"),)}),
        ("requests", {"requests": (_request("failed"),)}),
        ("requests", {"requests": (_request("failed"),) * 2, "expect": Expect(allowed=("failed",), at_most=1)}),
        ("gap", {"requests": (_request(gap_s=2.0),), "expect": Expect(gap_below_s="1s")}),
        ("live", {"live": (0, 2)}),
        ("whole-within", {"whole_after_s": None, "what_is_open": "slot 1 boots"}),
        ("whole-within", {"whole_after_s": 41.0}),
        ("replaced", {"after": {slot: _member(slot) for slot in BASE}}),
        ("kept", {"expect": Expect(kept=(1,))}),
        ("daemon", {"daemon_ended": "it ended with exit code 1"}),
        ("no-action", {"journal": (_action("replace"),), "expect": Expect(no_action=True)}),
        ("causes", {"expect": Expect(causes=("hang",))}),
        ("faults", {"faults": (REFUSED,)}),
        ("probe:up", {"asked": (Probe(name="up", of="gateway"),)}),
    ],
)
def test_what_is_not_as_expected_is_named(broken: str, change: dict[str, Any]) -> None:
    assert broken in _broken(_found(**change))


def test_a_probe_may_fail_as_often_as_it_is_allowed_to() -> None:
    probe = Probe(name="up", of="gateway", may_fail=1)
    looks = tuple(ProbeResult(name="up", mode="during", at=0.0, ok=ok, found="") for ok in (True, False, True))
    assert _broken(_found(asked=(probe,), probes=looks)) == set()
    assert _broken(_found(asked=(probe,), probes=(*looks, looks[1]))) == {"probe:up"}
