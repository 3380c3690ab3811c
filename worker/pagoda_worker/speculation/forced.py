"""Where a grammar leaves no choice, the next tokens are known and need not be computed one by one.

Such tokens travel as drafts: each is sampled at its position under that position's mask, so the row gets the same
tokens in fewer steps. After them, and wherever nothing is forced, the inner drafter's drafts are used, if the grammar
admits the first token.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from pagoda_proto.steps import Chunk
from pagoda_worker.kernels.ops import Cache
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.rows.rows import Ids, Row
from pagoda_worker.speculation.drafting import Drafter, Work

MAX_FORCED = 64  # tokens of one row at once; the engine core grants fewer


class ForcedDrafts:
    """Wraps another drafter, which learns of its own drafts only. A step has logits for at most `max_logits` tokens,
    forced ones included."""

    def __init__(self, inner: Drafter, max_logits: int) -> None:
        self._inner = inner
        self._max_logits = max_logits
        self._forced: set[int] = set()  # rows of this step whose drafts are not the inner drafter's

    @property
    def caches(self) -> Sequence[tuple[LoadedModel, Sequence[Cache]]]:
        return self._inner.caches

    @property
    def reads_all(self) -> bool:
        return self._inner.reads_all

    def draft(self, work: Work) -> dict[int, Ids]:
        known = self._known(work)
        guesses = self._inner.draft([(row, _left_over(chunk, known.get(row.row_id))) for row, chunk in work])
        drafts = dict(guesses)
        self._forced.clear()
        for row, _ in work:
            if row.row_id in known:
                forced, guess = known[row.row_id], guesses.get(row.row_id)
                if guess is not None and _goes_on(row, forced, guess):
                    continue
                drafts[row.row_id] = forced
                self._forced.add(row.row_id)
        return {row_id: tokens for row_id, tokens in drafts.items() if len(tokens)}

    def _known(self, work: Work) -> dict[int, Ids]:
        """The forced tokens, by the ids of rows with a grammar that may have drafts."""
        known, room = dict[int, Ids](), self._max_logits - len(work)
        for row, chunk in work:
            if chunk.num_drafts and row.matcher is not None:
                known[row.row_id] = row.matcher.forced(min(chunk.num_drafts, MAX_FORCED, room))
                room -= len(known[row.row_id])
        return known

    def learn(self, row: Row, num_drafted: int, num_accepted: int) -> int:
        if row.row_id in self._forced:
            num_drafted = num_accepted = 0
        hint = self._inner.learn(row, num_drafted, num_accepted)
        return hint if row.matcher is None else max(hint, len(row.matcher.forced(MAX_FORCED)))


def _goes_on(row: Row, forced: Ids, guess: Ids) -> bool:
    """Whether a draft begins with the forced tokens or, if there are none, with a token that may come next."""
    if len(forced):
        return np.array_equal(guess[: len(forced)], forced)
    return row.matcher is not None and row.matcher.may_begin(guess)


def _left_over(chunk: Chunk, forced: Ids | None) -> Chunk:
    """The chunk for the inner drafter, which is not asked for drafts if all of them are forced."""
    if forced is None or len(forced) < chunk.num_drafts:
        return chunk
    return msgspec.structs.replace(chunk, num_drafts=0)
