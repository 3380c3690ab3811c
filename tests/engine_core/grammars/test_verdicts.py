from __future__ import annotations

import pytest

from pagoda_engine_core.grammars import verdicts
from pagoda_engine_core.grammars.verdicts import Verdict, Verdicts
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.times import GRAMMAR_REFUSED_MOST_S, GRAMMAR_REFUSED_S

GOOD = Verdict(None, final=True)
SLOW = Verdict(PagodaError(ErrorCode.INVALID_ARGUMENT, "too slow", "grammar"), final=False, dear=True)
UNREAD = Verdict(PagodaError(ErrorCode.OVERLOADED, "too many", "grammar"), final=False)


def test_what_took_its_process_down_is_refused_for_a_while_that_grows_with_each_time() -> None:
    kept, now = Verdicts(), 1000.0
    expected = GRAMMAR_REFUSED_S
    for _ in range(10):
        kept.keep("g", SLOW, now)
        assert kept.find("g", now + expected - 0.01) is SLOW
        assert kept.find("other", now) is None
        now += expected
        assert kept.find("g", now) is None, "it is tried again"
        expected = min(2 * expected, GRAMMAR_REFUSED_MOST_S)
    assert expected == GRAMMAR_REFUSED_MOST_S


def test_what_was_found_good_in_the_end_begins_anew() -> None:
    kept = Verdicts()
    kept.keep("g", SLOW, 0.0)
    kept.keep("g", GOOD, 10.0)
    assert kept.find("g", 1e9) is GOOD


def test_what_says_nothing_of_a_grammar_is_not_kept() -> None:
    kept = Verdicts()
    kept.keep("g", UNREAD, 0.0)
    assert kept.find("g", 0.0) is None


@pytest.mark.parametrize(("verdict", "most"), [(GOOD, "MAX_FINAL"), (SLOW, "MAX_DEAR")])
def test_sec_17_of_each_kind_so_many_are_kept(monkeypatch: pytest.MonkeyPatch, verdict: Verdict, most: str) -> None:
    monkeypatch.setattr(verdicts, most, 2)
    kept = Verdicts()
    for grammar in "abac":
        kept.keep(grammar, verdict, 0.0)
    assert [grammar for grammar in "abc" if kept.find(grammar, 0.0)] == ["a", "c"]
    assert (len(kept._final), len(kept._dear)) in {(2, 0), (0, 2)}
