"""The schema as JSON Schema (draft 2020-12), with the description of every key: for editors, and for `docs`.

Descriptions are the docstrings below the fields. They are read from the source when they are asked for, so that a daemon
does not pay for them.
"""

import ast
import inspect
import json
import sys
from functools import cache
from typing import Any

from healer.policy.schema import Model, Policy, show_duration
from healer.policy.schema.base import DURATION_PATTERN

Node = dict[str, Any]


def build() -> Node:
    """The schema of a whole policy file."""
    schema = Policy.model_json_schema(by_alias=True, mode="validation")
    models = {model.__name__: model for model in _models(Model)}
    for name, node in (("Policy", schema), *schema["$defs"].items()):
        if name in models:
            _describe(node, models[name])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text() -> str:
    """As it stands in `policies/schema.json`."""
    return json.dumps(build(), indent=2, ensure_ascii=False) + "\n"


def _models(model: type[Model]) -> list[type[Model]]:
    return [found for child in model.__subclasses__() for found in (child, *_models(child))]


def _describe(node: Node, model: type[Model]) -> None:
    node["description"] = _flat(model.__doc__ or "")
    texts = _texts(model.__module__)[model.__name__]
    for field, info in model.model_fields.items():
        key = node["properties"][info.alias or field]
        key.pop("title", None)
        if field in texts:
            key["description"] = texts[field]
        if "default" in key:
            key["default"] = _default(key, key["default"])
    node.pop("title", None)


def _default(key: Node, value: Any) -> Any:
    is_duration = any(one.get("pattern") == DURATION_PATTERN for one in (key, *key.get("anyOf", ())))
    return show_duration(value) if is_duration and isinstance(value, float) else value


@cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """For each class of a module, the docstring below each of its fields."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                field.target.id: _flat(text.value.value)
                for field, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            }
    return found


def _flat(text: str) -> str:
    return " ".join(text.split())
