"""What the catalogue says, and above all what it does not say."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ElasticError
from healer import xids
from healer.diagnosis.hardware import ENDS_THE_GPU, XidAction
from healer.xids import RowAction, XidClass, classify, load

LINK_DOWN = "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 ({} 0x00000000 0x00000000)"
HEAD = "apiVersion: healer/v1\nkind: XidCatalogue\nxids:\n"


@pytest.mark.parametrize(
    ("code", "kind", "action"),
    [
        (31, XidClass.APP, XidAction.RESTART_APP),
        (45, XidClass.APP, XidAction.IGNORE),
        (48, XidClass.MEMORY, XidAction.RESET),
        (63, XidClass.MEMORY, XidAction.IGNORE),
        (64, XidClass.MEMORY, XidAction.RESET),
        (79, XidClass.BUS, XidAction.REBOOT),
        (94, XidClass.MEMORY, XidAction.RESTART_APP),
        (95, XidClass.MEMORY, XidAction.RESET),
        (119, XidClass.FIRMWARE, XidAction.RESET),
        (136, XidClass.LINK, XidAction.RESET),
    ],
)
def test_the_codes_that_matter_most_ask_for_what_nvidia_says(code: int, kind: XidClass, action: XidAction) -> None:
    found = classify(code)
    assert (found.kind, found.action) == (kind, action)
    assert "NVIDIA" in found.source


@given(st.integers(0, 100_000).filter(lambda code: code not in load().rows))
def test_a_code_that_nobody_lists_is_a_humans_and_never_a_reset(code: int) -> None:
    assert classify(code, "hopper", "580.1", "anything").action is XidAction.UNKNOWN


def test_every_row_has_a_source_and_every_nvlink5_code_a_table() -> None:
    catalogue = load()
    assert len(catalogue.rows) > 100
    assert all(row.source in catalogue.sources for row in catalogue.rows.values())
    assert {row.code for row in catalogue.nvlink5} == set(range(144, 151))
    assert sum(len(row.cause) * sum(map(len, row.status.values())) for row in catalogue.nvlink5) >= 90


def test_the_sub_code_is_read_where_the_driver_puts_it() -> None:
    before, after = 4 << 20 | 0b01110_00110, 4 << 20 | 0b0010001
    assert classify(149, "blackwell", "570.86.10", LINK_DOWN.format(hex(before))).action is XidAction.RESET
    assert classify(149, "blackwell", "575.51.03", LINK_DOWN.format(hex(after))).action is XidAction.RESET
    assert classify(149, "blackwell", "575.51.03", LINK_DOWN.format(hex(before))).action is XidAction.UNKNOWN
    assert classify(149, "blackwell", "570.86.10", LINK_DOWN.format(hex(after))).action is XidAction.UNKNOWN


def test_the_real_line_of_a_b200_is_decoded() -> None:
    assert classify(149, "blackwell", "570.133.20", LINK_DOWN.format("0x004505c6")).action is XidAction.RESET
    harmless = 38 << 20 | 0b01110_00110
    assert classify(149, "blackwell", "570.133.20", LINK_DOWN.format(hex(harmless))).action is XidAction.IGNORE


@pytest.mark.parametrize("driver", ["", "580.159.04"])
@pytest.mark.parametrize("detail", ["", "no registers", "(0xdeadbeef 0x00000000)"])
@pytest.mark.parametrize("code", range(144, 151))
def test_an_nvlink5_xid_that_cannot_be_decoded_is_never_harmless(code: int, detail: str, driver: str) -> None:
    assert classify(code, "blackwell", driver, detail).action is XidAction.UNKNOWN


@given(st.sampled_from(range(144, 151)), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(500, 650))
def test_whatever_the_registers_hold_an_action_comes_from_a_row_or_is_unknown(
    code: int, info: int, status: int, driver: int
) -> None:
    found = classify(code, "blackwell", f"{driver}.1", f"(0x{info:08x} 0x{status:08x})")
    if found.action is not XidAction.UNKNOWN:
        rows = [r for r in load().nvlink5 if r.code == code and (info >> 20 & 63) in r.cause]
        assert any(status in values for row in rows for values in row.status.values())


def test_every_row_of_the_table_is_reached_by_its_own_registers() -> None:
    for row in load().nvlink5:
        for action, values in row.status.items():
            for cause in row.cause:
                low = 0 if row.code == 150 else row.code - 143
                for driver, info in (("570.1", row.before_r575 << 5 | low), ("575.1", row.from_r575)):
                    detail = f"(0x{cause << 20 | info:08x} 0x{values[0]:08x})"
                    found = classify(row.code, "blackwell", driver, detail).action
                    expected = XidAction.RESTART_APP if action is RowAction.RECOVERY else XidAction(action.value)
                    assert found is expected, (row, driver)


@pytest.mark.parametrize(("code", "generation"), [(74, "blackwell"), (149, "hopper"), (145, "ampere")])
def test_a_code_of_another_generation_is_unknown(code: int, generation: str) -> None:
    assert classify(code, generation, "580.1", LINK_DOWN.format("0x00000011")).action is XidAction.UNKNOWN


@pytest.mark.parametrize(
    ("asked", "action"),
    [(0, XidAction.IGNORE), (1, XidAction.RESET), (2, XidAction.REBOOT), (3, XidAction.DRAIN), (4, XidAction.DRAIN),
     (5, XidAction.HUMAN), (6, XidAction.HUMAN), (7, XidAction.REBOOT), (9, XidAction.UNKNOWN)],
)  # fmt: skip
def test_xid_154_asks_for_what_the_driver_names(asked: int, action: XidAction) -> None:
    detail = f"NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from 0x0 (None) to 0x{asked} (…)"
    assert classify(154, detail=detail).action is action


def test_xid_154_without_words_is_left_to_field_230() -> None:
    found = classify(154)
    assert found.action is XidAction.UNKNOWN
    assert "230" in found.why


# --- a site's own file ----------------------------------------------------------------------------------------------


def site(folder: Path, text: str) -> Path:
    path = folder / "site.yaml"
    path.write_text(HEAD + text)
    return path


def test_case_11_a_site_decides_otherwise_for_one_code_and_keeps_the_rest(tmp_path: Path) -> None:
    path = site(tmp_path, "  - {code: 64, name: REPLACE, class: memory, action: human, source: our contract}\n")
    found = classify(64, overrides=path)
    assert (found.action, found.source) == (XidAction.HUMAN, "our contract")
    assert classify(79, overrides=path) == classify(79)
    assert classify(64).action is XidAction.RESET


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("  - {code: 64, name: A, class: memory, action: rest, source: s}\n", "4:", "'rest' is not valid"),
        ("  - {code: x, name: A, class: memory, action: reset, source: s}\n", "4:", "'x' is not valid"),
        ("  - {code: 64, name: A, class: memory, action: reset}\n", "4:", "source: is missing"),
        ("  - {code: 64, name: A, class: memory, action: reset, source: s, actoin: x}\n", "4:", "unknown key"),
        ("  - {code: 1, name: A, class: app, action: reset, source: s}\n" * 2, "5:", "listed twice"),
        ("  - {code: [\n", "5:", "not valid YAML"),
    ],
)
def test_an_error_in_a_sites_file_names_its_line(tmp_path: Path, text: str, place: str, words: str) -> None:
    path = site(tmp_path, text)
    with pytest.raises(ElasticError) as caught:
        load(path)
    assert f"{path}:{place}" in str(caught.value)
    assert words in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ElasticError, match=r"absent\.yaml: cannot be read"):
        load(tmp_path / "absent.yaml")


def test_nothing_that_is_unknown_ends_a_gpu() -> None:
    assert XidAction.UNKNOWN not in ENDS_THE_GPU
    assert XidAction.HUMAN not in ENDS_THE_GPU
    assert xids.BUILT_IN.exists()
