import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from elastic.errors import ElasticError
from elastic.gateway.text import AnswerText, Detokenizer, StopScanner, load_tokenizer, read_eos_ids
from tests.gateway import gateway_fakes as fakes


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return load_tokenizer(checkpoint)


def test_text_never_ends_within_a_character(tokenizer: Tokenizer) -> None:
    text = "naïve 日本語 👩‍🚀 end"
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.add(token) for token in tokenizer.encode(text).ids]
    assert "".join(shown) + detokenizer.end() == text
    assert not any("\ufffd" in piece for piece in shown)


@settings(deadline=None)
@given(st.lists(st.integers(0, 299), max_size=60))
def test_pieces_together_are_the_text_of_all_tokens(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """Also for bytes that are no UTF-8, end tokens in the middle, and ids that have no text."""
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.add(token) for token in tokens) + detokenizer.end()
    assert shown == tokenizer.decode(tokens)


def reference(text: str, stops: list[str]) -> str:
    """Up to the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


alphabet = st.text("ab", max_size=14)


@given(st.lists(alphabet, max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_stop_strings_cut_the_same_place_however_the_text_comes(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    shown = ""
    whole = reference("".join(pieces), stops)
    for piece in pieces:
        shown += scanner.add(piece)
        assert whole.startswith(shown), "part of a stop string was shown"
    assert shown + scanner.end() == whole


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    scanner = StopScanner(["END"])
    assert [scanner.add(piece) for piece in ("a", "bE", "N", "x", "E", "ND", "more")] == [
        "a",
        "b",
        "",
        "ENx",
        "",
        "",
        "",
    ]
    assert scanner.hit


def test_tokens_behind_a_stop_string_are_not_part_of_the_answer(tokenizer: Tokenizer) -> None:
    text = AnswerText(tokenizer, ["lo"], ())
    tokens = tokenizer.encode("hello world").ids
    piece = text.feed(tokens, "length")
    assert piece == ("hel", tuple(tokens[:5]), "stop")


def test_end_token_is_a_token_without_text(tokenizer: Tokenizer) -> None:
    text = AnswerText(tokenizer, [], (fakes.EOS,))
    hi = tokenizer.encode("hi").ids
    assert text.feed([*hi, fakes.EOS], "stop") == ("hi", (*hi, fakes.EOS), "stop")


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert read_eos_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_eos_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert read_eos_ids(tmp_path) == (1, 2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "no"}))
    with pytest.raises(ElasticError, match=r"generation_config.json: eos_token_id is 'no'"):
        read_eos_ids(tmp_path)


def test_broken_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ElasticError, match=r"tokenizer.json: no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ElasticError, match=r"tokenizer.json: not a tokenizer"):
        load_tokenizer(tmp_path)
