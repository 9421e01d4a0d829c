"""The XID catalogue: what a code means and what it asks for, from `policies/xids.yaml` and a site's own file.

It explains, and it is the fallback where the driver gives no verdict of its own (NVML field 230). What it does not know is
unknown and a human's: neither an unlisted code nor an NVLink 5 line that fits no row of the table ever reads as harmless or
as a reason to reset.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic.errors import ElasticError
from healer.diagnosis.hardware import XidAction
from healer.policy.document import Document, PolicyError
from healer.policy.messages import explain
from healer.xid_lines import recovery_action

BUILT_IN = Path(__file__).with_name("xids.yaml")

GENERATIONS = ("pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell")
"""By age."""

SUBCODE_MOVED_IN = 575
"""The driver branch from which on the sub-code of XID 144 to 150 stands in bits 6 to 0 of the first register."""

_REGISTERS = re.compile(r"[(\[](0x[0-9a-f]{1,8}(?:[\s,]+0x[0-9a-f]{1,8})*)[)\]]", re.IGNORECASE)


class XidClass(StrEnum):
    APP = "app"
    MEMORY = "memory"
    LINK = "link"
    BUS = "bus"
    FIRMWARE = "firmware"
    DRIVER = "driver"
    INFO = "info"


class RowAction(StrEnum):
    """What a row of the file says; see its head."""

    IGNORE = "ignore"
    RESTART_APP = "restart-app"
    RESET = "reset"
    REBOOT = "reboot"
    DRAIN = "drain"
    HUMAN = "human"
    DECODE = "decode"
    RECOVERY = "recovery"


RECOVERY_ACTIONS = {
    0: XidAction.IGNORE,
    1: XidAction.RESET,
    2: XidAction.REBOOT,
    3: XidAction.DRAIN,
    4: XidAction.DRAIN,
    5: XidAction.HUMAN,
    6: XidAction.HUMAN,
    7: XidAction.REBOOT,
}
"""NVML field 230. An IMEX domain (5) and a bus (6) are nothing that can be done for one GPU."""

Generation = Literal["pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"]
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=False)


class Row(BaseModel):
    """One code."""

    model_config = _STRICT

    code: Annotated[int, Field(ge=1, le=9999)]
    name: Annotated[str, Field(min_length=1)]
    kind: Annotated[XidClass, Field(alias="class")]
    action: RowAction
    source: Annotated[str, Field(min_length=1)]
    min_generation: Generation | None = None
    max_generation: Generation | None = None
    note: str = ""


class DecodeRow(BaseModel):
    """One unit that reports by an NVLink 5 XID."""

    model_config = _STRICT

    code: Annotated[int, Field(ge=144, le=150)]
    unit: str
    before_r575: Annotated[int, Field(ge=0, le=31)]
    from_r575: Annotated[int, Field(ge=0, le=127)]
    cause: tuple[int, ...]
    status: dict[RowAction, tuple[int, ...]]


class CatalogueFile(BaseModel):
    model_config = _STRICT

    api_version: Annotated[Literal["healer/v1"], Field(alias="apiVersion")]
    kind: Literal["XidCatalogue"]
    sources: dict[str, str] = {}
    xids: tuple[Row, ...] = ()
    nvlink5: tuple[DecodeRow, ...] = ()


class Classified(msgspec.Struct, frozen=True):
    code: int
    name: str
    kind: XidClass | None
    """None where the code is not listed."""
    action: XidAction
    why: str
    """One sentence."""
    source: str
    """Where the row comes from."""


class Catalogue(msgspec.Struct, frozen=True):
    """Immutable; `load` makes one."""

    rows: Mapping[int, Row]
    nvlink5: tuple[DecodeRow, ...]
    sources: Mapping[str, str]

    def classify(self, code: int, generation: str = "", driver: str = "", detail: str = "") -> Classified:
        """`generation`: of the GPU, as in `GENERATIONS`, empty where it is not known; `driver`: its version; `detail`: the
        line of the kernel log."""
        row = self.rows.get(code)
        if row is None:
            return Classified(code, "unlisted", None, XidAction.UNKNOWN, f"XID {code} is in no catalogue", "")
        action, why = self._action(row, generation, driver, detail)
        source = self.sources.get(row.source, row.source)
        return Classified(code, row.name, row.kind, action, why, source)

    def _action(self, row: Row, generation: str, driver: str, detail: str) -> tuple[XidAction, str]:
        if not _exists_on(row, generation):
            return XidAction.UNKNOWN, f"XID {row.code} does not exist on {generation}"
        if row.action is RowAction.DECODE:
            return self._decode(row.code, driver, detail)
        if row.action is RowAction.RECOVERY:
            return _recovery(detail)
        return XidAction(row.action.value), row.note or f"the catalogue says {row.action}"

    def _decode(self, code: int, driver: str, detail: str) -> tuple[XidAction, str]:
        major = driver.partition(".")[0]
        registers = _REGISTERS.search(detail)
        if not major.isdecimal() or registers is None:
            missing = "the driver's version" if registers else "the registers in the log line"
            return XidAction.UNKNOWN, f"XID {code} cannot be decoded without {missing}"
        values = [int(word, 16) for word in re.findall(r"0x[0-9a-f]+", registers[1], re.IGNORECASE)]
        info, status = values[0], values[1] if len(values) > 1 else None
        found = {action for row in self._units(code, info, int(major)) for action in _by_status(row, status)}
        if len(found) != 1:
            return XidAction.UNKNOWN, f"XID {code} with registers {registers[1]} fits no row of the NVLink 5 table"
        action = found.pop()
        if action is RowAction.RECOVERY:
            return XidAction.RESTART_APP, "the NVLink 5 table: restart the application, unless the driver asks for more"
        return XidAction(action.value), f"the NVLink 5 table says {action}"

    def _units(self, code: int, info: int, major: int) -> Iterator[DecodeRow]:
        cause, before, after = info >> 20 & 0x3F, info >> 5 & 0x1F, info & 0x7F
        # up to R570 the low five bits repeat which XID it is: 1 for 144, and so on; 150 has 0
        low = info & 0x1F
        for row in self.nvlink5:
            if row.code != code or cause not in row.cause:
                continue
            if major >= SUBCODE_MOVED_IN:
                fits = row.from_r575 == after
            else:
                fits = row.before_r575 == before and low == (0 if code == 150 else code - 143)
            if fits:
                yield row


def _by_status(row: DecodeRow, status: int | None) -> Iterator[RowAction]:
    for action, values in row.status.items():
        if status in values:
            yield action


def _exists_on(row: Row, generation: str) -> bool:
    if generation not in GENERATIONS:
        return True
    place = GENERATIONS.index(generation)
    oldest = GENERATIONS.index(row.min_generation) if row.min_generation else 0
    newest = GENERATIONS.index(row.max_generation) if row.max_generation else len(GENERATIONS)
    return oldest <= place <= newest


def _recovery(detail: str) -> tuple[XidAction, str]:
    asked = recovery_action(detail)
    if asked not in RECOVERY_ACTIONS or asked is None:
        return XidAction.UNKNOWN, "the driver asks for something: NVML field 230 says for what"
    return RECOVERY_ACTIONS[asked], f"the driver asks for recovery action {asked}"


def parse(text: str, name: str) -> CatalogueFile:
    """Raises ElasticError with one line for each problem, "file:line:column: …"."""
    try:
        document = Document(name, text)
        made = CatalogueFile.model_validate(document.data)
    except PolicyError as error:
        problems = [problem.replace("expected a policy", "expected a catalogue") for problem in error.problems]
        raise ElasticError("\n".join(problems)) from None
    except ValidationError as error:
        raise ElasticError("\n".join(_told(document, error))) from None
    codes: set[int] = set()
    for place, row in enumerate(made.xids):
        if row.code in codes:
            line, column, said = document.problem(("xids", place, "code"), f"{row.code} is listed twice, expected once")
            raise ElasticError(f"{name}:{line}:{column}: {said}")
        codes.add(row.code)
    return made


def _told(document: Document, error: ValidationError) -> Iterator[str]:
    for details in error.errors(include_url=False):
        if details["type"] == "extra_forbidden":
            path, at_key = tuple(details["loc"]), True
            text = f"unknown key, expected one of {', '.join(_keys(path))}"
        else:
            path, text, at_key = explain(details)
        line, column, said = document.problem(document.written(path), text, at_key)
        yield f"{document.name}:{line}:{column}: {said}"


def _keys(path: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = CatalogueFile
    if len(path) > 1:
        model = Row if path[0] == "xids" else DecodeRow
    return [field.alias or name for name, field in model.model_fields.items()]


@functools.cache
def load(overrides: Path | None = None) -> Catalogue:
    """The built-in catalogue, with rows of the same code replaced by those of a site's file; of the NVLink 5 table, all rows
    of a code that the file names. Takes about 0.15 s the first time: call it before anything waits. Raises ElasticError
    where the file cannot be read or has errors."""
    built_in = parse(BUILT_IN.read_text(), str(BUILT_IN))
    files = [built_in]
    if overrides is not None:
        try:
            files.append(parse(overrides.read_text(), str(overrides)))
        except OSError as error:
            raise ElasticError(f"{overrides}: cannot be read: {error.strerror}") from None
    rows: dict[int, Row] = {}
    nvlink5: tuple[DecodeRow, ...] = ()
    sources: dict[str, str] = {}
    for file in files:
        rows |= {row.code: row for row in file.xids}
        replaced = {row.code for row in file.nvlink5}
        nvlink5 = (*(row for row in nvlink5 if row.code not in replaced), *file.nvlink5)
        sources |= file.sources
    return Catalogue(rows, nvlink5, sources)


def classify(
    code: int, generation: str = "", driver: str = "", detail: str = "", overrides: Path | None = None
) -> Classified:
    """See `Catalogue.classify`; `overrides` as for `load`."""
    return load(overrides).classify(code, generation, driver, detail)
