"""The cache of compiled grammars is bounded, and a model that cannot have grammars says why."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.gateway.model_dir import byte_level_tokenizer, write_model_dir
from tests.worker.grammars.support import NONE, allowed, end, small_grammars, started

from pagoda_proto import grammars
from pagoda_worker.grammars import compiling
from pagoda_worker.grammars.compiling import GrammarError, load_grammars

VOCAB = byte_level_tokenizer().get_vocab_size()


def test_the_last_used_are_kept_and_no_more() -> None:
    compiled = small_grammars()
    for i in range(3 * compiling.MAX_COMPILED):
        started(grammars.regex(f"h{{{i + 1}}}"), grammars=compiled)
        started(grammars.regex("h"), grammars=compiled)
    assert len(compiled) == compiling.MAX_COMPILED


def test_sec_17_long_grammars_are_kept_up_to_a_sum_of_characters() -> None:
    compiled = small_grammars()
    size = compiling.MAX_COMPILED_CHARS // 8
    for i in range(24):
        started(grammars.lark(f"start: /h{{{i + 1}}}/" + " " * size), grammars=compiled)
        assert len(compiled) == min(i + 1, 7)
    started(grammars.regex("h"), grammars=compiled)
    assert len(compiled) == 8


@pytest.mark.slow
def test_thousands_of_schemas_leave_memory_bounded() -> None:
    """Matchers are freed with their rows, and only the last few compiled grammars are kept."""
    compiled, process = small_grammars(), psutil.Process()

    def visit(numbers: range) -> int:
        for i in numbers:
            properties = {f"p{i}_{k}": {"type": "string", "maxLength": i} for k in range(5)}
            started(grammars.json_schema({"type": "object", "properties": properties}), grammars=compiled).mask()
        return process.memory_info().rss

    early, late = visit(range(500)), visit(range(500, 3_000))
    assert late - early < 20 * 2**20  # less than 8 kB per schema


def test_rows_of_one_grammar_go_their_own_ways() -> None:
    compiled, grammar = small_grammars(), grammars.choice(["hw", "wh"])
    one, other = started(grammar, grammars=compiled), started(grammar, grammars=compiled)
    first = allowed(one)
    one.consume(min(first))
    assert allowed(other) == first
    assert allowed(one) != first
    assert allowed(started(grammar, grammars=compiled)) == first


def test_a_grammar_that_does_not_compile_is_an_error_and_is_not_kept() -> None:
    compiled = small_grammars()
    for bad in ("", "{", "start: foo", grammars.lark("start: <nobody>"), grammars.json_schema({"type": "bogus"})):
        with pytest.raises(GrammarError):
            started(bad, grammars=compiled)
    assert len(compiled) == 0


def test_there_is_no_grammar_without_an_end() -> None:
    with pytest.raises(GrammarError, match="end-of-sequence"):
        small_grammars().matcher(grammars.regex("h"), [], NONE)


def test_a_model_directory_gives_grammars_as_wide_as_the_logits(tmp_path: Path) -> None:
    loaded = load_grammars(write_model_dir(tmp_path), VOCAB + 17)
    matcher = loaded.matcher(grammars.regex("h*"), [end()], NONE)
    assert not matcher.mask().allows(VOCAB + 16)
    assert matcher.mask().ids.max() <= VOCAB + 16
    assert end() in allowed(matcher)


@pytest.mark.parametrize(
    ("files", "vocab_size", "says"),
    [
        ({"tokenizer.json": None}, VOCAB, "no tokenizer.json"),
        ({"tokenizer.json": "{}"}, VOCAB, "cannot be used for grammars"),
        ({"tokenizer.json": b"\xff\xfe"}, VOCAB, "cannot be used for grammars"),
        ({}, VOCAB - 1, "cannot be used for grammars"),
        ({"generation_config.json": json.dumps({"eos_token_id": 10**6})}, VOCAB, "cannot be used for grammars"),
        ({"generation_config.json": "{"}, VOCAB, "cannot be used for grammars"),
        ({"generation_config.json": "[]"}, VOCAB, "cannot be used for grammars"),
    ],
)
def test_a_model_without_grammars_says_why(
    tmp_path: Path, files: dict[str, str | bytes | None], vocab_size: int, says: str
) -> None:
    write_model_dir(tmp_path)
    for name, content in files.items():
        if content is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(GrammarError, match=says):
        load_grammars(tmp_path, vocab_size).matcher(grammars.regex("h"), [end()], np.array([0]))


def test_a_tokenizer_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (write_model_dir(tmp_path) / "tokenizer.json").open("r+b") as file:
        file.truncate(compiling.MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(GrammarError, match="more than"):
        load_grammars(tmp_path, VOCAB).matcher(grammars.regex("h"), [end()], NONE)
