"""The mutants as data, and how one is put into a copy of the code."""

import shutil
from pathlib import Path

import msgspec

from chaos.scenario_file import FOLDER
from elastic.errors import ElasticError

FILE = Path(__file__).with_name("mutants.toml")
OWN_SCENARIOS = Path(__file__).with_name("scenarios")
ROOT = Path(__file__).resolve().parents[2]
"""Of the code: where the packages and the policies are."""
PARTS = ("healer", "elastic", "chaos", "policies")


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str
    """From the root of the code."""
    old: str
    """Found exactly once in the file."""
    new: str


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    fear: str
    """What one would be afraid of: one sentence."""
    scenario: str
    """Name of the one that must catch it."""
    caught_by: tuple[str, ...]
    """What must find it, any of these: ``invariant 4``, or the name of an expectation (`chaos.records.Expectation`)."""
    edits: tuple[Edit, ...]
    """More than one where something else stands in for what is taken away."""

    @property
    def scenario_file(self) -> Path:
        """Raises ElasticError where there is none of that name."""
        for folder in (FOLDER, OWN_SCENARIOS):
            if (path := folder / f"{self.scenario}.yaml").exists():
                return path
        raise ElasticError(f"{FILE}: mutant {self.name}: no scenario {self.scenario}")


class _Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mutant: tuple[Mutant, ...]


def read(path: Path = FILE) -> tuple[Mutant, ...]:
    """Raises ElasticError naming the file, and the mutant where two have one name."""
    try:
        mutants = msgspec.toml.decode(path.read_bytes(), type=_Catalogue).mutant
    except (OSError, msgspec.MsgspecError) as error:
        raise ElasticError(f"{path}: {error}, expected a list of mutants") from None
    names = [mutant.name for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ElasticError(f"{path}: two mutants are named {twice[0]}")
    return mutants


def mutated(mutant: Mutant, root: Path = ROOT) -> dict[str, str]:
    """The text of each file that the mutant changes, by its path from `root`; nothing is written. Raises ElasticError where an old
    text is not found exactly once: the code has changed since the mutant was written."""
    texts: dict[str, str] = {}
    for edit in mutant.edits:
        try:
            text = texts.get(edit.file) or (root / edit.file).read_text()
        except OSError as error:
            raise ElasticError(f"mutant {mutant.name}: {edit.file}: {error.strerror}") from None
        if (count := text.count(edit.old)) != 1:
            first = edit.old.strip().splitlines()[0]
            raise ElasticError(
                f"mutant {mutant.name}: {edit.file}: the old text, which begins with {first!r}, is there {count} times, "
                "expected once"
            )
        texts[edit.file] = text.replace(edit.old, edit.new)
    return texts


def copy_code(target: Path, mutant: Mutant | None) -> None:
    """The code into the folder `target`, with the mutant in it; None: as it is. Raises ElasticError as `mutated`."""
    texts = mutated(mutant) if mutant else {}
    for part in PARTS:
        shutil.copytree(ROOT / part, target / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in texts.items():
        (target / file).write_text(text)
