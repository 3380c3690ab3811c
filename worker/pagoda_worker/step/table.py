"""The rows a worker holds, and the one place that checks what a plan claims about them.

An invalid claim ends the row it concerns, with the reason, and touches no other row. Block ownership is not checked:
rows share blocks by design, and only the engine core knows which blocks may be written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

from pagoda_proto.adapters.files import AdapterError, AdapterGone
from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import MAX_SEED, ModelLimits, model_problems
from pagoda_proto.steps import NO_BLOCK, AppendBlocks, Chunk, KVGroup, NewRow, ReplaceBlock, RowError, StepPlan
from pagoda_worker.adapters.store import NO_ADAPTERS, Adapters
from pagoda_worker.grammars.compiling import NO_GRAMMARS, GrammarError, Grammars
from pagoda_worker.grammars.matching import Matcher
from pagoda_worker.rows.rows import Ids, Row
from pagoda_worker.rows.slots import NO_ADAPTER

MAX_CHOICE = 2**32 - 1
UNKNOWN_ROW = "the row is unknown to this worker"

C = TypeVar("C")
Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class RunnerFacts:
    """What a runner offers, as Hello states it. A row never has more than `max_model_len` computed tokens."""

    model_fingerprint: str
    numerics_id: str
    device: str
    vocab_size: int
    max_model_len: int
    kv_groups: tuple[KVGroup, ...]
    block_size: int
    max_rows: int
    max_tokens_per_step: int
    pools: tuple[str, ...] = ()
    pooled_width: int = 0
    max_adapters: int = 0

    @property
    def num_blocks(self) -> int:
        """Of all groups together."""
        return sum(group.num_blocks for group in self.kv_groups)


class BadClaim(ValueError):
    """A plan's claim about one row is invalid."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> None:
        super().__init__(message)
        self.code = code


