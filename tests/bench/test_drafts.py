from __future__ import annotations

import random

import pytest
from bench.drafts import MADE, measure

from pagoda_worker.speculation.drafting import NoDrafts
from pagoda_worker.speculation.suffixes import SuffixLookup

PROMPT, SAID = list(range(100, 140)), list(range(60))


def test_every_token_is_counted_once() -> None:
    plain = measure(NoDrafts(), [(PROMPT, SAID), (SAID, PROMPT)])
    assert (plain.tokens, plain.steps, plain.drafted) == (98, 98, 0), "all but those that prompts' steps sample"
    copied = measure(SuffixLookup(8), [(SAID, SAID)])
    assert copied.tokens == 59 == copied.steps + copied.held - 1, "the last step's drafts end where the trace does"
    assert copied.steps < 15


def test_what_was_said_before_is_the_memorys_to_guess() -> None:
    trace = [(PROMPT, SAID)] * 2
    assert measure(SuffixLookup(8), trace).held > 0
    assert measure(SuffixLookup(8), trace, None).drafted == 0


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_traces_are_made_alike_each_time(make: object) -> None:
    assert callable(make)
    said = make(random.Random(1))
    assert said == make(random.Random(1))
    assert len(said) > 10
    assert all(asked and answer for asked, answer in said)
