"""Detokenising equals decoding everything at once, whatever the tokens and however they arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.model_dir import byte_fallback_tokenizer, byte_level_tokenizer
from tokenizers import Tokenizer, decoders, models

from pagoda_gateway.text.detokenizer import Detokenizer
from pagoda_gateway.text.vocabulary import TokenTable, UnsupportedTokenizer, read_rules

TOKENIZERS = {
    "byte_level": byte_level_tokenizer(),
    "fallback_strip": byte_fallback_tokenizer(strip=True),
    "fallback": byte_fallback_tokenizer(strip=False),
}
TEXTS = st.text(alphabet=st.sampled_from("helo é日本🙂🏳️‍🌈\n ▁\u0301字"), max_size=30)


def table_of(tokenizer: Tokenizer) -> TokenTable:
    import json

    tokens = {i: t for t, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return TokenTable(read_rules(json.loads(tokenizer.to_str())["decoder"]), tokens, special)


TABLES = {name: table_of(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def stream(table: TokenTable, ids: list[int], cuts: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(table, **options)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [detokenizer.push(ids[a:b]) for a, b in pairwise(edges)] + [detokenizer.flush()]


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, TOKENIZERS[name].get_vocab_size() - 1), max_size=40)


CUTS = st.lists(st.integers(0, 40), max_size=10)


@settings(max_examples=150, deadline=None)
@given(ids=ids_of("byte_level"), cuts=CUTS, skip=st.booleans())
def test_byte_level_equals_the_librarys_decode(ids: list[int], cuts: list[int], skip: bool) -> None:
    pieces = stream(TABLES["byte_level"], ids, cuts, skip_special_tokens=skip, at_start=True)
    assert "".join(pieces) == TOKENIZERS["byte_level"].decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TABLES)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), cuts=CUTS, skip=st.booleans(), start=st.booleans())
def test_chunking_never_matters(name: str, data: st.DataObject, cuts: list[int], skip: bool, start: bool) -> None:
    ids = data.draw(ids_of(name))
    pieces = stream(TABLES[name], ids, cuts, skip_special_tokens=skip, at_start=start)
    whole = stream(TABLES[name], ids, [], skip_special_tokens=skip, at_start=start)
    assert "".join(pieces) == "".join(whole)


@pytest.mark.parametrize("name", ["fallback_strip", "fallback"])
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(TEXTS, max_size=4), cuts=CUTS)
def test_byte_fallback_equals_the_librarys_decode(name: str, parts: list[str], cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False).ids]
    pieces = stream(TABLES[name], ids, cuts, at_start=True)
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", TABLES)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_one_token_at_a_time_shows_only_whole_characters(name: str, text: str) -> None:
    ids = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    pieces = stream(TABLES[name], ids, list(range(len(ids))), at_start=True)
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""  # nothing was left over


def test_an_emoji_split_over_tokens_appears_once_it_is_whole() -> None:
    table, tokenizer = TABLES["byte_level"], TOKENIZERS["byte_level"]
    ids = tokenizer.encode("🙂", add_special_tokens=False).ids
    assert len(ids) == 4
    detokenizer = Detokenizer(table)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "🙂"]


def test_an_unfinished_character_becomes_a_replacement_character_at_the_end() -> None:
    ids = TOKENIZERS["byte_level"].encode("a🙂", add_special_tokens=False).ids[:-1]
    detokenizer = Detokenizer(TABLES["byte_level"])
    assert (detokenizer.push(ids), detokenizer.flush()) == ("a", "\ufffd")


def test_a_good_character_survives_bad_bytes_beside_it() -> None:
    table = TABLES["fallback"]
    ids = [3 + byte for byte in "🙂".encode()] + [3 + 0xFF]
    detokenizer = Detokenizer(table, at_start=True)
    assert detokenizer.push(ids) + detokenizer.flush() == "🙂\ufffd"


def test_a_continuation_keeps_its_leading_space() -> None:
    ids = TOKENIZERS["fallback_strip"].encode("he", add_special_tokens=False).ids
    table = TABLES["fallback_strip"]
    assert Detokenizer(table, at_start=True).push(ids) == "he"
    assert Detokenizer(table).push(ids) == " he"


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@settings(max_examples=50, deadline=None)
@given(pieces=st.lists(st.sampled_from(["▁a", "b", "▁", "▁▁c", "é"]), max_size=8), cuts=CUTS)
def test_metaspace_equals_the_librarys_decode(scheme: str, pieces: list[str], cuts: list[int]) -> None:
    vocab = {piece: i for i, piece in enumerate(["▁a", "b", "▁", "▁▁c", "é"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="b"))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    ids = [vocab[piece] for piece in pieces]
    assert "".join(stream(table_of(tokenizer), ids, cuts, at_start=True)) == tokenizer.decode(ids)


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 2), max_size=8), cuts=CUTS)
def test_words_without_a_decoder_are_joined_by_spaces(ids: list[int], cuts: list[int]) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "bc": 1, "é": 2}, unk_token="a"))
    assert "".join(stream(table_of(tokenizer), ids, cuts, at_start=True)) == tokenizer.decode(ids)


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert Detokenizer(TABLES["byte_level"]).push([10_000, 2**40]) == ""
    assert TABLES["byte_level"].bytes_of(10_000) == b""


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
    ],
)
def test_unknown_decoders_are_refused_by_name(decoder: dict[str, object]) -> None:
    with pytest.raises(UnsupportedTokenizer, match=r"ByteFallback|Strip|Replace"):
        read_rules(decoder)
