"""What run records are made of: their schema, and files that were cut off."""

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from chaos import records
from chaos.records import Fault, ProbeResult, tokens_hash
from elastic.errors import ElasticError

SCHEMA = Path(records.__file__).with_name("records.schema.json")
RESULT = ProbeResult(name="p", mode="end", at=1.5, ok=True, found="status 200")


def test_the_schema_that_is_kept_is_the_schema_of_the_code() -> None:
    assert _bare(json.loads(SCHEMA.read_text())) == _bare(json.loads(json.dumps(records.schema()))), (
        "python -m chaos.records > chaos/records.schema.json"
    )


def _bare(node: Any) -> Any:
    """Without the texts, some of which are the executor's."""
    if isinstance(node, dict):
        return {key: _bare(value) for key, value in node.items() if key != "description"}
    return [_bare(one) for one in node] if isinstance(node, list) else node


def test_a_record_that_is_written_fits_the_schema() -> None:
    schema = records.schema()
    jsonschema.validate(
        json.loads(msgspec.json.encode(RESULT)), {"$defs": schema["$defs"], "$ref": "#/$defs/ProbeResult"}
    )
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "p"}, {"$defs": schema["$defs"], "$ref": "#/$defs/ProbeResult"})


def test_a_line_that_a_killed_process_left_half_written_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    records.write_lines(path, [RESULT, RESULT])
    path.write_bytes(path.read_bytes() + b'{"name": "p", "mo')
    assert list(records.lines(path, ProbeResult)) == [RESULT, RESULT]


def test_a_packed_file_reads_like_a_plain_one(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    records.write_lines(path, [RESULT])
    with gzip.open(f"{path}.gz", "wb") as packed:
        packed.write(path.read_bytes())
    path.unlink()
    assert list(records.lines(path, ProbeResult)) == [RESULT]


def test_a_damaged_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ElasticError, match=r"faults.jsonl:1: .*missing required field"):
        list(records.lines(path, Fault))
    with pytest.raises(ElasticError, match=r"run.json: no such file"):
        records.read(tmp_path / records.RUN, records.Run)


def test_answers_of_other_tokens_or_another_order_have_other_hashes() -> None:
    assert len({tokens_hash(t) for t in ([], [0], [0, 0], [1, 2], [2, 1], [-1])}) == 6
