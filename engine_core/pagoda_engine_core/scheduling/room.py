"""A worker has room for a request that can start in its next step; other requests wait where all workers see them.

The worker's own choices count against its room: what running rows take in the next step, and everything that waiting
ones (preempted, siblings) will take. Message bytes count too: those that new rows add to the plan, and the vectors of
all rows that pool, which may end in the same step. Plan and result are one message each, and one larger than its
receiver accepts would lose the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from pagoda_engine_core.scheduling.kv_cache import Counts, KvCache, exceeds, less
from pagoda_engine_core.scheduling.ledger import Cause
from pagoda_engine_core.scheduling.plan import MESSAGE_BYTES, Budget, row_bytes
from pagoda_engine_core.scheduling.request import NO_ROW, Choice
from pagoda_engine_core.scheduling.rows import Adapters
from pagoda_proto.pooling.params import answer_bytes
from pagoda_proto.records import Pool


class Need(NamedTuple):
    """What a request takes when it starts: rows (at once or later), tokens of the first step, blocks of all its known
    tokens, a place for its adapter if no other row uses it, and bytes of a message."""

    rows: int
    tokens: int
    blocks: Counts
    adapter: str = ""
    message_bytes: int = 0


class Room:
    """Rows, tokens, blocks, adapter places and message bytes that one worker's next step has left. `pooled_width`: see
    `Hello`."""

    def __init__(self, rows: int, budget: Budget, kv: KvCache, adapters: Adapters, pooled_width: int) -> None:
        self._bytes = MESSAGE_BYTES
        self._pooled_width = pooled_width
        self._adapters = adapters
        self._rows = rows
        self._budget = budget
        self._blocks = kv.free_blocks
        self._kv = kv

    def without(self, running: Iterable[Choice], waiting: Iterable[Choice]) -> Room:
        """Subtract what these choices take from this room, and return it."""
        for choice in chain(running, waiting):
            self._bytes -= self._answer_bytes(choice) + (0 if choice.launched else row_bytes(choice))
            distance = choice.distance
            self._rows -= 1
            if distance > 1 or choice.row_id == NO_ROW:  # decodes have promised tokens
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
        """What a request with these live choices needs."""
        choice = next((choice for choice in choices if choice.distance), choices[0])
        prefix = self._kv.cached_prefix(choice)
        blocks = self._kv.admission_cost(prefix, choice.num_tokens, lifetime_blocks)
        message_bytes = min(self._answer_bytes(choice) + sum(map(row_bytes, choices)), MESSAGE_BYTES)
        num_tokens = choice.num_tokens - prefix.num_tokens
        return Need(len(choices), num_tokens, blocks, choice.request.adapter_digest, message_bytes)

    def _answer_bytes(self, choice: Choice) -> int:
        task = choice.request.record.task
        return answer_bytes(task.pooling, choice.num_tokens, self._pooled_width) if isinstance(task, Pool) else 0

    def lacks(self, need: Need) -> Cause | None:
        """What keeps a request from starting in the next step."""
        if self._rows < 1:
            return Cause.QUEUED_ROWS
        if not self._adapters.fits(need.adapter):
            return Cause.QUEUED_ADAPTERS
        if not self._budget.fits(need.tokens) or need.message_bytes > self._bytes:
            return Cause.QUEUED_BUDGET
        return Cause.QUEUED_BLOCKS if exceeds(need.blocks, self._blocks) else None

    def take(self, need: Need) -> None:
        self._rows -= need.rows
        self._adapters.take(need.adapter)
        self._budget.grant(need.tokens)
        self._bytes -= need.message_bytes
        self._blocks = less(self._blocks, need.blocks)
