"""The documents are executed: their commands, their policies, and what they claim about tests, files and packages."""

import ast
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from elastic.tools.make_checkpoint import Options, make_checkpoint
from healer.policy.load import parse_policy
from tests.rank.loopback import open_rank

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
QUICKSTART, ARCHITECTURE = ROOT / "docs/quickstart.md", ROOT / "docs/architecture.md"
DEADLINE_S = 240
PORTS = ("8000", "8470")

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


class Block(NamedTuple):
    language: str
    text: str


def blocks(document: Path) -> list[Block]:
    """The fenced blocks, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def prose(document: Path) -> str:
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


# --- the quickstart -------------------------------------------------------------------------------------------------


def script(document: Path) -> str:
    """Its `bash` blocks as one script; a `yaml` block that begins with `# NAME` is saved as NAME where it stands."""
    parts = []
    for block in blocks(document):
        if block.language == "bash":
            parts.append(block.text)
        elif block.language == "yaml":
            name = block.text.splitlines()[0].removeprefix("# ")
            parts.append(f"cat > {name} <<'END_OF_FILE'\n{block.text}END_OF_FILE\n")
    return "".join(parts)


def free_ports(count: int) -> list[str]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(one.getsockname()[1]) for one in sockets]


class Home:
    """A home directory with a short path, and everything that runs in it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="docs-", dir="/tmp"))

    def processes(self) -> list[psutil.Process]:
        """By working directory: children keep that of the shell that started the daemon."""
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if Path(each.cwd()).is_relative_to(self.path) and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each)
        return found

    def end(self) -> None:
        while left := self.processes():
            for each in left:
                with contextlib.suppress(psutil.Error):
                    each.kill()
            psutil.wait_procs(left, timeout=5)
        for tier in Path("/dev/shm").glob(f"elastic-tier-*{self.path.name}*"):
            tier.unlink()
        shutil.rmtree(self.path)


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home()
    yield made
    made.end()


@pytest.mark.skipif(shutil.which("curl") is None, reason="the quickstart asks with curl")
def test_every_command_of_the_quickstart_works_as_written(home: Home) -> None:
    text = script(QUICKSTART)
    for port, free in zip(PORTS, free_ports(len(PORTS)), strict=True):
        assert port in text
        text = text.replace(port, free)
    commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = subprocess.Popen(
        ["bash", "-eu"],
        cwd=home.path,
        env={k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        | {"HOME": str(home.path), "PATH": commands, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(text, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)
        said, _ = shell.communicate()
        pytest.fail(f"no end within {DEADLINE_S} s; the output so far:\n{said}")
    assert shell.returncode == 0, said
    for promise in ("policy try is valid", "the same answer", "refused, exit code 1", "still serving", "stopped"):
        assert promise in said, f"{promise!r} is not in:\n{said}"
    assert said.count("the same answer") == 2
    assert home.processes() == []


def test_every_policy_in_the_documents_is_valid() -> None:
    policies = [(d, b.text) for d in DOCUMENTS for b in blocks(d) if b.language == "yaml" and "kind: Policy" in b.text]
    assert policies
    for document, text in policies:
        parse_policy(text, name=document.name, base=Path("/"))


# --- what the documents name ----------------------------------------------------------------------------------------


def headings(document: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@each_document
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        there = (document.parent / name).resolve() if name else document
        assert there.exists(), f"{document.name}: {target} does not exist"
        assert not anchor or anchor in headings(there), f"{document.name}: {target} has no such heading"


@each_document
def test_every_file_that_is_named_exists(document: Path) -> None:
    named = re.findall(r"`((?:elastic|healer|chaos|policies|tests|docs)/[\w./-]*)`", prose(document))
    for name in named:
        assert (ROOT / name).exists(), f"{document.name}: {name} does not exist"


def defined_tests() -> set[str]:
    trees = [ast.parse(file.read_text()) for file in (ROOT / "tests").rglob("test_*.py")]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, functions)}


def test_every_test_that_proves_a_claim_exists() -> None:
    known = defined_tests()
    named = {name for document in DOCUMENTS for name in re.findall(r"`(test_\w+)`", document.read_text())}
    assert len(named) > 20
    assert named - known == set()


def table(document: Path, heading: str) -> list[list[str]]:
    """The rows, without the head, of the first table below a heading."""
    text = document.read_text().split(f"\n{heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines[0].splitlines()[2:]]


def test_every_graph_facing_tensor_is_listed(tmp_path: Path) -> None:
    listed = {cells[0].strip("`") for cells in table(ARCHITECTURE, "### Graph-facing tensors")}
    rank = open_rank(make_checkpoint(tmp_path / "model", Options(layers=1, experts=2)))
    assert listed == set(rank.buffers)


# --- packages -------------------------------------------------------------------------------------------------------


def imports(package: str) -> set[str]:
    """The modules that the files below a package import, of this project and others. Not those of its benchmarks, which
    are programs of their own, nor of an adapter to vLLM, which is loaded inside it."""
    found: set[str] = set()
    for file in (ROOT / package).rglob("*.py") if (ROOT / package).is_dir() else [ROOT / f"{package}.py"]:
        if "bench" in file.parts or file.name == "vllm.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


GATEWAY_PROCESS = [
    f"elastic.gateway.{part}" for part in ("dispatcher", "server", "completions", "text", "api", "control")
]
"""What the router must not take from the gateway; its pure modules it shares."""
WITHOUT_NUMPY = ["healer/sensors", "healer/diagnosis", "healer/policy", "healer/targets", "healer/api", "healer/lease"]
"""All of the daemon but its forecasts, which run in a child."""
CONTROLLER_SIDE = ["elastic/controller", "elastic/launch", "elastic/gateway"]
CONTROLLER_SIDE += [f"elastic/{file.stem}" for file in (ROOT / "elastic").glob("*.py")]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("elastic", ("healer", "chaos")),
        ("healer", ("chaos", "torch", "elastic.rank", *GATEWAY_PROCESS)),
        ("healer/router", ("numpy", "vllm", "tokenizers", "healer.policy", "healer.targets", "healer.supervisor")),
        *((part, ("numpy",)) for part in WITHOUT_NUMPY),
        ("elastic/rank", ("elastic.controller", "elastic.gateway", "elastic.launch")),
        ("elastic/gateway", ("elastic.controller", "elastic.placement", "elastic.view")),
        ("elastic/placement", ("torch", "elastic.protocol", "elastic.config", "elastic.rank", "elastic.controller")),
        ("healer/sensors", ("healer.policy", "healer.targets", "healer.supervisor", "healer.diagnosis")),
        ("healer/policy", ("healer.sensors", "healer.targets", "healer.supervisor")),
        *((part, ("torch", "numpy", "elastic.rank")) for part in CONTROLLER_SIDE),
    ],
)
def test_no_package_imports_what_it_must_not_know(package: str, forbidden: tuple[str, ...]) -> None:
    wrong = {m for m in imports(package) for f in forbidden if m == f or m.startswith(f + ".")}
    assert wrong == set()


def test_every_dependency_says_why_it_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for many in project["optional-dependencies"].values() for one in many)]
    names = {match[0] for one in wanted if (match := re.match(r"[\w.-]+", one))}
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/dependencies.md").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in row.split(", ")} - {"Library"}
    assert listed == names
