"""A row is everything a worker keeps about one choice of a request: its tokens, its blocks and how to sample it.

Rows persist between steps, so a plan carries only changes; the worker appends its own samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagoda_proto.params import SamplingParams
from pagoda_proto.pooling.params import PoolingParams
from pagoda_proto.steps import NewRow
from pagoda_worker.grammars.matching import Matcher
from pagoda_worker.rows.drafts import RowDrafts
from pagoda_worker.rows.order import Ids as Ids
from pagoda_worker.rows.penalties import Processing
from pagoda_worker.rows.slots import NO_ADAPTER

_MIN_ROOM = 64


class Ints:
    """A growing list of int64 whose contents are available as an array without copying."""

    __slots__ = ("_data", "_size")

    def __init__(self, values: Ids) -> None:
        self._size = len(values)
        self._data = np.empty(max(_MIN_ROOM, self._size * 5 // 4), np.int64)
        self._data[: self._size] = values

    def __len__(self) -> int:
        return self._size

    @property
    def array(self) -> Ids:
        """The values as a view; stale after the next append."""
        return self._data[: self._size]

    def __getitem__(self, place: int) -> int:
        """The value at a place >= 0."""
        if place >= self._size:
            raise IndexError(place)
        return self._data.item(place)

    def append(self, value: int) -> None:
        self._reserve(1)
        self._data[self._size] = value
        self._size += 1

    def extend(self, values: Ids) -> None:
        self._reserve(len(values))
        self._data[self._size : self._size + len(values)] = values
        self._size += len(values)

    def _reserve(self, extra: int) -> None:
        if self._size + extra > len(self._data):
            grown = np.empty(max(2 * len(self._data), self._size + extra), np.int64)
            grown[: self._size] = self.array
            self._data = grown


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class Row:
    """State of one row. Only the runner changes it, between steps.

    Attributes:
        tokens: Prompt then output; the first `num_prompt_tokens` are prompt.
        blocks: The row's first block table. It grows in place, and becomes another object when an entry of any table is
            replaced, so that holders of copies notice. Entries of blocks no longer kept are -1.
        others: Its other block tables, all as long as the first.
        num_computed: Leading tokens whose K and V are in the cache.
        seed: 64-bit key of the random stream.
        choice: Which of the request's choices; keys the random stream too.
        processing: Changes to the row's logits before sampling; None for most rows.
        drafts: The drafter's state; None until it has seen the row.
        pooling: How to read its prompt; None if it generates.
        slot: Its adapter's, or NO_ADAPTER.
        domain: See `NewRow`.
        num_promised: Outputs at the end of `tokens` that the host does not know yet.
    """

    row_id: int
    tokens: Ints
    blocks: Ints
    num_prompt_tokens: int
    num_computed: int
    params: SamplingParams
    seed: int
    choice: int
    processing: Processing | None
    others: tuple[Ints, ...] = ()
    drafts: RowDrafts | None = None
    pooling: PoolingParams | None = None
    slot: int = NO_ADAPTER
    domain: str | None = None
    num_promised: int = 0

    @classmethod
    def of(
        cls,
        new: NewRow,
        tokens: Ids,
        blocks: Ids,
        matcher: Matcher | None = None,
        slot: int = NO_ADAPTER,
        others: Sequence[Ids] = (),
    ) -> Row:
        """The row that `new` describes; `tokens`, `blocks` and `others` are its lists, checked and as arrays, `matcher`
        is for its grammar, `slot` is its adapter's."""
        return cls(
            row_id=new.row_id,
            tokens=Ints(tokens),
            blocks=Ints(blocks),
            others=tuple(map(Ints, others)),
            num_prompt_tokens=new.num_prompt_tokens,
            num_computed=new.num_computed,
            params=new.params,
            seed=new.seed,
            choice=new.choice,
            pooling=new.pooling,
            slot=slot,
            domain=new.domain,
            processing=Processing.of(new.params, new.eos_token_ids, tokens, new.num_prompt_tokens, matcher),
        )

    @property
    def matcher(self) -> Matcher | None:
        """Its place in its grammar, if it has one."""
        return None if self.processing is None else self.processing.matcher

    @property
    def num_outputs(self) -> int:
        """Output tokens so far, which is also the position of the next one in the random stream."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def outputs(self) -> Ids:
        return self.tokens.array[self.num_prompt_tokens :]

    def append(self, token: int) -> None:
        """Append a sampled token as the row's next output."""
        self.tokens.append(token)
        if self.processing is not None:
            self.processing.count(token)

    def replace_block(self, place: int, index: int, block: int) -> None:
        """Change one entry of its table `place`, of which `blocks` is the first."""
        self.blocks = Ints(self.blocks.array)  # for holders of copies of any table
        (self.blocks, *self.others)[place].array[index] = block

    def promise(self) -> int:
        """Reserve an output that the host does not know yet, and return its place among the tokens."""
        self.tokens.append(0)
        self.num_promised += 1
        return len(self.tokens) - 1

    def fulfil(self, place: int, token: int) -> None:
        """Fill in the output that was promised at `place`."""
        self.tokens.array[place] = token
        self.num_promised -= 1
        if self.processing is not None:
            self.processing.count(token)
