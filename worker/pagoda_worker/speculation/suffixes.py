"""Drafts from what followed the same words before, in the row's own text and in earlier outputs of its domain.

The earlier places of the text's longest suffix are the leaves below a node of a suffix trie; what followed there, and
how often, are that node's branches. The trie is never built: `rows.ngram` and `rows.texts` know the places, and only
the requested path is walked, along the likeliest branch, while it is likely enough.

After A. Oliaro et al., SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pagoda_worker.rows.drafts import DraftLength, RowDrafts
from pagoda_worker.rows.ngram import MAX_MATCH, SIZE, NgramIndex, continuation
from pagoda_worker.rows.rows import Ids, Row
from pagoda_worker.rows.texts import Domains, Outputs, Text
from pagoda_worker.speculation.drafting import Work

INDEXED_PER_STEP = 4096  # tokens, of all rows together: about a millisecond
INDEXED_PER_SAMPLE = 64
LIKELY = 0.3  # share of the places that a path must retain
LEAST_SURE = 7  # tokens that match by chance; each one beyond allows one draft, whatever became of the last drafts


class SuffixLookup:
    """Indexes a prompt while it is computed; one from the prefix cache, over the steps that follow.

    A beam is a different row in the next step: it has nothing to draft from, and is not indexed.
    """

    caches = ()
    reads_all = True

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._domains = Domains()

    def draft(self, work: Work) -> dict[int, Ids]:
        drafts, room = {}, INDEXED_PER_STEP
        for row, chunk in work:
            if row.params.use_beam_search:
                continue
            state, index = self._state(row)
            room -= index.extend(row.tokens.array, room)
            if guess := state.guess[: chunk.num_drafts]:
                drafts[row.row_id] = np.array(guess, np.int64)
        self._domains.trim()
        return drafts

    def learn(self, row: Row, num_drafted: int, num_accepted: int) -> int:
        if row.params.use_beam_search:
            return 0
        state, index = self._state(row)
        state.length.learn(num_drafted, num_accepted)
        tokens = row.tokens.array
        index.extend(tokens, INDEXED_PER_SAMPLE)
        outputs = None if row.domain is None else self._domains.of(row.domain)
        state.guess = guessed(tokens, index, outputs, state.length.now, self._max_drafts)
        if row.domain is not None:
            state.text = self._domains.take(row.domain, state.text, tokens)
        return len(state.guess)

    def _state(self, row: Row) -> tuple[RowDrafts, NgramIndex]:
        """Of a row that was computed before, here or elsewhere, only the tokens from now on are remembered."""
        if row.drafts is not None and row.drafts.index is not None:
            return row.drafts, row.drafts.index
        index = NgramIndex()
        row.drafts = RowDrafts(DraftLength(self._max_drafts), index, text=Text(len(row.tokens)))
        return row.drafts, index


def guessed(tokens: Ids, index: NgramIndex, outputs: Outputs | None, now: int, most: int) -> list[int]:
    """The likely continuation of `tokens`; recent drafts (`now`) or the match length set its length, up to `most`."""
    tail = tokens[-MAX_MATCH:].tolist()
    found = [(length, continuation(tokens, distance, most).tolist()) for length, distance in index.matches(tokens)]
    if outputs is not None and len(tail) >= SIZE:
        found += outputs.matches(tail, most)
    longest = max((length for length, _ in found), default=0)
    count = min(most, max(now, longest - LEAST_SURE))
    return likely([following for length, following in found if length == longest], count)


def likely(places: Sequence[Sequence[int]], count: int) -> list[int]:
    """Up to `count` tokens along the likeliest path through what followed at `places`; the one found first wins
    ties."""
    if len(places) == 1:
        return list(places[0][:count])
    path: list[int] = []
    left, enough = list(places), LIKELY * len(places)
    while len(path) < count:
        left = [place for place in left if len(place) > len(path)]
        if not left:
            break
        ((token, number),) = Counter(place[len(path)] for place in left).most_common(1)
        if number < enough:
            break
        path.append(token)
        left = [place for place in left if place[len(path) - 1] == token]
    return path
