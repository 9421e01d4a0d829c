"""Policy files that nobody meant to write: each is told with its place, soon, and none ends in a traceback."""

import asyncio
import os
import re
import time
from pathlib import Path

import pytest

from elastic.errors import ElasticError
from healer.policy.load import PolicyError, check_policy, load_policy
from healer.policy.schema import Policy
from healer.reload import PolicyFile
from healer.trace import Trace, TraceError
from tests.healer.support import POLICY, FakeClock

PLAIN = POLICY.encode()
SOON_S = 10.0
"""Each took under two seconds on two busy cores; minutes are what is feared."""


def swapped(old: str, new: str) -> bytes:
    assert old in POLICY
    return POLICY.replace(old, new, 1).encode()


REFUSED = {
    "utf-16": (POLICY.encode("utf-16"), "1:1: is not UTF-8 text (it looks like UTF-16 or UTF-32)"),
    "latin-1": (PLAIN + "# é\n".encode("latin-1"), "13:3: is not UTF-8 text"),
    "binary": (bytes(range(256)) * 20, "2:118: is not UTF-8 text"),
    "zero byte": (PLAIN[:40] + b"\0" + PLAIN[40:], "3:6: not valid YAML: character U+0000 is not allowed"),
    "two documents": (PLAIN + b"---\n" + PLAIN, "expected a single document in the stream, but found another document"),
    "tab": (swapped("    ranks", "\tranks"), "10:1: not valid YAML: found character '\\t'"),
    "tag": (swapped("ranks: 4", "ranks: !!binary aGVsbG8="), "spec.target.ranks: a value with a tag of YAML"),
    "python": (swapped("ranks: 4", 'ranks: !!python/object/apply:os.system ["id"]'), "10:12: spec.target.ranks"),
    "half a character": (swapped("runDir: run", 'runDir: "\\ud800"'), "has a character that no path can have"),
    "a million days": (
        PLAIN + b"  detection: {stallAfter: 1000000d}\n",
        "13:27: spec.detection.stallAfter: '1000000d' is too long, expected at most 3660d",
    ),
    "many keys": (b"".join(b"k%d: 1\n" % n for n in range(19_000)), "has 19000 lines and commas, expected at most 8000"),
    "scalar for a list": (
        PLAIN + b"  healing: {rules: [{name: a, match: {xid: 79}, actions: [human]}]}\n",
        "spec.healing.rules[0].match.xid: 79 is not valid, expected a list, such as [79]",
    ),
    "quarantine": (
        PLAIN + b"  healing: {rules: [{name: a, actions: [quarantine]}]}\n",
        "(bounds.faultBudget puts slots into quarantine)",
    ),
    "a long name": (
        PLAIN + b"  healing: {rules: [{name: a, match: {when: " + b"x" * 1900 + b"}, actions: [human]}]}\n",
        "names xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..., expected",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_file_is_refused_at_its_place(name: str, tmp_path: Path) -> None:
    content, told = REFUSED[name]
    file = tmp_path / "p.yaml"
    file.write_bytes(content)
    began = time.monotonic()
    with pytest.raises(PolicyError) as caught:
        check_policy(file)
    assert time.monotonic() - began < SOON_S
    assert all(re.match(r".*?p\.yaml:\d+:\d+: \S", one) for one in caught.value.problems)
    assert all(len(one) < 600 for one in caught.value.problems)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"\xef\xbb\xbf" + PLAIN, PLAIN.replace(b"\n", b"\r\n"), swapped("ranks: 4", "ranks: &n 4"), b"# \xe2\x98\x83\n" + PLAIN],
    ids=["byte-order mark", "carriage returns", "anchor", "snowman"],
)  # fmt: skip
def test_an_unusual_file_that_means_the_same_loads(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_bytes(content)
    assert load_policy(tmp_path / "p.yaml").spec.target.ranks == 4


def test_what_is_no_file_is_told_and_not_waited_for(tmp_path: Path) -> None:
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for place, told in (
        (pipe, "is no regular file"),
        (Path("/dev/zero"), "is no regular file"),
        (tmp_path, "is a directory"),
        (loop, "cannot be read: Too many levels of symbolic links"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
    ):
        with pytest.raises(PolicyError, match=re.escape(told)):
            load_policy(place)
    for place in (pipe, Path("/dev/zero")):
        with pytest.raises(TraceError, match="is no regular file, expected a trace"):
            Trace(place)


def test_labels_of_a_million_slots_are_checked_soon(tmp_path: Path) -> None:
    labels = "    slotLabels: [{slots: [0-499999], labels: {a: b}}, {slots: [3-999999], labels: {c: d}}]\n"
    rules = "  healing: {rules: [{name: x, match: {labels: {a: b, c: x}, when: slot > 5}, actions: [human]}]}\n"
    (tmp_path / "p.yaml").write_text(POLICY.replace("maxRanks: 6", "maxRanks: 1000000") + labels + rules)
    began = time.monotonic()
    warnings = check_policy(tmp_path / "p.yaml").warnings
    assert time.monotonic() - began < SOON_S
    assert any("no slot has a=b, c=x" in one for one in warnings)


def taken(file: PolicyFile, clock: FakeClock) -> object:
    """What comes of looking at the file once."""

    async def look() -> object:
        clock.now += 10.0
        found = file.poll(clock.monotonic())
        await file.close()
        return found if found is not None else file.poll(clock.monotonic())

    return asyncio.run(look())


def test_whatever_happens_to_the_file_in_a_row_the_last_good_policy_stays_and_the_next_good_one_counts(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    fixed = POLICY.replace("checkpoint: model", "checkpoint: /srv/model").replace("runDir: run", "runDir: /srv/run")
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "p.yaml").write_text(fixed + f"  bounds: {{minRanks: {number + 1}}}\n")
    link, clock = tmp_path / "current", FakeClock()
    link.symlink_to(folders[0])
    path = link / "p.yaml"
    path_text = path.read_text()
    file = PolicyFile(path, load_policy(path), clock)
    assert taken(file, clock) is None

    path.write_text(path_text[:-20])  # torn
    assert "p.yaml:13:" in str(taken(file, clock))
    path.write_text("")
    assert "expected a mapping with apiVersion" in str(taken(file, clock))
    path.unlink()
    assert "no such file" in str(taken(file, clock))
    path.mkdir()
    assert "none that can be read" in str(taken(file, clock))
    assert file.status.rejected

    swap = tmp_path / "next"
    swap.symlink_to(folders[1])
    swap.rename(link)
    policy = taken(file, clock)
    assert isinstance(policy, Policy), policy
    assert policy.spec.bounds.min_ranks == 2
    assert file.status.rejected == ""


def test_a_file_whose_permissions_are_given_back_is_read_again(tmp_path: Path) -> None:
    """As where it is written by another user first, and then made readable."""
    path, clock = tmp_path / "p.yaml", FakeClock()
    path.write_text(POLICY)
    readable = [True]

    def load(place: Path) -> Policy:
        if not readable[0]:
            raise ElasticError(f"{place}: cannot be read: Permission denied")
        return load_policy(place)

    file = PolicyFile(path, load_policy(path), clock, load)
    path.write_text(POLICY + "  bounds: {minRanks: 3}\n")
    readable[0] = False
    assert "Permission denied" in str(taken(file, clock))
    readable[0] = True
    path.chmod(0o640)
    policy = taken(file, clock)
    assert isinstance(policy, Policy)
    assert policy.spec.bounds.min_ranks == 3


def test_the_policies_in_the_documents_are_without_warnings(tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs/policies.md").read_text()
    policies = [one for one in re.findall(r"```yaml\n(.*?)```", document, re.DOTALL) if "kind: Policy" in one]
    assert len(policies) >= 5
    for number, text in enumerate(policies):
        (tmp_path / f"{number}.yaml").write_text(text)
        assert check_policy(tmp_path / f"{number}.yaml").warnings == ()
