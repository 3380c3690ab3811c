"""Texts of a domain's rows are found within that domain only, and forgotten in time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_worker.rows.ngram import MAX_MATCH, MAX_PLACES, SIZE
from pagoda_worker.rows.texts import ALL_TOKENS, HALF_TOKENS, TEXT_TOKENS, Domains, Outputs, Text


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int64)


def naive(
    texts: list[list[int]], told: list[tuple[int, int]], tail: list[int], count: int
) -> list[tuple[int, list[int]]]:
    """The same by exhaustive search; `told` has text and position of every token, in order of arrival."""
    found = []
    places = [(t, p) for t, p in told if p >= SIZE - 1 and texts[t][p - SIZE + 1 : p + 1] == tail[-SIZE:]]
    for text, place in places[::-1][:MAX_PLACES]:
        before, length = texts[text][: place + 1], 0
        while length < min(len(tail), len(before)) and before[-1 - length] == tail[-1 - length]:
            length += 1
        following = texts[text][place + 1 : place + 1 + count]
        found += [(length, following)] if following else []
    return found


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=30),
    st.lists(st.integers(0, 2), min_size=SIZE, max_size=MAX_MATCH),
)
def test_rows_that_speak_in_turns_are_found_as_by_a_search(said: list[tuple[int, list[int]]], tail: list[int]) -> None:
    outputs, texts, told = Outputs(), [list[int]() for _ in range(3)], list[tuple[int, int]]()
    open_texts = [Text(0) for _ in texts]
    for row, tokens in said:
        told += [(row, len(texts[row]) + i) for i in range(len(tokens))]
        texts[row] += tokens
        open_texts[row] = outputs.take(open_texts[row], ids(texts[row]))
    assert list(outputs.matches(tail, 5)) == naive(texts, told, tail, 5)


def test_a_text_begins_with_what_was_before_it() -> None:
    """So the first tokens of an output are found, too; a part of the prompt farther back is not."""
    outputs, prompt, output = Outputs(), list(range(100, 140)), [7, 8, 9]
    outputs.take(Text(len(prompt)), ids(prompt + output))
    assert list(outputs.matches(prompt[-5:], 8)) == [(5, output)]
    assert list(outputs.matches(prompt[:20], 8)) == []


def test_a_domain_forgets_the_older_half_and_goes_on_in_the_newer() -> None:
    outputs, text, tokens = Outputs(), Text(0), list[int]()
    for start in range(0, 3 * HALF_TOKENS, 1024):
        tokens += range(start, start + 1024)
        text = outputs.take(text, ids(tokens))
        assert outputs.size <= 2 * (HALF_TOKENS + 1024 + TEXT_TOKENS + MAX_MATCH)
    assert list(outputs.matches(tokens[-20:-4], 4)) == [(MAX_MATCH, tokens[-4:])]
    assert list(outputs.matches(tokens[100:116], 4)) == []
    border = 2 * HALF_TOKENS
    assert list(outputs.matches(tokens[border : border + 10], 4)) == [(10, tokens[border + 10 : border + 14])]


def test_sec_10_nothing_is_found_across_domains() -> None:
    domains, said = Domains(), list(range(50))
    domains.take("one", Text(0), ids(said))
    assert list(domains.of("one").matches(said[10:20], 3)) == [(10, said[20:23])]
    for other in ("", "two", "one "):
        assert list(domains.of(other).matches(said[10:20], 3)) == []


def test_sec_17_thousands_of_domains_leave_memory_bounded() -> None:
    domains, said = Domains(), list(range(1000))
    for number in range(2000):
        domains.take(f"{number}", Text(0), ids(said))
        domains.of("busy")
        domains.trim()
    kept = [number for number in range(2000) if list(domains.of(f"{number}").matches(said[10:20], 3))]
    assert kept == list(range(2000 - len(kept), 2000)), "the last ones, if any"
    assert 0 < len(kept) * (len(said) + TEXT_TOKENS) <= ALL_TOKENS


def test_domains_are_counted_as_they_grow_and_not_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size stays right as halves are added and dropped, and thousands of small domains cost a step nothing."""
    domains = Domains()
    text, tokens = Text(0), ids(list(range(3 * HALF_TOKENS)))
    for end in range(1024, len(tokens), 1024):
        text = domains.take("long", text, tokens[:end])
    for number in range(500):
        domains.take(f"{number}", Text(0), tokens[:8])
    assert domains._size == sum(one.size for one in domains._outputs.values())
    monkeypatch.delattr(Outputs, "size")
    domains.trim()


def test_sec_17_a_row_that_goes_on_does_not_keep_what_its_domain_forgets() -> None:
    domains, said = Domains(), ids(list(range(1000)))
    text = domains.take("first", Text(0), said)
    assert text.half is not None
    for number in range(ALL_TOKENS // len(said) + 1):
        domains.take(f"{number}", Text(0), said)
        domains.trim()
    assert text.half() is None
    again = domains.take("first", text, ids([*said.tolist(), 5000]))
    assert again is not text
    assert list(domains.of("first").matches([997, 998, 999], 4)) == [(3, [5000])]
