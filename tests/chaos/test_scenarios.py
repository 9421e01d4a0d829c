"""The scenarios that come with healer, and what is said of wrong ones."""

from pathlib import Path

import pytest

from chaos.injectors.registry import kinds
from chaos.scenario_file import FOLDER, Read, ScenarioError, load, load_all, parse

GOOD = """\
apiVersion: healer-chaos/v1
kind: Scenario
metadata: {name: one, fear: something terrible happens}
spec:
  faults:
    - {kind: kill, slots: [1], at: 1s}
"""


@pytest.fixture(scope="module")
def shipped() -> list[Read]:
    return load_all([FOLDER])


def test_every_scenario_is_read_and_says_what_one_would_be_afraid_of(shipped: list[Read]) -> None:
    read = shipped
    assert len(read) >= 40
    assert all(one.path.stem == one.scenario.name for one in read), "a scenario is found by its name"
    assert len({one.scenario.metadata.fear for one in read}) == len(read), "no two are the same fear"


def test_the_scenarios_use_every_fault_that_needs_no_gpu(shipped: list[Read]) -> None:
    used = {fault.kind for one in shipped for fault in one.scenario.spec.faults}
    of_gpus = {"illegal-address", "misaligned-address", "device-assert", "gpu-memory", "context-freed"}
    assert set(kinds()) - used <= of_gpus | {"order"}


def test_the_short_subset_is_short(shipped: list[Read]) -> None:
    subset = [one for one in shipped if "ci" in one.scenario.metadata.tags]
    assert 8 <= len(subset) <= 16
    assert len({one.scenario.spec.group.key for one in subset}) <= 2, "each further group takes its start"


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (("at: 1s", "at: 1"), 6, "1 is not a duration"),
        (("kind: kill", "kind: kil"), 6, "'kil' is not valid, expected one of 'kill', 'stop'"),
        (("slots: [1]", "slots: [1], random: 2"), 6, "expected either slots"),
        (("at: 1s", "at: 1s, duration: 2s"), 6, "kill is over at once, expected no duration"),
        (("at: 1s", "at: 1s, atRequest: 4"), 6, "expected one of at, atRequest and when"),
        (("at: 1s", "when: {sequence: loss, step: dance}"), 6, "'dance' is not valid"),
        (("at: 1s", "att: 1s"), 6, "unknown key"),
        (("name: one", "name: One!"), 3, "'One!' is not valid"),
        (("fear: something terrible happens", "fear: no"), 3, "at least 10 characters"),
        (("apiVersion: healer-chaos/v1", "apiVersion: v2"), 1, "healer-chaos/v1"),
        (("faults:", "faultz:"), 5, "unknown key"),
        (("kind: Scenario", "kind: [Scenario"), 3, "not valid YAML"),
    ],
)
def test_a_wrong_scenario_is_refused_with_its_line(change: tuple[str, str], line: int, words: str) -> None:
    assert change[0] in GOOD
    with pytest.raises(ScenarioError) as caught:
        parse(GOOD.replace(change[0], change[1], 1), "x.yaml")
    first = caught.value.problems[0]
    assert first.startswith(f"x.yaml:{line}:"), first
    assert words in str(caught.value)


def test_all_wrong_files_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD.replace("slots: [1]", "slots: one"))
    (tmp_path / "b.yaml").write_text(GOOD.replace("1s", "soon"))
    with pytest.raises(ScenarioError) as caught:
        load_all([tmp_path])
    assert {problem.partition(":")[0] for problem in caught.value.problems} == {
        str(tmp_path / n) for n in ("a.yaml", "b.yaml")
    }


def test_two_scenarios_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(GOOD)
    with pytest.raises(ScenarioError, match="the name one is that of"):
        load_all([tmp_path])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ScenarioError, match="expected scenarios"):
        load_all([tmp_path])
