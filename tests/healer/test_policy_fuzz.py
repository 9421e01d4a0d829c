"""Whatever stands in a policy file: it loads, or each error names its place. Never a traceback."""

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healer.policy.expressions import HEALING_VARIABLES, ExpressionError, check
from healer.policy.load import PolicyError, check_text

REPOSITORY = Path(__file__).parents[2]
FILES = [
    file.read_text()
    for file in (*sorted((REPOSITORY / "policies").glob("*.yaml")), Path(__file__).parent / "policies/full.yaml")
    if "kind: Policy" in file.read_text()
]
MUTATIONS = 200
WORDS = [
    "~",
    "-1",
    "0",
    "1e400",
    ".nan",
    ".inf",
    "[]",
    "{}",
    "''",
    "2s",
    "0s",
    "x: y",
    "[[1]]",
    "{a: {b: c}}",
    "!!binary aGk=",
]
WORDS += [
    "&a [*a]",
    "*b",
    "<<: 1",
    "'\\0'",
    '"\\0"',
    "2026-01-01",
    "0x10",
    "1_000",
    "yes",
    "? a",
    "- -",
    "\t",
    "%",
    "@",
    "144-1",
]
WORDS += ["99999999999999999999", "'" + "(" * 400 + "'", "ü", "\u2028", "a" * 2000, "!!python/object:os.system x"]


def said(text: str) -> list[str]:
    """The errors, or else the warnings."""
    try:
        return list(check_text(text, name="p.yaml", base=Path("/base")).warnings)
    except PolicyError as error:
        return list(error.problems)


def mutated(text: str, dice: random.Random) -> str:
    lines = text.splitlines()
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(lines))
        line = lines[at]
        match dice.randrange(8):
            case 0:
                del lines[at]
            case 1:
                lines[at] = " " * dice.randrange(9) + line.lstrip()
            case 2:
                lines[at] = line.split(":")[0] + ": " + dice.choice(WORDS)
            case 3:
                lines.insert(at, dice.choice(lines))
            case 4:
                cut = dice.randrange(len(line) + 1)
                lines[at] = line[:cut] + dice.choice(WORDS) + line[cut:]
            case 5:
                lines[at] = line[: dice.randrange(len(line) + 1)]
            case 6:
                lines[at] = re.sub(r"\d+", str(dice.choice([-1, 0, 1, 2**31, 2**63, 10**30])), line)
            case _:
                lines[at] = re.sub(r"[\w-]+", dice.choice(WORDS).replace("\\", ""), line, count=1)
        if not lines:
            return ""
    return "\n".join(lines)


@pytest.mark.parametrize("seed", range(MUTATIONS))
def test_a_damaged_policy_loads_or_names_the_place_of_each_error(seed: int) -> None:
    dice = random.Random(seed)
    text = mutated(dice.choice(FILES), dice)
    for problem in said(text):
        assert re.match(r"p\.yaml:[1-9]\d*:[1-9]\d*: \S", problem), problem
        assert "\n" not in problem
        assert int(problem.split(":")[1]) <= text.count("\n") + 2


def test_most_damage_is_noticed() -> None:
    """A fuzzer whose mutations all load, or all fail as YAML, tests nothing."""
    told = [said(mutated(dice.choice(FILES), dice)) for dice in map(random.Random, range(60))]
    places = sum(any(": spec." in problem for problem in problems) for problems in told)
    assert places >= 8


@given(st.text(alphabet="abcx()[]{}.?:!=<>&|+-*/%'\"\\ 019,\n", max_size=60))
@settings(deadline=None, max_examples=200)
def test_no_condition_ends_in_a_traceback(text: str) -> None:
    error = refusal(text)
    assert error is None or "\n" not in str(error)
    assert error is None or error.at is None or 1 <= error.at <= len(text) + 1


def refusal(condition: str) -> ExpressionError | None:
    try:
        check(condition, {name: example for name, (example, _) in HEALING_VARIABLES.items()})
    except ExpressionError as error:
        return error
    return None
