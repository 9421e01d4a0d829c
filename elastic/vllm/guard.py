"""Is this vLLM the one that the plugin knows? Every function that is replaced or relied on is compared by its source.

The tables (`known.toml` here and in `worker`) have one line for each function:

    "module:qualified.name" = { sha256 = "…", why = "…" }

The hash is over the source text without comment lines, blank lines, indentation of the whole and trailing blanks, read from the
file: nothing of vLLM is imported for it. `python -m elastic.vllm.guard` prints the verdict as JSON; `--update` writes the
hashes of the vLLM that is installed into the tables, for whoever has read what changed.
"""

import argparse
import ast
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import msgspec

from elastic.vllm.records import GuardState

SWITCH = "HEALER_IN_PLACE"
VERSION = re.compile(r"0\.33\.\d")
_HERE = Path(__file__).parent


class Part(StrEnum):
    """Whose functions a table lists. The worker's are compared in workers, the engine's everywhere."""

    ENGINE = "engine"
    WORKER = "worker"


TABLES = {Part.ENGINE: _HERE / "known.toml", Part.WORKER: _HERE / "worker" / "known.toml"}


class Known(msgspec.Struct, frozen=True):
    module: str
    qualname: str
    sha256: str
    why: str


class Verdict(msgspec.Struct, frozen=True):
    state: GuardState
    vllm: str
    """Version; empty: not installed."""
    reason: str
    differing: tuple[str, ...] = ()
    """`module:qualname` of the functions that are not as known."""


def read_table(path: Path) -> list[Known]:
    """Raises ValueError naming file and key where it is not as described above."""
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    table = []
    for key, value in found.items():
        module, colon, qualname = key.partition(":")
        if not colon or not isinstance(value, dict) or set(value) != {"sha256", "why"}:
            raise ValueError(f'{path}: {key!r}: expected "module:name" = {{ sha256 = …, why = … }}')
        table.append(Known(module, qualname, value["sha256"], value["why"]))
    return table


def digest(source: str) -> str:
    lines = (line.rstrip() for line in textwrap.dedent(source).splitlines())
    kept = [line for line in lines if line and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def vllm_root() -> Path | None:
    """Folder of the package that `import vllm` would take, without importing it."""
    spec = importlib.machinery.PathFinder.find_spec("vllm", sys.path)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def vllm_version(root: Path) -> str:
    """Of the metadata beside the package, else of whatever is installed under that name; empty: none."""
    for found in importlib.metadata.distributions(name="vllm", path=[str(root.parent)]):
        return found.version
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""


class _Sources:
    """Sources of functions, each file parsed once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, dict[str, str]] = {}

    def of(self, known: Known) -> str | None:
        if known.module not in self._files:
            self._files[known.module] = self._read(known.module)
        return self._files[known.module].get(known.qualname)

    def _read(self, module: str) -> dict[str, str]:
        base = self._root.parent.joinpath(*module.split("."))
        path = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
        try:
            text = path.read_text()
            tree = ast.parse(text)
        except (OSError, SyntaxError, UnicodeDecodeError):
            return {}
        lines, found = text.splitlines(), dict[str, str]()

        def visit(body: Iterable[ast.stmt], prefix: str) -> None:
            for node in body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                    found[prefix + node.name] = "\n".join(lines[first - 1 : node.end_lineno])
                    if isinstance(node, ast.ClassDef):
                        visit(node.body, f"{prefix}{node.name}.")

        visit(tree.body, "")
        return found


def verify(root: Path | None, version: str, tables: Iterable[Path]) -> Verdict:
    """Compare one vLLM with the tables. Raises ValueError for a damaged table."""
    if root is None or not version:
        return Verdict(GuardState.STOCK, version, "vLLM is not installed")
    if not VERSION.match(version):
        return Verdict(GuardState.STOCK, version, f"healing in place knows vLLM 0.33, this is {version}")
    sources, differing = _Sources(root), []
    for path in tables:
        for known in read_table(path):
            source = sources.of(known)
            if source is None or digest(source) != known.sha256:
                differing.append(f"{known.module}:{known.qualname}")
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        return Verdict(GuardState.STOCK, version, f"{differing[0]}{more} not as known", tuple(differing))
    return Verdict(GuardState.READY, version, "")


@functools.cache
def verdict(part: Part = Part.ENGINE) -> Verdict:
    """Of the vLLM of this process; never raises."""
    root = vllm_root()
    version = vllm_version(root) if root is not None else ""
    if os.environ.get(SWITCH) == "0":
        return Verdict(GuardState.OFF, version, f"{SWITCH}=0")
    tables = [TABLES[Part.ENGINE]] if part == Part.ENGINE else list(TABLES.values())
    try:
        return verify(root, version, tables)
    except ValueError as error:
        return Verdict(GuardState.STOCK, version, str(error))


def inspect() -> dict[str, object]:
    """Of engine and worker, for `healer vllm check`, which calls this module with vLLM's interpreter."""
    return {part.value: msgspec.to_builtins(verdict(part)) for part in Part}


def update(path: Path, root: Path) -> list[str]:
    """Write the hashes of this vLLM into a table; returns the keys that it does not have. Raises ValueError."""
    sources, missing, lines = _Sources(root), list[str](), list[str]()
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for known in read_table(path):
        key, source = f"{known.module}:{known.qualname}", sources.of(known)
        if source is None:
            missing.append(key)
        sha256 = digest(source) if source is not None else known.sha256
        lines.append(f'"{key}" = {{ sha256 = "{sha256}", why = "{known.why}" }}')
    path.write_text("\n".join([*header, *lines]) + "\n")
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m elastic.vllm.guard", description=__doc__.split("\n")[0])
    parser.add_argument("--update", action="store_true", help="write the hashes of the installed vLLM into the tables")
    root = vllm_root()
    if parser.parse_args().update:
        if root is None:
            parser.error("vLLM is not installed here")
        missing = [key for path in TABLES.values() if path.exists() for key in update(path, root)]
        for key in missing:
            sys.stderr.write(f"{key}: not in this vLLM\n")
        return 1 if missing else 0
    sys.stdout.write(msgspec.json.encode(inspect()).decode() + "\n")
    return 0 if all(verdict(part).state == GuardState.READY for part in Part) else 1


if __name__ == "__main__":
    sys.exit(main())
