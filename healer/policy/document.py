"""A YAML file as plain values, and the place of each."""

import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import ConstructorError, RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode
from ruamel.yaml.reader import ReaderError

from elastic.errors import ElasticError
from healer.policy.conflict import Contradiction
from healer.policy.messages import kind_of
from healer.policy.schema import KeyPath

_MAX_NODES = 20_000
_MAX_DEPTH = 32
_MAX_OPEN = 200
"""Brackets open at once, counted without regard to quotes. The reader takes quadratic time over them, so they are counted
before it begins."""
_MAX_PARTS = 8_000
"""Lines and commas. The reader takes a quarter of a millisecond for each; a thousand rules of eight lines have as many."""
_BRACKETS = re.compile(r"[\[\]{}]")
_ABSENT = object()

_Place = tuple[int, int]


class PolicyError(ElasticError):
    """`problems`: one line each, "file:line:column: path: what is wrong, expected what"."""

    def __init__(self, problems: list[str]) -> None:
        several = [f"the policy has {len(problems)} problems", *problems]
        super().__init__("\n".join(several if len(problems) > 1 else problems))
        self.problems = tuple(problems)


_TOO_DEEP = "is too large or too deeply nested (aliases count), expected a policy"


class _Constructor(RoundTripConstructor):
    """The reader's own, with the place of what cannot be a value or a key."""

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        if isinstance(node, MappingNode):
            for key, _ in node.value:
                if not isinstance(key, ScalarNode):
                    raise ConstructorError(None, None, "a key is a list or a mapping, expected a word", key.start_mark)
        try:
            return super().construct_object(node, deep)
        except MarkedYAMLError:
            raise
        except (ValueError, TypeError, OverflowError, AttributeError) as error:
            what = f"{_short(node.value)}: {error}" if isinstance(node, ScalarNode) else str(error)
            if isinstance(node, ScalarNode) and node.value.lstrip("+-").isdigit():
                what = f"{_short(node.value)} is a number of {len(node.value)} digits, expected fewer"
            raise ConstructorError(None, None, what, node.start_mark) from None


def _short(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:37]!r}..."


class Document:
    """A YAML file as plain values, and the place of each."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._places: dict[KeyPath, tuple[_Place, _Place]] = {(): ((1, 1), (1, 1))}
        self._lines = text.splitlines()
        self._nodes = 0
        self._refuse_endless(text)
        yaml = YAML(typ="rt", pure=True)
        yaml.Constructor = _Constructor
        try:
            root = yaml.load(text)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            told = (
                [error.context, error.problem]
                if str(error.problem).startswith("but ")
                else [error.problem or error.context]
            )
            what = " ".join(", ".join(filter(None, told)).split())
            raise PolicyError([f"{name}:{line}:{column}: not valid YAML: {what}"]) from None
        except ReaderError as error:
            line, column = text.count("\n", 0, error.position) + 1, error.position - text.rfind("\n", 0, error.position)
            code = error.character if isinstance(error.character, int) else ord(error.character)
            what = f"character U+{code:04X} is not allowed, expected text"
            raise PolicyError([f"{name}:{line}:{column}: not valid YAML: {what}"]) from None
        except (YAMLError, ValueError) as error:
            raise PolicyError([f"{name}:1:1: not valid YAML: {' '.join(str(error).split())}"]) from None
        except RecursionError:
            raise PolicyError([f"{name}:1:1: {_TOO_DEEP}"]) from None
        if not isinstance(root, CommentedMap):
            raise PolicyError([f"{name}:1:1: is {kind_of(root)}, expected a mapping with apiVersion: healer/v1"])
        self.data = self._plain(root, ())

    def conflict(self, one: Contradiction) -> tuple[int, int, str]:
        """The place within the value where that is known and the value stands as it is in one line."""
        line, column, text = self.problem(one.path, one.text)
        value = self.at(one.path)
        if one.at is not None and isinstance(value, str):
            there = self._lines[line - 1][column - 1 :]
            for quote in ("", "'", '"'):
                if there.startswith(quote + value):
                    return line, column + len(quote) + one.at - 1, text
        return line, column, text

    def at(self, path: KeyPath) -> Any:
        """The value at a place; None where there is none."""
        node: Any = self.data
        for part in path:
            try:
                node = node[part]
            except (KeyError, IndexError, TypeError):
                return None
        return node

    def written(self, path: KeyPath) -> KeyPath:
        """A path of the schema as it stands in the file: short forms and kinds of a union are no keys there."""
        node: Any = self.data
        found: list[str | int] = []
        for part in path:
            if isinstance(node, dict):
                if part not in node and node.get("kind") == part:
                    continue
                found.append(part)
                node = node.get(part, _ABSENT)
            elif isinstance(node, list) and isinstance(part, int) and part < len(node):
                found.append(part)
                node = node[part]
            else:
                break
        return tuple(found)

    def problem(self, path: KeyPath, text: str, at_key: bool = False) -> tuple[int, int, str]:
        known = path
        while known not in self._places:
            known = known[:-1]
        key, value = self._places[known]
        # what is missing is reported where its parent's key stands
        line, column = key if at_key or known != path else value
        shown = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
        return line, column, f"{shown}: {text}"

    def _refuse_endless(self, text: str) -> None:
        """Raises PolicyError for what the reader would work on for minutes."""
        depth = 0
        for found in _BRACKETS.finditer(text):
            depth = depth + 1 if found[0] in "[{" else max(0, depth - 1)
            if depth > _MAX_OPEN:
                line = text.count("\n", 0, found.start()) + 1
                column = found.start() - text.rfind("\n", 0, found.start())
                raise PolicyError([f"{self.name}:{line}:{column}: {_TOO_DEEP}"])
        parts = len(self._lines) + text.count(",")
        if parts > _MAX_PARTS:
            raise PolicyError([f"{self.name}:1:1: has {parts} lines and commas, expected at most {_MAX_PARTS}"])

    def _plain(self, node: Any, path: KeyPath) -> Any:
        self._nodes += 1
        if self._nodes > _MAX_NODES or len(path) > _MAX_DEPTH:
            line, column, _ = self.problem(path, "")
            raise PolicyError([f"{self.name}:{line}:{column}: {_TOO_DEEP}"])
        if isinstance(node, CommentedMap):
            result = {}
            for key, value in node.items():
                self._note(node, key, (*path, key), path)
                result[key] = self._plain(value, (*path, key))
            return result
        if isinstance(node, CommentedSeq):
            for index in range(len(node)):
                self._note(node, index, (*path, index), path)
            return [self._plain(value, (*path, index)) for index, value in enumerate(node)]
        for kind in (bool, int, float, str):
            if isinstance(node, kind):
                return kind(node)
        return node

    def _note(self, node: Any, key: Any, path: KeyPath, parent: KeyPath) -> None:
        try:
            line, column = node.lc.item(key) if isinstance(node, CommentedSeq) else node.lc.value(key)
            key_line, key_column = (line, column) if isinstance(node, CommentedSeq) else node.lc.key(key)
        except (KeyError, TypeError):  # merged in from an anchor
            self._places[path] = self._places[parent]
            return
        self._places[path] = ((key_line + 1, key_column + 1), (line + 1, column + 1))
