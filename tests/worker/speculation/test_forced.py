"""Tokens forced by a grammar are drafted, and other drafters' tokens are used where the grammar allows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.worker.grammars.support import end, small_grammars, small_tokenizer, vocabulary

from pagoda_proto import grammars
from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import Chunk, NewRow
from pagoda_worker.rows.rows import Ids, Row
from pagoda_worker.speculation.forced import ForcedDrafts

PROMPT = [3, 4, 5]


@dataclass
class Guesser:
    """Drafts the tokens it was given, and records calls."""

    guess: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    learnt: list[tuple[int, int]] = field(default_factory=list)
    caches: Any = ()
    reads_all: bool = False

    def draft(self, work: Any) -> dict[int, Ids]:
        self.asked = [chunk.num_drafts for _, chunk in work]
        found = {row.row_id: np.array(self.guess[: chunk.num_drafts], np.int64) for row, chunk in work}
        return {row_id: tokens for row_id, tokens in found.items() if len(tokens)}

    def learn(self, row: Row, num_drafted: int, num_accepted: int) -> int:
        self.learnt.append((num_drafted, num_accepted))
        return len(self.guess)


def row_of(grammar: str = "", row_id: int = 1) -> Row:
    params = SamplingParams(grammar=grammar)
    new = NewRow(
        row_id=row_id, token_ids=PROMPT, num_prompt_tokens=3, num_computed=2, block_ids=[0], params=params, seed=1
    )
    matcher = small_grammars().matcher(grammar, [end()], np.empty(0, np.int64)) if grammar else None
    return Row.of(new, np.array(PROMPT, np.int64), np.array([0], np.int64), matcher)


def chunk(num_drafts: int, row_id: int = 1) -> Chunk:
    return Chunk(row_id, 2, 1, True, num_drafts)


def spelled(text: str) -> list[int]:
    return small_tokenizer().tokenize_str(text)


def read(tokens: Ids) -> str:
    return b"".join(vocabulary()[token] for token in tokens.tolist()).decode()


def test_a_text_without_a_choice_is_drafted_as_far_as_is_allowed() -> None:
    drafter, row = ForcedDrafts(Guesser(), 64), row_of(grammars.regex("hello world(a|b)"))
    forced = spelled("hello world")
    assert len(forced) > 1
    assert drafter.learn(row, 0, 0) == len(forced)
    assert drafter.draft([(row, chunk(99))])[1].tolist() == forced
    assert drafter.draft([(row, chunk(1))])[1].tolist() == forced[:1]
    assert drafter.draft([(row, chunk(0))]) == {}


def test_where_there_is_a_choice_nothing_is_forced() -> None:
    drafter, row = ForcedDrafts(Guesser(), 64), row_of(grammars.regex("a|b"))
    assert drafter.learn(row, 0, 0) == 0
    assert drafter.draft([(row, chunk(9))]) == {}


def test_guesses_that_begin_with_what_is_forced_go_on_behind_it() -> None:
    forced, rest = spelled("hello world"), spelled("abab?a")
    inner = Guesser(forced + rest)
    drafter, row = ForcedDrafts(inner, 64), row_of(grammars.regex("hello world[ab]*"))
    assert read(drafter.draft([(row, chunk(99))])[1]) == "hello worldabab?a"
    drafter.learn(row, 7, 5)
    assert inner.learnt == [(7, 5)]
    inner.guess = rest
    assert drafter.draft([(row, chunk(99))])[1].tolist() == forced
    drafter.learn(row, 7, 5)
    assert inner.learnt[-1] == (0, 0)  # the drafts were not its own


def test_guesses_for_a_row_with_a_choice_are_heard_if_they_begin_as_they_may() -> None:
    inner = Guesser(spelled("abx"))
    drafter, row = ForcedDrafts(inner, 64), row_of(grammars.regex("[ab]*"))
    assert read(drafter.draft([(row, chunk(9))])[1]) == "abx"
    inner.guess = spelled("x")
    assert drafter.draft([(row, chunk(9))]) == {}


def test_rows_without_a_grammar_are_none_of_its_business() -> None:
    inner = Guesser([7, 8])
    drafter, free, formed = ForcedDrafts(inner, 64), row_of(), row_of(grammars.choice(["hello world"]), 2)
    drafts = drafter.draft([(free, chunk(5)), (formed, chunk(1, 2))])
    assert drafts[1].tolist() == [7, 8]
    assert drafts[2].tolist() == spelled("hello world")[:1]
    assert inner.asked == [5, 0]  # the grammar forces all drafts of the other row
    assert drafter.learn(free, 2, 1) == 2
    assert inner.learnt == [(2, 1)]


def test_a_step_has_no_more_logits_than_there_is_memory_for() -> None:
    rows = [(row_of(grammars.choice(["hello world"]), i), chunk(9, i)) for i in (1, 2)]
    drafts = ForcedDrafts(Guesser(), 5).draft(rows)
    assert sum(map(len, drafts.values())) == 3
    assert ForcedDrafts(Guesser(), 2).draft(rows) == {}


def test_one_that_has_ended_or_failed_forces_nothing() -> None:
    for text in ("a", "x"):
        row = row_of(grammars.regex("abbb"))
        (token,) = spelled(text)
        row.append(token)
        if text == "a":
            for one in [*spelled("bbb"), end()]:
                row.append(one)
        assert row.matcher is not None
        assert len(row.matcher.forced(9)) == 0
        assert not row.matcher.may_begin(np.array([5]))
