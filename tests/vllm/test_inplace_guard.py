"""A vLLM that is not the known one runs stock, and says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.vllm import guard
from elastic.vllm.records import GuardState

SOURCE = '''\
"""A module."""


class Engine:
    def run(self, steps: int) -> int:
        """Runs."""
        # as fast as it can
        return steps + 1

    @property
    def name(self) -> str:
        return "engine"


def free() -> None:
    pass
'''


def known_vllm(folder: Path, version: str = "0.33.0", source: str = SOURCE) -> Path:
    package = folder / "vllm/v1"
    package.mkdir(parents=True)
    (folder / "vllm/__init__.py").write_text("raise RuntimeError('the guard must not import vLLM')")
    (package / "core.py").write_text(source)
    metadata = folder / f"vllm-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder / "vllm"


def table(folder: Path, root: Path) -> Path:
    path = folder / "known.toml"
    names = ("Engine.run", "Engine.name", "free")
    path.write_text("".join(f'"vllm.v1.core:{name}" = {{ sha256 = "", why = "a test" }}\n' for name in names))
    assert guard.update(path, root) == []
    return path


def test_the_known_vllm_is_taken_without_importing_it(tmp_path: Path) -> None:
    root = known_vllm(tmp_path)
    found = guard.verify(root, guard.vllm_version(root), [table(tmp_path, root)])
    assert (found.state, found.vllm, found.reason) == (GuardState.READY, "0.33.0", "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return steps + 1", "return steps + 2"),
        ("steps: int) -> int", "steps: int, more: int = 0) -> int"),
        ("    @property\n", ""),
        ("def free", "def freed"),
    ],
)
def test_a_patched_function_leaves_vllm_stock_and_is_named(tmp_path: Path, old: str, new: str) -> None:
    root = known_vllm(tmp_path)
    known = table(tmp_path, root)
    (root / "v1/core.py").write_text(SOURCE.replace(old, new))
    found = guard.verify(root, "0.33.0", [known])
    assert found.state == GuardState.STOCK
    assert len(found.differing) == 1
    assert found.differing[0] in found.reason


def test_comments_and_blank_lines_do_not_matter(tmp_path: Path) -> None:
    root = known_vllm(tmp_path)
    known = table(tmp_path, root)
    changed = SOURCE.replace("        # as fast as it can\n", "\n        # slower  \n\n").replace(
        "steps + 1", "steps + 1  "
    )
    (root / "v1/core.py").write_text(changed)
    assert guard.verify(root, "0.33.0", [known]).state == GuardState.READY


@pytest.mark.parametrize("version", ["0.32.0", "0.34.0", "0.33.0rc1.dev5", "1.0.33.0", ""])
def test_another_release_is_left_alone(tmp_path: Path, version: str) -> None:
    root = known_vllm(tmp_path)
    found = guard.verify(root, version, [table(tmp_path, root)])
    assert found.state == (GuardState.READY if version.startswith("0.33.0") else GuardState.STOCK)
    assert found.reason or found.state == GuardState.READY


def test_a_module_that_is_gone_or_damaged_leaves_vllm_stock(tmp_path: Path) -> None:
    root = known_vllm(tmp_path)
    known = table(tmp_path, root)
    (root / "v1/core.py").write_text("def broken(:\n")
    assert guard.verify(root, "0.33.0", [known]).state == GuardState.STOCK
    (root / "v1/core.py").unlink()
    assert len(guard.verify(root, "0.33.0", [known]).differing) == 3


@pytest.mark.parametrize(
    "line", ['"vllm.core" = { sha256 = "", why = "" }', '"a:b" = "c"', '"a:b" = { sha256 = "" }', "a ="]
)
def test_a_damaged_table_names_its_file(tmp_path: Path, line: str) -> None:
    path = tmp_path / "known.toml"
    path.write_text(line)
    with pytest.raises(ValueError, match=r"known\.toml"):
        guard.read_table(path)


def test_the_tables_of_the_product_can_be_read_and_name_nothing_twice() -> None:
    for part in guard.Part:
        keys = [f"{known.module}:{known.qualname}" for known in guard.read_table(guard.TABLES[part])]
        assert len(keys) == len(set(keys))
        assert all(known.sha256 and known.why for known in guard.read_table(guard.TABLES[part]))


def ask(folder: Path, **environment: str) -> dict[str, dict[str, str]]:
    """`healer vllm check` asks vLLM's interpreter so."""
    command = [sys.executable, "-m", "elastic.vllm.guard"]
    path = f"{folder}:{Path(__file__).parents[2]}"
    done = subprocess.run(command, env={"PYTHONPATH": path, **environment}, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def test_the_command_says_what_is_wrong_with_the_vllm_of_its_interpreter(tmp_path: Path) -> None:
    known_vllm(tmp_path, version="0.32.0")
    assert "0.32.0" in ask(tmp_path)["engine"]["reason"]
    assert ask(tmp_path, HEALER_IN_PLACE="0")["engine"]["state"] == "off"


def test_what_the_daemon_imports_is_light() -> None:
    code = "import sys, elastic.vllm.client, elastic.vllm.driver, elastic.vllm.guard; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- with vLLM's own sources ----------------------------------------------------------------------------------------------------

ENVIRONMENT = Path(os.environ.get("VLLM_CPU", ""))
NO_VLLM = pytest.mark.skipif(not os.environ.get("VLLM_CPU"), reason="VLLM_CPU names no environment")


def ask_vllm(place: Path | None) -> dict[str, dict[str, str]]:
    """With the interpreter of the environment, where `place` is looked at first."""
    path = ":".join(str(each) for each in (place, Path(__file__).parents[2]) if each is not None)
    command = [str(ENVIRONMENT / "venv/bin/python"), "-m", "elastic.vllm.guard"]
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.vllm
@NO_VLLM
def test_vllm_033_is_known_and_the_032_beside_it_is_not() -> None:
    found = ask_vllm(ENVIRONMENT / "overlay033")
    assert found["engine"]["state"] == found["worker"]["state"] == "ready", found
    older = ask_vllm(None)
    assert older["engine"]["state"] == "stock"
    assert "0.32" in older["engine"]["reason"]


def mirror(source: Path, place: Path, without: Path) -> None:
    """Links to everything but one file."""
    place.mkdir(parents=True)
    head, *rest = without.parts
    for path in source.iterdir():
        if path.name != head:
            (place / path.name).symlink_to(path)
        elif rest:
            mirror(path, place / path.name, Path(*rest))


@pytest.mark.vllm
@NO_VLLM
def test_one_line_changed_in_vllms_sentinel_is_found(tmp_path: Path) -> None:
    place = tmp_path / "patched"
    changed = Path("vllm/v1/fault_tolerance/engine_core_sentinel.py")
    mirror(ENVIRONMENT / "overlay033", place, changed)
    text = (ENVIRONMENT / "overlay033" / changed).read_text()
    (place / changed).write_text(text.replace("self.resumed.clear()", "self.resumed.set()"))
    found = ask_vllm(place)["engine"]
    assert found["state"] == "stock"
    assert "EngineCoreSentinel.on_fault" in found["reason"]
