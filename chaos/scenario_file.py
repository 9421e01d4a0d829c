"""Reading scenario files: every error at once, each with file, line and column, what is wrong and what was expected."""

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from chaos.scenario import Scenario
from elastic.errors import ElasticError
from healer.policy.document import Document, PolicyError
from healer.policy.messages import kind_of

FOLDER = Path(__file__).with_name("scenarios")
MAX_BYTES = 256 << 10


class ScenarioError(ElasticError):
    """`problems`: one line each, "file:line:column: path: what is wrong, expected what"."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class Read(NamedTuple):
    scenario: Scenario
    path: Path
    text: str


def load(path: Path) -> Read:
    """Raises ScenarioError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ScenarioError([f"{path}: is larger than {MAX_BYTES} bytes, expected a scenario"])
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ScenarioError([f"{path}: cannot be read: {error.strerror}, expected a scenario"]) from None
    except UnicodeDecodeError as error:
        raise ScenarioError([f"{path}: is not UTF-8 text (byte {error.start})"]) from None
    return Read(parse(text, str(path)), path, text)


def parse(text: str, name: str) -> Scenario:
    """`name` is what errors call the file. Raises ScenarioError."""
    try:
        document = Document(name, text)
    except PolicyError as error:
        found = [
            problem.replace("a policy", "a scenario").replace("healer/v1", "healer-chaos/v1")
            for problem in error.problems
        ]
        raise ScenarioError(found) from None
    try:
        return Scenario.model_validate(document.data)
    except ValidationError as error:
        lines = set()
        for one in error.errors(include_url=False):
            at_key = one["type"] in ("extra_forbidden", "missing")
            line, column, told = document.problem(document.written(tuple(one["loc"])), _words(dict(one)), at_key)
            lines.add((line, column, told))
        raise ScenarioError([f"{name}:{line}:{column}: {told}" for line, column, told in sorted(lines)]) from None


def load_all(paths: list[Path]) -> list[Read]:
    """Files, and folders of ``*.yaml``, in order; two scenarios of one name are an error. Raises ScenarioError with the problems of
    all files."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if not files:
        raise ScenarioError([f"{', '.join(map(str, paths))}: no *.yaml, expected scenarios"])
    read, problems, names = list[Read](), list[str](), dict[str, Path]()
    for file in files:
        try:
            one = load(file)
        except ScenarioError as error:
            problems += error.problems
            continue
        if (other := names.setdefault(one.scenario.name, file)) != file:
            problems.append(f"{file}: the name {one.scenario.name} is that of {other} too, expected another")
        read.append(one)
    if problems:
        raise ScenarioError(problems)
    return read


def _words(error: dict[str, Any]) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "missing":
        return "is missing, expected a value"
    if kind == "union_tag_invalid":
        return f"{context['tag']!r} is not valid, expected one of {context['expected_tags']}"
    if kind == "union_tag_not_found":
        return "kind is missing, expected the name of a fault"
    if kind == "value_error":
        return str(context["error"])
    expected = str(error["msg"]).replace("Input should be ", "").replace("String should ", "a string that should ")
    return f"{kind_of(value)} is not valid, expected {expected}"
