"""The user's own `vllm serve` arguments, as far as healer must understand them. Everything else is passed on unread."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from elastic.errors import ElasticError

_FLAGS = frozenset(
    {
        "enable-elastic-ep",
        "enable-expert-parallel",
        "enable-eplb",
        "enable-fault-tolerance",
        "data-parallel-external-lb",
        "data-parallel-hybrid-lb",
        "data-parallel-multi-port-external-lb",
        "enforce-eager",
        "async-scheduling",
        "enable-prefix-caching",
        "disable-uvicorn-access-log",
        "disable-nccl-for-dp-synchronization",
    }
)
"""Options that take no value; all have a `--no-` form."""

_SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size"} | {
    "-ep": "enable-expert-parallel",
    "-dpn": "data-parallel-rank",
    "-dpa": "data-parallel-address",
    "-dpp": "data-parallel-rpc-port",
}


class Arguments(msgspec.Struct, frozen=True):
    """`options` by name without dashes; a flag is "true" or "false". Where an option has dotted parts (`eplb-config.use_async`),
    they are the whole of it: seen with vLLM 0.33's parser, which drops a JSON object beside them."""

    model: str
    options: dict[str, str]

    @classmethod
    def parse(cls, words: Iterable[str]) -> "Arguments":
        """Raises ElasticError naming the word that cannot be an argument of `vllm serve`."""
        model, options, rest = "", dict[str, str](), list(words)
        while rest:
            word = rest.pop(0)
            if not word.startswith("-"):
                if model:
                    raise ElasticError(f"vllm arguments: {word!r} is neither an option nor the value of one")
                model = word
                continue
            name, equals, value = word.partition("=")
            name = _SHORT.get(name) or name.removeprefix("--").replace("_", "-")
            head, dot, tail = name.partition(".")
            name = head + dot + tail.replace("-", "_")
            if name.removeprefix("no-") in _FLAGS:
                options[name.removeprefix("no-")] = "false" if name.startswith("no-") else "true"
            elif equals:
                options[name] = value
            elif rest and not (rest[0].startswith("-") and not _is_number(rest[0])):
                options[name] = rest.pop(0)
            else:
                options[name] = "true"
        return cls(options.pop("model", model), options)

    def flag(self, name: str, default: bool = False) -> bool:
        return self.options.get(name, str(default)).lower() == "true"

    def text(self, name: str, default: str = "") -> str:
        return self.options.get(name, default)

    def number(self, name: str, default: int | None = None) -> int | None:
        """Raises ElasticError naming the option."""
        value = self.options.get(name)
        if value is None:
            return default
        try:
            return int(value)
        except ValueError:
            raise ElasticError(f"--{name}: {value!r} is not a whole number") from None

    def config(self, name: str) -> dict[str, Any]:
        """A JSON option, or the object that its dotted parts make. Raises ElasticError naming the option."""
        found: dict[str, Any] = {}
        if name in self.options:
            try:
                value = json.loads(self.options[name])
            except json.JSONDecodeError as error:
                raise ElasticError(f"--{name}: not JSON: {error}") from None
            if not isinstance(value, dict):
                raise ElasticError(f"--{name}: expected a JSON object")
            found |= value
        dotted = {option: value for option, value in self.options.items() if option.startswith(f"{name}.")}
        found = {} if dotted else found
        for option, value in dotted.items():
            try:
                found[option.partition(".")[2]] = json.loads(value.lower() if value in ("True", "False") else value)
            except json.JSONDecodeError:
                found[option.partition(".")[2]] = value
        return found


def environment_flag(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "0").strip().lower() in ("1", "true")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
