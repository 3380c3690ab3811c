"""A step under construction: its remaining budget, its changes, and the checks that its result must pass.

Rows that need a single token (decodes) are promised it before any prompt chunk is granted, so a long prompt delays a
stream by the length of a step but never makes it skip one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from math import inf
from typing import NamedTuple

import msgspec

from pagoda_engine_core.scheduling.decoding import DecodingRows, News, apply_tokens, launch
from pagoda_engine_core.scheduling.kv_cache import Counts, Growth, KvCache
from pagoda_engine_core.scheduling.request import Choice
from pagoda_proto.channel import MAX_FRAME_BYTES
from pagoda_proto.decodes import changes
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.pooling.params import FLOAT_BYTES, MAX_POOLED_BYTES
from pagoda_proto.records import Pool
from pagoda_proto.steps import (
    MAX_KV_GROUPS,
    NO_TOKEN,
    AppendBlocks,
    Chunk,
    NewRow,
    ReplaceBlock,
    RowOutput,
    StepPlan,
    StepResult,
)

MESSAGE_BYTES = MAX_FRAME_BYTES * 3 // 4
"""Most bytes that rows may put into one plan or one result; the rest of the frame is for everything small."""
TOKEN_BYTES = 5 + MAX_KV_GROUPS
"""Most bytes of a token in a plan: its id, and its share of a block's ids and of a swap, in each group."""


def row_bytes(choice: Choice) -> int:
    """Bytes it takes in the plan that makes it a row."""
    return choice.num_tokens * TOKEN_BYTES + choice.request.row_bytes


class Budget:
    """Tokens of one step. `promised` of them belong to decodes that have not asked yet. Without a `chunk_size` prompts
    are granted whole or not at all, and one longer than a step gets a step to itself."""

    __slots__ = ("_chunk_size", "_promised", "_tokens", "_untouched")

    def __init__(self, tokens: int, chunk_size: int | None, promised: int) -> None:
        self._tokens = self._untouched = tokens
        self._chunk_size = chunk_size
        self._promised = promised

    @property
    def keeps_promises(self) -> bool:
        """Whether there is a token for every decode. If so, decodes need not ask for theirs in any order, or at all."""
        return self._promised <= self._tokens

    @property
    def left(self) -> int:
        """Tokens that are not promised."""
        return max(0, self._tokens - self._promised)

    def fits(self, wanted: int) -> bool:
        """Whether `grant` would grant anything now: some of `wanted`, or all of it without a `chunk_size`."""
        if self._chunk_size is None:
            return wanted <= self.left or self._tokens == self._untouched
        return self.left > 0

    def grant_promised(self) -> int:
        """Grant a decode its token; 0 if the tokens are used up."""
        self._promised -= 1
        return self._take(min(1, self._tokens))

    def grant(self, wanted: int) -> int:
        """Grant as much of `wanted` as fits, at most one chunk."""
        if self._chunk_size is None:
            return self._take(wanted if self.fits(wanted) else 0)
        return self._take(min(wanted, self._chunk_size, self.left))

    def grant_drafts(self, count: int) -> None:
        """Take `count` tokens for drafts. The caller has checked that they are `left`."""
        self._take(count)

    def _take(self, tokens: int) -> int:
        self._tokens -= tokens
        return tokens


def reports(choices: Iterable[Choice]) -> bool:
    """Whether a step with these reports prompt log-probabilities, and so computes the logits of all prompt tokens."""
    return any(choice.owes_prompt_logprobs for choice in choices)


