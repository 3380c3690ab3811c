"""A worker has room for a request that can begin in its next step; whoever cannot waits where all workers see it.

What counts against the room are the worker's own: what running rows take in the next step, and all that its waiting
choices (preempted ones, siblings) will take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from pagoda_engine_core.scheduling.kv_cache import Counts, KvCache, exceeds, less
from pagoda_engine_core.scheduling.ledger import Cause
from pagoda_engine_core.scheduling.plan import Budget
from pagoda_engine_core.scheduling.policy import Adapters
from pagoda_engine_core.scheduling.request import NO_ROW, Choice


class Need(NamedTuple):
    """What a request takes when it begins: rows at once or later, tokens of the first step, blocks of all it knows, a
    place for its adapter, if it has one and no other row has the same."""

    rows: int
    tokens: int
    blocks: Counts
    adapter: str = ""


class Room:
    """Rows, tokens, blocks and places for adapters that the next step of one worker has left."""

    def __init__(self, rows: int, budget: Budget, kv: KvCache, adapters: Adapters) -> None:
        self._adapters = adapters
        self._rows = rows
        self._budget = budget
        self._blocks = kv.free_blocks
        self._kv = kv

    def without(self, running: Iterable[Choice], waiting: Iterable[Choice]) -> Room:
        """This room, less what those take."""
        for choice in chain(running, waiting):
            distance = choice.distance
            self._rows -= 1
            if distance > 1 or choice.row_id == NO_ROW:  # a decode has its promise
                self._budget.grant(distance)
            self._blocks = less(self._blocks, self._kv.shortage(choice, choice.num_computed + distance))
        return self

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def full(self) -> bool:
        return self._rows < 1 or self._budget.left < 1

    def need(self, choices: Sequence[Choice], lifetime_blocks: int) -> Need:
        """What a request needs whose live choices are these."""
        choice = next((choice for choice in choices if choice.distance), choices[0])
        prefix = self._kv.cached_prefix(choice)
        blocks = self._kv.admission_cost(prefix, choice.num_tokens, lifetime_blocks)
        return Need(len(choices), choice.num_tokens - prefix.num_tokens, blocks, choice.request.adapter_digest)

    def lacks(self, need: Need) -> Cause | None:
        """What keeps a request from beginning in the next step."""
        if self._rows < 1:
            return Cause.QUEUED_ROWS
        if not self._adapters.fits(need.adapter):
            return Cause.QUEUED_ADAPTERS
        if not self._budget.fits(need.tokens):
            return Cause.QUEUED_BUDGET
        return Cause.QUEUED_BLOCKS if exceeds(need.blocks, self._blocks) else None

    def take(self, need: Need) -> None:
        self._rows -= need.rows
        self._adapters.take(need.adapter)
        self._budget.grant(need.tokens)
        self._blocks = less(self._blocks, need.blocks)
