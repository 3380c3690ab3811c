"""Suffix drafts: the likeliest continuation, from a row's own text and from earlier texts of its domain."""

from __future__ import annotations

import numpy as np
import pytest
from tests.worker.fakes_model import new_row

from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import Chunk
from pagoda_worker.rows.rows import Row
from pagoda_worker.speculation.suffixes import SuffixLookup, likely

SAID = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26]


@pytest.mark.parametrize(
    ("places", "count", "path"),
    [
        ([], 4, []),
        ([[1, 2, 3, 4, 5]], 4, [1, 2, 3, 4]),
        ([[1, 2], [3, 4], [3, 4]], 4, [3, 4]),
        ([[1, 2], [3, 4]], 4, [1, 2]),
        ([[1], [1, 5], [1, 6], [1, 7]], 4, [1]),
        ([[1, 5], [1, 5], [1, 6], [1, 7], [2]], 4, [1, 5]),
        ([[1], [2], [3], [4]], 4, []),
    ],
    ids=["nothing", "one", "majority", "the first of two", "too unlikely", "half and half", "all alike"],
)
def test_the_likeliest_path(places: list[list[int]], count: int, path: list[int]) -> None:
    assert likely(places, count) == path


def row_of(number: int, tokens: list[int], domain: str | None, **params: bool) -> Row:
    row = Row.of(new_row(number, tokens, [], params=SamplingParams(**params)), np.array(tokens), np.zeros(0, np.int64))
    row.domain = domain
    return row


def speak(drafter: SuffixLookup, row: Row, output: list[int]) -> list[list[int]]:
    """The drafts before each token of a row with this output; nothing is reported as drafted or accepted."""
    length = len(row.tokens)
    drafter.draft([(row, Chunk(row.row_id, 0, length, True))])
    guesses = []
    for token in output:
        row.append(token)
        drafter.learn(row, 0, 0)
        drafts = drafter.draft([(row, Chunk(row.row_id, len(row.tokens) - 1, 1, True, 8))])
        guesses.append(drafts.get(row.row_id, np.zeros(0, np.int64)).tolist())
    return guesses


@pytest.mark.parametrize(("first", "second", "known"), [("a", "a", True), ("a", "b", False), (None, None, False)])
def test_what_a_domain_has_said_is_guessed_in_that_domain_alone(
    first: str | None, second: str | None, known: bool
) -> None:
    drafter = SuffixLookup(8)
    assert not any(speak(drafter, row_of(1, [1, 2, 3], first), SAID))
    guesses = speak(drafter, row_of(2, [5, 6, 7], second), SAID[:12])
    assert any(guesses) is known
    if known:
        assert guesses[2] == SAID[3:5], "three tokens agree: as many as a row begins with"
        assert guesses[11] == SAID[12:], "twelve do: more than that, up to the end"


def test_a_row_that_comes_again_does_not_say_again_what_it_said() -> None:
    drafter = SuffixLookup(8)
    speak(drafter, row_of(1, [1, 2, 3], "a"), SAID)
    outputs = drafter._domains.of("a")
    before = list(outputs.matches(SAID[:6], 4))
    more = list(range(40, 60))
    speak(drafter, row_of(2, [1, 2, 3, *SAID, *more], "a"), [70, 71])
    assert list(outputs.matches(SAID[:6], 4)) == before == [(6, SAID[6:10])]
    assert list(outputs.matches(more[-4:], 4)) == [(4, [70, 71])]


def test_searches_have_no_drafts_and_say_nothing() -> None:
    drafter = SuffixLookup(8)
    searching = row_of(1, SAID * 2, "a", use_beam_search=True)
    assert not any(speak(drafter, searching, SAID[:8]))
    assert drafter.learn(searching, 0, 0) == 0
    assert drafter._domains.of("a").size == 0