class Flight(NamedTuple):
    """A plan whose result has not arrived: its decoding rows and its chunks.

    A choice whose `row_id` has changed since was finished, preempted or replayed; its part of the result is void.
    """

    step: int
    rows: DecodingRows
    chunks: list[tuple[Choice, Chunk]]

    @property
    def num_rows(self) -> int:
        return len(self.rows.row_ids) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens without drafts."""
        return len(self.rows.row_ids) + sum(chunk.num_tokens for _, chunk in self.chunks)

    @property
    def reports(self) -> bool:
        return reports(choice for choice, _ in self.chunks)

    def present(self) -> Iterator[Choice]:
        """Choices that still have the row of this plan."""
        yield from (
            choice
            for choice, row_id in zip(self.rows.choices, self.rows.row_ids, strict=True)
            if choice.row_id == row_id
        )
        yield from (choice for choice, chunk in self.chunks if choice.row_id == chunk.row_id)

    def tokens(self, result: StepResult) -> list[int]:
        """The token of each decoding row in `result`, or NO_TOKEN."""
        return result.tokens or [NO_TOKEN] * len(self.rows.row_ids)

    def apply(self, result: StepResult, kv: KvCache, news: News) -> Iterator[tuple[Choice, Chunk, RowOutput | None]]:
        """Take the tokens of decoding rows that need no more, and yield all other output, in order."""
        outputs = {output.row_id: output for output in result.outputs}
        for choice, row_id, token in apply_tokens(self.rows, self.tokens(result), kv, news):
            output = outputs.get(row_id) if token == NO_TOKEN else RowOutput(row_id, [token])
            yield choice, Chunk(row_id, choice.num_tokens - 1, 1, True), output
        for choice, chunk in self.chunks:
            if choice.row_id == chunk.row_id:
                yield choice, chunk, outputs.get(chunk.row_id)

    def check(self, result: StepResult) -> None:
        """Raises PagodaError PROTOCOL_ERROR, before anything changes, if `result` does not answer this plan."""
        if result.step != self.step:
            raise _protocol_error(f"result of step {self.step} expected, got {result.step}")
        outputs = {output.row_id: output for output in result.outputs}
        errors = {error.row_id for error in result.errors}
        if len(outputs) != len(result.outputs):
            raise _protocol_error(f"step {self.step} has two outputs for one row")
        for name, seconds in (("elapsed_s", result.elapsed_s), ("forward_s", result.forward_s)):
            if not 0 <= seconds < inf:
                raise _protocol_error(f"{name} of step {self.step} must be a time, got {seconds}")
        self._check_decodes(result, outputs, errors)
        for choice, chunk in self.chunks:
            if choice.row_id == chunk.row_id and chunk.row_id not in errors:
                _check_output(choice, chunk, outputs.get(chunk.row_id))

    def _check_decodes(self, result: StepResult, outputs: Mapping[int, RowOutput], errors: Set[int]) -> None:
        tokens = self.tokens(result)
        if len(tokens) != len(self.rows.row_ids):
            raise _protocol_error(f"{len(self.rows.row_ids)} rows decode in step {self.step}, got {len(tokens)} tokens")
        only_tokens = not outputs and min(tokens, default=0) >= 0
        for place in self.rows.talkative if only_tokens else range(len(tokens)):
            choice, row_id, token = self.rows.choices[place], self.rows.row_ids[place], tokens[place]
            if token != NO_TOKEN and row_id in outputs:
                raise _protocol_error(f"step {self.step} has two outputs for row {row_id}")
            if choice.row_id == row_id and row_id not in errors:
                output = outputs.get(row_id) if token == NO_TOKEN else RowOutput(row_id, [token])
                _check_output(choice, Chunk(row_id, 0, 1, True), output)


def _check_output(choice: Choice, chunk: Chunk, output: RowOutput | None) -> None:
    if choice.request.pools:
        _check_pooled(chunk, output or RowOutput(chunk.row_id, []))
        return
    if output is not None and output.pooled:
        raise _protocol_error(f"row {chunk.row_id} yields a vector, and was asked for tokens")
    token_ids = output.token_ids if output is not None else []
    num_drafted = output.num_drafted if output is not None else 0
    fits = chunk.sample <= len(token_ids) <= chunk.sample * (1 + num_drafted) and num_drafted <= chunk.num_drafts
    if not fits or (token_ids and min(token_ids) < 0):
        asked = f"{int(chunk.sample)} tokens" + f" and up to {chunk.num_drafts} drafts" * (chunk.num_drafts > 0)
        raise _protocol_error(f"row {chunk.row_id} must yield {asked}, got {token_ids}, {num_drafted} of them drafted")
    if not chunk.sample or output is None:
        return
    if output.num_drafts < 0:
        raise _protocol_error(f"row {chunk.row_id} has {output.num_drafts} drafts")
    wants = choice.request.params.logprobs is not None
    if wants and (output.logprobs is None or len(output.logprobs) != len(token_ids)):
        raise _protocol_error(f"row {chunk.row_id} must yield log-probabilities")
    if choice.request.search is not None and not all(one.top_ids for one in output.logprobs or ()):
        raise _protocol_error(f"row {chunk.row_id} must name what may follow")
    if choice.owes_prompt_logprobs:
        num_known = len(choice.request.prompt_logprobs) + len(output.prompt_logprobs or ())
        num_expected = choice.request.num_prompt_tokens - 1
        if num_known != num_expected:
            raise _protocol_error(f"row {chunk.row_id} yields {num_known} of {num_expected} prompt log-probabilities")


def _check_pooled(chunk: Chunk, output: RowOutput) -> None:
    size = len(output.pooled)
    if output.token_ids or bool(size) != chunk.sample or size % FLOAT_BYTES or size > MAX_POOLED_BYTES:
        asked = f"a vector of at most {MAX_POOLED_BYTES} bytes" if chunk.sample else "nothing yet"
        raise _protocol_error(f"row {chunk.row_id} must yield {asked}, got {output.token_ids} and {size} bytes")


def _protocol_error(message: str) -> PagodaError:
    return PagodaError(ErrorCode.PROTOCOL_ERROR, message)


class PlanBuilder:
    """Collects a StepPlan. `reserved_blocks`: free blocks, by group, that running rows still need for tokens they
    already have."""

    def __init__(self, budget: Budget, num_groups: int = 1) -> None:
        self.budget = budget
        self.reserved_blocks = [0] * num_groups
        self.preempted = False  # a choice had to give up its blocks
        self._new_rows: list[NewRow] = []
        self._bytes_left = MESSAGE_BYTES
        self._append_blocks: list[AppendBlocks] = []
        self._replace_blocks: list[ReplaceBlock] = []
        self._swap_ins: list[tuple[int, int]] = []
        self._block_copies: list[tuple[int, int]] = []
        self.decodes: list[Choice] = []  # running rows that compute one token, in order
        self._num_drafts: dict[int, int] = {}  # granted drafts, by row id
        self._last_tokens: list[tuple[Choice, Chunk]] = []  # one-token chunks of new rows
        self._chunks: list[tuple[Choice, Chunk]] = []

    @property
    def empty(self) -> bool:
        return not (self.decodes or self._last_tokens or self._chunks)

    def reserve(self, blocks: Counts) -> None:
        self.reserved_blocks = [one + other for one, other in zip(self.reserved_blocks, blocks, strict=True)]

    def takes(self, choice: Choice) -> bool:
        """Whether the row fits into the message. Rows that the worker knows always do; so does the first new row."""
        return choice.launched or not self._new_rows or row_bytes(choice) <= self._bytes_left

    def start_row(self, choice: Choice, growth: Growth, swap_ins: list[tuple[int, int]]) -> None:
        """Add `choice` as a new row. Its block tables travel with it, so only the copies of its growth are added."""
        self._swap_ins += swap_ins
        self._block_copies += growth.copies
        self._new_rows.append(_new_row(choice))
        self._bytes_left -= row_bytes(choice)

    def grow_row(self, choice: Choice, growth: Growth) -> None:
        """Add the growth of a running choice's tables; a row that the worker does not know yet starts with it."""
        row_id = choice.row_id
        if not choice.launched:
            self.start_row(choice, growth, [])
            return
        if growth.appended:
            self._append_blocks.append(AppendBlocks(row_id, growth.appended))
        if growth.replaced:
            self._replace_blocks += [ReplaceBlock(row_id, index, block) for index, block in growth.replaced]
            self._block_copies += growth.copies

    def compute(self, choice: Choice, num_tokens: int) -> None:
        """Let the row compute its next `num_tokens`, and sample if no tokens are left after them. Running rows with a
        single token are in `decodes` instead."""
        distance = choice.distance
        chunk = Chunk(choice.row_id, choice.num_computed, num_tokens, num_tokens == distance)
        (self._last_tokens if distance == 1 else self._chunks).append((choice, chunk))

    def allow_drafts(self, choice: Choice, num_drafts: int) -> None:
        """Grant drafts to a row of `decodes` whose tables have room for them."""
        self._num_drafts[choice.row_id] = num_drafts
        self.budget.grant_drafts(num_drafts)

    def launch(
        self, step: int, before: DecodingRows, finished_rows: list[int], swap_outs: list[tuple[int, int]]
    ) -> tuple[StepPlan, Flight]:
        """Finish the plan, and move its choices to where they will be once it is done. `before` are the decoding rows
        of the previous plan."""
        drafting = self._drafting()
        chunks = drafting + self._last_tokens + self._chunks
        for choice, chunk in chunks:
            choice.launched = True
            choice.num_computed += chunk.num_tokens
            choice.num_pending += chunk.sample
            choice.num_drafting += chunk.num_drafts
        rows, starts = launch([] if drafting else self.decodes, before)
        plan = StepPlan(
            step=step,
            finished_rows=finished_rows,
            new_rows=self._new_rows,
            append_blocks=self._append_blocks,
            replace_blocks=self._replace_blocks,
            swap_outs=swap_outs,
            swap_ins=self._swap_ins,
            block_copies=self._block_copies,
            decodes=changes(before.row_ids, rows.row_ids, starts),
            chunks=[chunk for _, chunk in chunks],
        )
        return plan, Flight(step, rows, chunks)

    def _drafting(self) -> list[tuple[Choice, Chunk]]:
        """A chunk for each decoding row of a step with drafts, since where it continues is known only afterwards."""
        if not self._num_drafts:
            return []
        for choice in self.decodes:
            choice.quiet_until = 0
        drafts = self._num_drafts
        return [(c, Chunk(c.row_id, c.num_computed, 1, True, drafts.get(c.row_id, 0))) for c in self.decodes]


def _new_row(choice: Choice) -> NewRow:
    request, params, task = choice.request, choice.request.params, choice.request.record.task
    if params.prompt_logprobs is not None and not choice.owes_prompt_logprobs:
        params = msgspec.structs.replace(params, prompt_logprobs=None)  # already reported, or reported by choice 0
    return NewRow(
        row_id=choice.row_id,
        token_ids=choice.tokens(0, choice.num_tokens),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed=choice.num_computed,
        block_ids=[block for table in choice.tables for block in table.ids],
        params=params,
        seed=task.seed,
        choice=choice.index,
        eos_token_ids=request.eos_token_ids,
        pooling=task.pooling if isinstance(task, Pool) else None,
        adapter=request.record.adapter,
        domain=request.record.cache_salt,
    )
