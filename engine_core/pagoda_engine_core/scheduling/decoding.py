"""A decoding row is examined only where something may happen, and these positions are known in advance.

Marks on a choice hold them. Before its marks, a row costs a step only a few additions:

    quiet_until   up to this many computed tokens it has unshared blocks and may produce the tokens: it is planned one
                  token at a time
    plain_until   up to this many outputs a token is reported alone, unless it is a stop token
    heed_at       as plain_until, and the token fills no block either: it is only appended and reported

0 is always correct, because it forces an examination. Code that changes what a mark depends on (a block becomes shared,
drafts, the end of the row) sets it to 0; an examination sets it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagoda_engine_core.scheduling.kv_cache import KvCache
from pagoda_engine_core.scheduling.request import Choice, Request
from pagoda_proto.records import Delta, NextTokens


@dataclass(slots=True)
class News:
    """The outcome of a step: `tokens` has one token for each choice that just continues, `deltas` everything else. A
    choice is in only one of them."""

    tokens: NextTokens = field(default_factory=NextTokens)
    deltas: list[Delta] = field(default_factory=list)


class DecodingRows(NamedTuple):
    """Rows that decode in one step, in order. `row_ids` are as of that step; a choice may have a different one now.
    `talkative` holds the places of rows whose output may be more than a token."""

    choices: list[Choice]
    row_ids: list[int]
    talkative: list[int]

    @classmethod
    def of(cls, choices: list[Choice], row_ids: list[int]) -> DecodingRows:
        return cls(choices, row_ids, [place for place, choice in enumerate(choices) if _wants_more(choice.request)])


def _wants_more(request: Request) -> bool:
    """Whether its rows yield more than a token, or something other than one."""
    params = request.params
    return params.logprobs is not None or params.prompt_logprobs is not None or request.pools


NOBODY = DecodingRows([], [], [])


def mark_quiet(choice: Choice, kv: KvCache) -> None:
    """Mark a choice just examined, which computes one token, for which it has an unshared block."""
    request = choice.request
    choice.quiet_until = min(kv.capacity(choice), request.num_prompt_tokens + choice.max_outputs - 1)


def mark_heed(choice: Choice, kv: KvCache) -> None:
    """Mark a choice that has sampled, after `kv.commit`. Its limit, log-probabilities and drafts need examination."""
    request = choice.request
    wants_more = request.params.logprobs is not None or choice.num_drafts
    choice.plain_until = 0 if wants_more else request.max_output_tokens - 1
    choice.heed_at = min(choice.plain_until, kv.next_full(choice) - request.num_prompt_tokens)


def restless(running: Iterable[Choice]) -> list[Choice]:
    """Running choices that the next plan must examine; all others decode."""
    return [choice for choice in running if choice.num_computed >= choice.quiet_until]


def launch(choices: list[Choice], before: DecodingRows) -> tuple[DecodingRows, list[int]]:
    """Let the choices compute one token each. Returns the rows and where each starts. `before` are the rows of the last
    step; steps with the same rows share one object."""
    row_ids, starts = [], []
    for choice in choices:
        row_ids.append(choice.row_id)
        start = choice.num_computed
        starts.append(start)
        choice.num_computed = start + 1
        choice.num_pending += 1
    return (before if row_ids == before.row_ids else DecodingRows.of(choices, row_ids)), starts


def is_plain(choice: Choice, token: int) -> bool:
    """Whether only the token is to be reported."""
    return token >= 0 and len(choice.output_ids) < choice.plain_until and token not in choice.stop_ids


def take_plain(choice: Choice, token: int, news: News) -> None:
    news.tokens.streams.append(choice.stream)
    news.tokens.first_indexes.append(len(choice.output_ids))
    news.tokens.token_ids.append(token)
    choice.output_ids.append(token)
    choice.num_pending -= 1
    choice.num_confirmed += 1


def take_tokens(rows: DecodingRows, tokens: Sequence[int], news: News) -> list[int]:
    """`take_plain` for each row that needs no more. Returns the places of rows to examine, omitting rows now gone."""
    places = []
    told = news.tokens
    streams, first_indexes, token_ids = told.streams, told.first_indexes, told.token_ids
    for place, (choice, row_id, token) in enumerate(zip(rows.choices, rows.row_ids, tokens, strict=True)):
        if choice.row_id != row_id:
            continue
        outputs = choice.output_ids
        index = len(outputs)
        if index >= choice.heed_at or token < 0 or token in choice.stop_ids:
            places.append(place)
            continue
        outputs.append(token)
        choice.num_pending -= 1
        choice.num_confirmed += 1
        streams.append(choice.stream)
        first_indexes.append(index)
        token_ids.append(token)
    return places


def apply_tokens(
    rows: DecodingRows, tokens: Sequence[int], kv: KvCache, news: News
) -> Iterator[tuple[Choice, int, int]]:
    """Take one token of each row. Yields those that need more than reporting: choice, row id, token."""
    for place in take_tokens(rows, tokens, news):
        choice, token = rows.choices[place], tokens[place]
        if is_plain(choice, token):
            take_plain(choice, token, news)
            kv.commit(choice, choice.num_confirmed)
            mark_heed(choice, kv)
        else:
            yield choice, rows.row_ids[place], token
