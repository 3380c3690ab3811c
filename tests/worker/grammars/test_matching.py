"""A matcher allows what the grammar allows, as found here by trying every token, and its cost does not depend on how it
reached its state."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.grammars.support import allowed, end, small_grammars, small_tokenizer, started, vocabulary

from pagoda_proto import grammars
from pagoda_worker.grammars.compiling import CompiledGrammars, GrammarError

TEXTS = st.lists(
    st.text(st.sampled_from("helo wrdt<é\n"), min_size=1, max_size=12), min_size=1, max_size=5, unique=True
)
DIES = grammars.regex("(.*h.{1,200}){1,100}")
"""After some tokens, it becomes too complex for the small tokenizer."""


def fitting(written: bytes, texts: list[str]) -> set[int]:
    """The tokens after which `written` is still a prefix of one of the texts, and the end token if it is one."""
    wholes = [text.encode() for text in texts]
    fits = {token for token, piece in vocabulary().items() if any(one.startswith(written + piece) for one in wholes)}
    return fits | ({end()} if written in wholes else set())


def forced(written: bytes, texts: list[str]) -> bool:
    """Whether only one byte can follow: llguidance then allows only the token that a tokenizer would choose."""
    begun = [text.encode() for text in texts if text.encode().startswith(written)]
    return len({one[len(written) : len(written) + 1] for one in begun}) == 1


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(0, 2**32))
def test_what_is_allowed_is_what_leads_to_one_of_the_texts(texts: list[str], seed: int) -> None:
    matcher, written, rng = started(grammars.choice(texts)), b"", random.Random(seed)
    while True:
        expected = fitting(written, texts)
        if forced(written, texts):
            assert set() < allowed(matcher) <= expected
        else:
            assert allowed(matcher) == expected
        token = rng.choice(sorted(allowed(matcher)))
        matcher.consume(token)
        if token == end():
            break
        written += vocabulary()[token]
    assert written.decode() in texts
    assert allowed(matcher) == {end()}  # only end tokens may follow an end token, until the row is stopped
    assert matcher.error == ""


@settings(max_examples=30, deadline=None)
@given(TEXTS, st.integers(0, 2**32), st.integers(0, 6))
def test_one_that_has_consumed_outputs_is_where_one_is_that_wrote_them(texts: list[str], seed: int, count: int) -> None:
    grammar, compiled, rng, outputs = grammars.choice(texts), small_grammars(), random.Random(seed), list[int]()
    matcher = started(grammar, grammars=compiled)
    for _ in range(count):
        outputs.append(rng.choice(sorted(allowed(matcher))))
        matcher.consume(outputs[-1])
    assert allowed(started(grammar, outputs, compiled)) == allowed(matcher)


def test_the_ends_of_the_request_count_and_no_others() -> None:
    compiled, h = small_grammars(), small_tokenizer().tokenize_str("h")[0]
    tool_call = small_tokenizer().tokenize_str("<tool_call>")[0]
    matcher = compiled.matcher(grammars.regex("h*"), [tool_call, 7], np.array([h]))
    assert {tool_call, 7} <= allowed(matcher)
    assert end() not in allowed(matcher)
    matcher.consume(7)
    assert allowed(matcher) == {tool_call, 7}


@pytest.mark.parametrize("text", ["<tool_call>", "a<tool_call>b", "<|im_start|>", "<|im_end|>."])
def test_a_text_that_is_the_name_of_a_special_token_is_spelled_out(text: str) -> None:
    for grammar in (grammars.choice([text]), grammars.json_schema({"const": text})):
        matcher, written = started(grammar), b""
        while end() not in allowed(matcher):
            token = min(allowed(matcher))
            written += vocabulary()[token]
            matcher.consume(token)
            assert matcher.error == ""
        assert text in (written.decode(), json.loads(written) if written.startswith(b'"') else "")


def test_special_tokens_stand_where_a_grammar_names_them() -> None:
    call = small_tokenizer().tokenize_str("<tool_call>")[0]
    matcher = started(grammars.lark('start: "a"? <tool_call> "b"'))
    assert call in allowed(matcher)
    matcher.consume(call)
    assert matcher.error == ""
    assert vocabulary()[min(allowed(matcher))] == b"b"


def test_an_end_of_sequence_that_a_grammar_names_before_its_end_is_an_error_that_says_so() -> None:
    matcher = started(grammars.lark(f'start: "a" <[{end()}]> "b"'), small_tokenizer().tokenize_str("a"))
    assert allowed(matcher) == set()
    assert matcher.error == "it requires an end of sequence before its end (output token 1)"


def test_an_end_that_is_text_ends_and_is_not_written() -> None:
    """If a checkpoint does not mark its end token as special, a grammar would match it as text."""
    h, w = (small_tokenizer().tokenize_str(text)[0] for text in "hw")
    matcher = small_grammars().matcher(grammars.regex("w[hw]{2}"), [h], np.array([w]))
    assert h not in allowed(matcher)


def test_tokens_that_do_not_fit_are_an_error_that_stays() -> None:
    h, w = (small_tokenizer().tokenize_str(text)[0] for text in "hw")
    matcher = started(grammars.choice(["hhh"]))
    matcher.consume(h)
    matcher.consume(w)
    assert matcher.error == "the tokens so far do not match it (output token 1)"
    matcher.consume(h)
    assert allowed(matcher) == set()
    with pytest.raises(GrammarError, match="do not match it"):
        started(grammars.choice(["hhh"]), [h, w])


def death(outputs: list[int], neighbours: int = 0, grammars: CompiledGrammars | None = None) -> tuple[int, str]:
    """After how many of these outputs the grammar fails, and how; neighbours produce other tokens meanwhile."""
    compiled = grammars or small_grammars()
    others = [started(DIES, grammars=compiled) for _ in range(neighbours)]
    matcher, rng = started(DIES, grammars=compiled), random.Random(1)
    for place, token in enumerate(outputs):
        for other in others:
            other.consume(rng.choice(sorted(allowed(other)) or [0]))
        matcher.consume(token)
        if matcher.error:
            return place, matcher.error
    return len(outputs), ""


def test_it_fails_in_the_same_place_alone_in_company_and_when_replayed() -> None:
    outputs = small_tokenizer().tokenize_str("h" * 200)
    place, error = death(outputs)
    assert error
    assert place < len(outputs)
    assert death(outputs, neighbours=3) == (place, error)
    with pytest.raises(GrammarError) as replayed:
        started(DIES, outputs[: place + 1])
    assert str(replayed.value) == error
    assert started(DIES, outputs[:place]).error == ""


def test_what_others_used_up_is_not_missing() -> None:
    """Matchers beside or after a failed one behave as they would alone."""
    outputs, harmless = small_tokenizer().tokenize_str("h" * 200), small_tokenizer().tokenize_str("w" * 60)
    alone = death(outputs)
    compiled = small_grammars()
    before = started(DIES, harmless[:30], grammars=compiled)
    for _ in range(3):
        assert death(outputs, grammars=compiled) == alone
        assert death(harmless, grammars=compiled) == (len(harmless), "")
    for token in harmless:
        before.consume(token)
    assert before.error == ""


@pytest.mark.parametrize("begin", ["", "hello world"])
def test_it_fails_in_the_same_place_when_it_is_asked_for_drafts(begin: str) -> None:
    """The mask has already found the forced tokens."""
    grammar, outputs = (
        grammars.regex(f"{begin}(.*h.{{1,200}}){{1,100}}"),
        small_tokenizer().tokenize_str(begin + "h" * 200),
    )
    deaths, masks = [], []
    for asked in (False, True):
        matcher, seen = started(grammar), []
        for place, token in enumerate(outputs):
            if asked:
                matcher.forced(64)
                matcher.may_begin(np.array(outputs[place : place + 8]))
            seen.append(allowed(matcher))
            matcher.consume(token)
            if matcher.error:
                deaths.append((place, matcher.error))
                break
        masks.append(seen)
    assert len(deaths) == 2
    assert deaths[0] == deaths[1]
    assert masks[0] == masks[1]