class RowTable:
    """Rows by id, the errors of the current step, and which swap blocks are in use."""

    def __init__(self, facts: RunnerFacts, grammars: Grammars = NO_GRAMMARS, adapters: Adapters = NO_ADAPTERS) -> None:
        self._facts = facts
        self._adapters = adapters
        self._grammars = grammars
        self._rows: dict[int, Row] = {}
        self._errors: dict[int, RowError] = {}
        self._swapped: set[int] = set()
        self._blocks = spans(group.num_blocks for group in facts.kv_groups)
        self._swap_blocks = spans(group.num_swap_blocks for group in facts.kv_groups)

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        self._rows.clear()
        self._errors.clear()
        self._swapped.clear()

    def fail(self, row_id: int, code: ErrorCode, message: str) -> None:
        """Drop the row, and report the first reason given for it in this step."""
        self._rows.pop(row_id, None)
        self._errors.setdefault(row_id, RowError(row_id, code.value, message))

    def _fail_holders(self, moves: Pairs, code: ErrorCode, message: str) -> None:
        """Drop every row whose block table has a block that one of these (source, block) moves should have filled."""
        targets = [block for _, block in moves]
        lost = [[block - span.start for block in targets if block in span] for span in self._blocks]
        for row in list(self._rows.values()) if any(lost) else ():
            tables = (row.blocks, *row.others)
            if any(np.isin(table.array, blocks).any() for table, blocks in zip(tables, lost, strict=False)):
                self.fail(row.row_id, code, message)

    def take_errors(self) -> list[RowError]:
        errors, self._errors = list(self._errors.values()), {}
        return errors

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's changes to rows, in the order of `steps`. Its block moves come after them.

        Finishing an unknown row is no error: the worker dropped it before the engine core learnt of it.
        """
        for row_id in plan.finished_rows:
            self._rows.pop(row_id, None)
        for new in plan.new_rows:
            self._claim(new.row_id, self._add, new)
        for append in plan.append_blocks:
            self._claim(append.row_id, self._append_blocks, append)
        for replace in plan.replace_blocks:
            self._claim(replace.row_id, self._replace_block, replace)

    def swap_outs(self, plan: StepPlan) -> Pairs:
        """The swap-outs that can be made. The others harm no row until a block they should have saved is swapped in."""
        good, bad = _sorted_out(plan.swap_outs, self._blocks, self._swap_blocks)
        self._swapped.difference_update(swap_block for _, swap_block in bad)  # nothing to swap in from there
        self._swapped.update(swap_block for _, swap_block in good)
        return good

    def swap_ins(self, plan: StepPlan) -> Pairs:
        """The swap-ins that can be made after the plan's swap-outs; rows that need the others are dropped."""
        good, bad = _sorted_out(plan.swap_ins, self._swap_blocks, self._blocks)
        self._fail_holders(bad, ErrorCode.PROTOCOL_ERROR, "a block to be swapped in is out of range, or named twice")
        lost = [pair for pair in good if pair[0] not in self._swapped]
        self._fail_holders(lost, ErrorCode.INTERNAL, "a block to be swapped in was never swapped out")
        return [pair for pair in good if pair[0] in self._swapped] if lost else good

    def copies(self, plan: StepPlan) -> Pairs:
        """The block copies that can be made; rows that need the others are dropped."""
        good, bad = _sorted_out(plan.block_copies, self._blocks, self._blocks)
        self._fail_holders(bad, ErrorCode.PROTOCOL_ERROR, "a block copy is out of range, or two share a destination")
        return good

    def accept(self, chunks: Sequence[Chunk]) -> list[tuple[Row, Chunk]]:
        """The chunks that can be computed, each with its row; a row with two chunks in one step is dropped."""
        accepted: dict[int, tuple[Row, Chunk]] = {}
        budget = self._facts.max_tokens_per_step
        for chunk in chunks:
            try:
                if chunk.row_id in accepted:
                    raise BadClaim("the row has two chunks in one step")
                row = self._row(chunk.row_id)
                self._check_chunk(row, chunk, budget)
            except BadClaim as claim:
                accepted.pop(chunk.row_id, None)
                self.fail(chunk.row_id, claim.code, str(claim))
            else:
                accepted[chunk.row_id] = (row, chunk)
                budget -= chunk.num_tokens + chunk.num_drafts
        return list(accepted.values())

    def _claim(self, row_id: int, take: Callable[[C], None], claim: C) -> None:
        try:
            take(claim)
        except BadClaim as bad:
            self.fail(row_id, bad.code, str(bad))

    def _row(self, row_id: int) -> Row:
        row = self._rows.get(row_id)
        if row is None:
            raise BadClaim(UNKNOWN_ROW)
        return row

    def _add(self, new: NewRow) -> None:
        if new.row_id in self._rows:
            raise BadClaim("the row is already on this worker")
        if len(self._rows) >= self._facts.max_rows:
            raise BadClaim(f"the worker holds at most {self._facts.max_rows} rows")
        self._rows[new.row_id] = self._checked_row(new)

    def _checked_row(self, new: NewRow) -> Row:
        tokens = _ids("token_ids", new.token_ids, self._facts.vocab_size)
        _ids("eos_token_ids", new.eos_token_ids, self._facts.vocab_size)
        if not 1 <= new.num_prompt_tokens <= len(tokens):
            raise BadClaim(f"num_prompt_tokens={new.num_prompt_tokens} does not fit {len(tokens)} tokens")
        if not 0 <= new.num_computed < len(tokens):
            raise BadClaim(f"num_computed={new.num_computed} does not fit {len(tokens)} tokens")
        if not (0 <= new.seed <= MAX_SEED and 0 <= new.choice <= MAX_CHOICE):
            raise BadClaim(f"seed {new.seed} or choice {new.choice} is out of range")
        if (new.pooling is not None) != bool(self._facts.pools):
            raise BadClaim(
                "the request does not match the model: one generates, the other pools", ErrorCode.INVALID_ARGUMENT
            )
        limits = ModelLimits(self._facts.vocab_size, self._facts.max_model_len)
        problems = model_problems(new.params, [0], limits)
        if problems:
            raise BadClaim(f"{problems[0].param}: {problems[0].message}", ErrorCode.INVALID_ARGUMENT)
        matcher = self._matcher(new, tokens) if new.params.grammar else None
        first, *others = self._tables(new.block_ids, new.num_computed) or [tokens[:0]]
        return Row.of(new, tokens, first, matcher, self._slot(new), others)

    def _slot(self, new: NewRow) -> int:
        if new.adapter is None:
            return NO_ADAPTER
        try:
            return self._adapters.slot(new.adapter, {row.slot for row in self._rows.values()})
        except AdapterError as error:
            code = ErrorCode.ADAPTER_UNAVAILABLE if isinstance(error, AdapterGone) else ErrorCode.INVALID_ARGUMENT
            raise BadClaim(f"adapter: {error}", code) from error

    def _matcher(self, new: NewRow, tokens: Ids) -> Matcher:
        try:
            return self._grammars.matcher(new.params.grammar, new.eos_token_ids, tokens[new.num_prompt_tokens :])
        except GrammarError as error:
            raise BadClaim(f"grammar: {error}", ErrorCode.INVALID_ARGUMENT) from error

    def _append_blocks(self, append: AppendBlocks) -> None:
        row = self._row(append.row_id)
        for table, block_ids in zip((row.blocks, *row.others), self._tables(append.block_ids), strict=True):
            table.extend(block_ids)

    def _replace_block(self, replace: ReplaceBlock) -> None:
        row = self._row(replace.row_id)
        if not 0 <= replace.index < len(row.blocks):
            raise BadClaim(f"block {replace.index} cannot be replaced: the row has {len(row.blocks)}")
        block = int(_ids("block_ids", [replace.block_id], self._facts.num_blocks)[0])
        place = next(place for place, span in enumerate(self._blocks) if block in span)
        row.replace_block(place, replace.index, block - self._blocks[place].start)

    def _tables(self, values: Sequence[int], num_computed: int = 0) -> list[Ids]:
        """The block table of each group, in the group's own numbering; see `group` in `steps`. Only blocks that a row
        continuing from `num_computed` does not read may be missing."""
        count = len(self._blocks)
        if len(values) % max(1, count):
            raise BadClaim(f"block_ids: {len(values)} do not divide evenly into {count} groups")
        size = len(values) // max(1, count)
        parts = [values[place * size : (place + 1) * size] for place in range(count)]
        groups = zip(parts, self._blocks, self._facts.kv_groups, strict=True)
        unread = [max(0, num_computed - group.kept) // self._facts.block_size for group in self._facts.kv_groups]
        return [
            _blocks_of(part, span, most if group.kept else 0)
            for (part, span, group), most in zip(groups, unread, strict=True)
        ]

    def _check_chunk(self, row: Row, chunk: Chunk, budget: int) -> None:
        end, known = chunk.start + chunk.num_tokens, len(row.tokens)
        if chunk.num_tokens < 1 or chunk.start != row.num_computed or end > known:
            raise BadClaim(
                f"tokens {chunk.start} to {end} cannot be next: {row.num_computed} of {known} tokens are computed"
            )
        if chunk.sample and end != known:
            raise BadClaim(f"token {end} is known already and cannot be sampled")
        if end > self._facts.max_model_len:
            raise BadClaim(f"{end} tokens exceed the context of {self._facts.max_model_len}")
        if not self._facts.num_blocks and (chunk.start or not chunk.sample or chunk.num_drafts):
            raise BadClaim(f"tokens {chunk.start} to {end} are not a whole prompt, which this model needs")
        if self._facts.num_blocks and end > len(row.blocks) * self._facts.block_size:
            raise BadClaim(f"{len(row.blocks)} blocks do not hold {end} tokens")
        if chunk.num_drafts < 0 or (chunk.num_drafts and not chunk.sample):
            raise BadClaim(f"{chunk.num_drafts} drafts cannot follow a chunk with sample={chunk.sample}")
        room = min(self._facts.max_model_len, len(row.blocks) * self._facts.block_size)
        if chunk.num_drafts and end + chunk.num_drafts > room:
            raise BadClaim(f"{chunk.num_drafts} drafts after {end} tokens do not fit into context and blocks")
        if chunk.num_tokens + chunk.num_drafts > budget:
            raise BadClaim(f"a step computes at most {self._facts.max_tokens_per_step} tokens")


def spans(counts: Iterable[int]) -> list[range]:
    """The range of block ids of each group, given the number of blocks of each."""
    return [range(*pair) for pair in pairwise(accumulate(counts, initial=0))]


def _blocks_of(values: Sequence[int], span: range, most_lacking: int) -> Ids:
    """A table in the group's own numbering, with -1 for the blocks missing at its start."""
    lacking = next((place for place, block in enumerate(values[:most_lacking]) if block != NO_BLOCK), most_lacking)
    lacking = min(lacking, len(values))
    ids = _ids("block_ids", values[lacking:], span.stop)
    if len(ids) and ids.min() < span.start:
        raise BadClaim(f"block_ids must be between {span.start} and {span.stop - 1}")
    return np.concatenate((np.full(lacking, NO_BLOCK), ids - span.start)) if lacking else ids - span.start


def _sorted_out(pairs: Pairs, sources: Sequence[range], targets: Sequence[range]) -> tuple[Pairs, Pairs]:
    """The (source, target) pairs that can be moved, and those that cannot: out of range, across groups, or with a
    target named more than once."""
    if not pairs:
        return [], []
    times = Counter(target for _, target in pairs)
    ways = list(zip(sources, targets, strict=True))
    good: list[tuple[int, int]] = []
    bad: list[tuple[int, int]] = []
    for source, target in pairs:
        inside = any(source in one and target in other for one, other in ways)
        fits = inside and times[target] == 1
        (good if fits else bad).append((source, target))
    return good, bad


def _ids(name: str, values: Sequence[int], limit: int) -> Ids:
    """`values` as an array; raises BadClaim unless all are in [0, limit)."""
    try:
        ids = np.array(values, np.int64)
    except OverflowError:
        raise BadClaim(f"{name}: a value is out of range") from None
    if len(ids) and (ids.min() < 0 or ids.max() >= limit):
        raise BadClaim(f"{name} must be between 0 and {limit - 1}")
    return ids
