"""The tests' fakes: a runner that executes step plans without tensors, and the outputs it must produce.

    FakeModel        next token = hash of (every token before it, seed, choice) mod vocabulary
    FakeRunner       executes StepPlans on that model, exactly as the contract in `pagoda_proto.steps` says
    reference_*      the same tokens computed directly from a record: no scheduler, no blocks, no steps
    ManualClock      a clock that the test advances

FakeRunner models the KV cache: every cell of every block holds the hash of the row's tokens up to that position. A
chunk writes its cells, then every cell of the row's block tables up to the chunk's end (for a group with a window, the
cells in the window) is compared with its expected value. A block allocated twice, a missing copy-on-write, a wrong
prefix hit, or a block freed too early or swapped in from the wrong place therefore fails in the step that would have
read the wrong KV, rather than showing up as a strange token much later. Breaches of the contract raise ContractBroken.
A failing row leaves tainted cells. Another row (a sibling forked before the failure is known) may read them, but then
samples wrong tokens, so output that used them would differ from the reference.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import msgspec

from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.decodes import DecodeList, packed
from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams
from pagoda_proto.pooling.params import PoolingParams
from pagoda_proto.records import Delta, FinishReason, Generate, Pool, RequestRecord, Tokens
from pagoda_proto.steps import (
    NO_BLOCK,
    Chunk,
    KVGroup,
    NewRow,
    RowError,
    RowOutput,
    StepPlan,
    StepResult,
    TopLogprobs,
)

MASK64 = 2**64 - 1
EMPTY_PREFIX = 0x9E3779B97F4A7C15
TAINTED = -1
REJECTED = -2
_ids = itertools.count()


class ContractBroken(AssertionError):
    """No worker could have executed this plan correctly."""


def mix(left: int, right: int) -> int:
    """Hash two integers into 64 bits (splitmix64's finaliser)."""
    value = ((left ^ 0xD6E8FEB86659FD93) * 0x9E3779B97F4A7C15 + right + 1) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def prefix_hashes(token_ids: Sequence[int], adapter: Adapter | None = None) -> list[int]:
    """hashes[i] covers the adapter and token_ids[: i + 1]."""
    initial = EMPTY_PREFIX if adapter is None else mix(EMPTY_PREFIX, int(adapter.digest[:8], 16))
    return list(itertools.accumulate(token_ids, mix, initial=initial))[1:]


@dataclass(frozen=True)
class FakeModel:
    """Decides the sampled tokens. At output position `eos_at` it samples the record's first end-of-sequence id."""

    vocab_size: int = 256
    eos_at: int | None = None

    def next_token(self, prefix: int, row: NewRow, position: int) -> int:
        """The token at output `position` of a row whose tokens so far hash to `prefix`."""
        params = row.params
        banned = {*row.eos_token_ids, *params.stop_token_ids} if position < params.min_tokens else set()
        if position == self.eos_at and row.eos_token_ids and row.eos_token_ids[0] not in banned:
            return row.eos_token_ids[0]
        candidates = params.allowed_token_ids or range(self.vocab_size)
        start = mix(mix(prefix, row.seed), row.choice) % len(candidates)
        for offset in range(len(candidates)):
            token = candidates[(start + offset) % len(candidates)]
            if token not in banned:
                return token
        return candidates[start]

    def logprobs(self, prefix: int, token: int, count: int) -> TopLogprobs:
        """Made-up but reproducible log-probabilities of `token` after `prefix`; `count` alternatives, best first."""
        top_ids = [(token + i) % self.vocab_size for i in range(min(count, self.vocab_size))]
        best = -0.001 * (mix(prefix, token) % 1000)
        return TopLogprobs(best, 1, top_ids, [best - i for i in range(len(top_ids))])


@dataclass
class FakeRow:
    new: NewRow
    token_ids: list[int]
    hashes: list[int]
    tables: list[list[int]]  # one block table per KV group
    num_computed: int
    tainted: bool = False

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.new.num_prompt_tokens

    def append(self, token: int) -> None:
        self.hashes.append(mix(self.hashes[-1], token))
        self.token_ids.append(token)


@dataclass
class FakeRunner:
    """Executes plans in order. Poisoned rows (`poison_token_id` in the prompt) fail with RowError(`poison_code`) once
    they have `poison_at` outputs. `verify=False` skips the KV comparison, for measurements.

    `hint` gives how many draft tokens a row could propose; `accept` gives how many of the allowed ones are accepted.
    Rejected drafts leave cells that must never be read as computed.
    """

    num_blocks: int = 64
    block_size: int = 4
    model: FakeModel = field(default_factory=FakeModel)
    max_rows: int = 256
    max_tokens_per_step: int = 8192
    max_adapters: int = 0
    poison_token_id: int | None = None
    poison_code: str = ErrorCode.NUMERICAL_ERROR.value
    poison_at: int = 0
    num_swap_blocks: int = 0
    kv_groups: tuple[KVGroup, ...] = ()  # replaces both numbers for several groups, or a window
    verify: bool = True
    hint: Callable[[FakeRow], int] = lambda row: 0
    accept: Callable[[FakeRow, int], int] = lambda row, allowed: 0
    rows: dict[int, FakeRow] = field(default_factory=dict)
    failed_rows: dict[int, FakeRow] = field(default_factory=dict)
    steps_done: int = 0
    tokens_computed: int = 0

    def __post_init__(self) -> None:
        if not self.kv_groups and self.num_blocks:
            self.kv_groups = (KVGroup(self.num_blocks, num_swap_blocks=self.num_swap_blocks),)
        ends = [0, *accumulate(group.num_blocks for group in self.kv_groups)]
        swap_ends = [0, *accumulate(group.num_swap_blocks for group in self.kv_groups)]
        self._ranges = [range(*pair) for pair in pairwise(ends)]  # of block ids, by group
        self._swap_ranges = [range(*pair) for pair in pairwise(swap_ends)]
        self._cells: dict[int, int] = {}  # block * block_size + offset -> hash of the prefix up to there
        self._swapped: dict[int, int] = {}  # the same for swap blocks
        self._decodes = DecodeList()
        self._row_ids: set[int] = set()  # every id ever used

    def execute(self, plan: StepPlan) -> StepResult:
        """One step, in the order the contract gives: drop, add, append, swap out, swap in, copy, compute, sample."""
        self._require(plan.step == self.steps_done + 1, f"step {plan.step} after {self.steps_done}")
        self._require(plan.num_tokens <= self.max_tokens_per_step, f"{plan.num_tokens} tokens in one step")
        for row_id in plan.finished_rows:
            if row_id not in self.failed_rows:  # planned before the engine core knew of the failure
                self._require(row_id in self.rows, f"finished row {row_id} is not here")
                del self.rows[row_id]
        for new in plan.new_rows:
            self._add(new)
        self._require(len(self.rows) <= self.max_rows, f"{len(self.rows)} rows at once")
        adapters = {row.new.adapter for row in self.rows.values()} - {None}
        self._require(len(adapters) <= self.max_adapters, f"{len(adapters)} adapters at once")
        self._change_tables(plan)
        self._check_pairs(plan.swap_outs, self._ranges, self._swap_ranges)
        self._check_pairs(plan.swap_ins, self._swap_ranges, self._ranges)
        self._check_pairs(plan.block_copies, self._ranges, self._ranges)
        self._move(plan.swap_outs, self._cells, self._swapped)
        self._move(plan.swap_ins, self._swapped, self._cells)
        self._copy_blocks(plan)
        planned = self._decodes.chunks(plan)
        self._require(len({chunk.row_id for chunk in planned}) == len(planned), "a row is planned twice")
        errors = self._fail_poisoned(planned)
        for chunk in planned:
            self._write(chunk)
        chunks = [chunk for chunk in planned if chunk.row_id not in self.failed_rows]
        for chunk in chunks:
            self._check_prefix(chunk)
        outputs = [output for chunk in chunks if (output := self._output(chunk)) is not None]
        self.steps_done += 1
        tokens, outputs = packed([chunk.row_id for chunk in planned[: plan.decodes.count]], outputs)
        return StepResult(step=plan.step, tokens=tokens, outputs=outputs, errors=errors)

    def _add(self, new: NewRow) -> None:
        self._require(new.row_id not in self._row_ids, f"row id {new.row_id} used before")
        self._row_ids.add(new.row_id)
        self._require(0 <= new.num_computed < len(new.token_ids), f"row {new.row_id} has nothing to compute")
        self._require(0 < new.num_prompt_tokens <= len(new.token_ids), f"row {new.row_id} has a bad prompt length")
        tokens = list(new.token_ids)
        tables = self._apart(new.block_ids)
        self.rows[new.row_id] = FakeRow(new, tokens, prefix_hashes(tokens, new.adapter), tables, new.num_computed)
        self._check_table(self.rows[new.row_id])

    def _change_tables(self, plan: StepPlan) -> None:
        for append in plan.append_blocks:
            for table, block_ids in zip(self._row(append.row_id).tables, self._apart(append.block_ids), strict=True):
                table.extend(block_ids)
            self._check_table(self._row(append.row_id))
        for replace in plan.replace_blocks:
            places = [place for place, ids in enumerate(self._ranges) if replace.block_id in ids]
            self._require(len(places) == 1, "block id out of range")
            self._row(replace.row_id).tables[places[0]][replace.index] = replace.block_id
            self._check_table(self._row(replace.row_id))

    def _copy_blocks(self, plan: StepPlan) -> None:
        sources = {source for source, _ in plan.block_copies}
        destinations = [destination for _, destination in plan.block_copies]
        self._require(len(set(destinations)) == len(destinations), "a block is copied to twice")
        self._require(sources.isdisjoint(destinations), "a block is copied from and to in one step")
        self._move(plan.block_copies, self._cells, self._cells)

    def _apart(self, block_ids: list[int]) -> list[list[int]]:
        """Split into one list per group; every group has equally many."""
        size, rest = divmod(len(block_ids), max(1, len(self.kv_groups)))
        self._require(not rest, f"{len(block_ids)} blocks for {len(self.kv_groups)} groups")
        return [block_ids[place * size : (place + 1) * size] for place in range(len(self.kv_groups))]

    def _check_pairs(self, pairs: list[tuple[int, int]], sources: list[range], destinations: list[range]) -> None:
        """Require that both blocks of a pair belong to the same group and that no destination repeats."""
        ways = list(zip(sources, destinations, strict=True))
        self._require(all(any(a in s and b in d for s, d in ways) for a, b in pairs), "a swap is out of range")
        self._require(len({b for _, b in pairs}) == len(pairs), "a block is swapped to twice")

    def _move(self, pairs: list[tuple[int, int]], sources: dict[int, int], destinations: dict[int, int]) -> None:
        for source, destination in pairs:
            for offset in range(self.block_size):
                cell = sources.get(source * self.block_size + offset)
                destinations.pop(destination * self.block_size + offset, None)
                if cell is not None:
                    destinations[destination * self.block_size + offset] = cell

    def _fail_poisoned(self, chunks: list[Chunk]) -> list[RowError]:
        errors = []
        for chunk in chunks:
            row = self.rows.get(chunk.row_id)
            if row is None or self.poison_token_id not in row.new.token_ids[: row.new.num_prompt_tokens]:
                continue
            if row.num_outputs >= self.poison_at:
                row.tainted = True
                self.failed_rows[chunk.row_id] = self.rows.pop(chunk.row_id)
                errors.append(RowError(chunk.row_id, self.poison_code, "poisoned prompt"))
        return errors

    def _write(self, chunk: Chunk) -> None:
        row = self._row(chunk.row_id)
        end = chunk.start + chunk.num_tokens
        last = end + chunk.num_drafts
        self._require(chunk.num_tokens > 0, f"row {chunk.row_id}: empty chunk")
        self._require(chunk.start == row.num_computed, f"row {chunk.row_id}: chunk at {chunk.start}")
        if not self.kv_groups:
            self._write_nothing(row, chunk)
            return
        held = min(map(len, row.tables)) * self.block_size
        self._require(last <= held, f"row {chunk.row_id}: chunk beyond its blocks")
        self._require(chunk.sample or not chunk.num_drafts, f"row {chunk.row_id}: drafts without a sample")
        if chunk.row_id not in self.failed_rows:
            self._require(end <= len(row.token_ids), f"row {chunk.row_id}: chunk beyond the known tokens")
            self._require(not chunk.sample or end == len(row.token_ids), f"row {chunk.row_id}: sampling too early")
            self.tokens_computed += chunk.num_tokens
        for position in range(chunk.start, end):
            self._keep(row, position, TAINTED if row.tainted else row.hashes[position])
        for position in range(end, last):
            self._keep(row, position, REJECTED)
        row.num_computed = end

    def _keep(self, row: FakeRow, position: int, value: int) -> None:
        for table in row.tables:
            block = table[position // self.block_size]
            self._require(block != NO_BLOCK, f"row {row.new.row_id}: nowhere to write {position}")
            self._cells[block * self.block_size + position % self.block_size] = value

    def _write_nothing(self, row: FakeRow, chunk: Chunk) -> None:
        """Without blocks there is no KV cache, so a prompt must be computed in one chunk."""
        whole = not chunk.start and chunk.num_tokens == len(row.token_ids) and chunk.sample
        self._require(whole, f"row {chunk.row_id}: a part of a prompt, and nothing is kept of the rest")
        self.tokens_computed += chunk.num_tokens
        row.num_computed = chunk.num_tokens

    def _check_prefix(self, chunk: Chunk) -> None:
        if not self.verify:
            return
        row = self._row(chunk.row_id)
        for group, table in zip(self.kv_groups, row.tables, strict=True):
            first = max(0, chunk.start - group.kept) if group.kept else 0
            for position in range(first, row.num_computed):
                block = table[position // self.block_size]
                cell = self._cells.get(block * self.block_size + position % self.block_size)
                row.tainted |= cell == TAINTED
                sound = row.tainted or cell == row.hashes[position]
                self._require(sound, f"row {chunk.row_id}: wrong KV at {position}, block {block}")

    def _output(self, chunk: Chunk) -> RowOutput | None:
        row = self._row(chunk.row_id)
        if row.new.pooling is not None:
            return RowOutput(chunk.row_id, [], pooled=pooled_of(row.token_ids)) if chunk.sample else None
        prompt_logprobs = self._prompt_logprobs(row, chunk)
        if not chunk.sample:
            return None if prompt_logprobs is None else RowOutput(chunk.row_id, [], None, prompt_logprobs)
        accepted = self.accept(row, chunk.num_drafts)
        self._require(0 <= accepted <= chunk.num_drafts, "the test accepts drafts that there are not")
        count, tokens, logprobs = row.new.params.logprobs, [], []
        for _ in range(1 + accepted):
            prefix = row.hashes[-1]
            token = self.model.next_token(prefix, row.new, row.num_outputs)
            if row.tainted:
                token = (token + 1) % self.model.vocab_size
            tokens.append(token)
            if count is not None:
                logprobs.append(self.model.logprobs(prefix, token, count))
            row.append(token)
        for position in range(row.num_computed, row.num_computed + accepted):
            self._keep(row, position, TAINTED if row.tainted else row.hashes[position])
        row.num_computed += accepted
        reported = None if count is None else logprobs
        return RowOutput(chunk.row_id, tokens, reported, prompt_logprobs, chunk.num_drafts, self.hint(row))

    def _prompt_logprobs(self, row: FakeRow, chunk: Chunk) -> list[TopLogprobs] | None:
        count = row.new.params.prompt_logprobs
        if count is None or chunk.start >= row.new.num_prompt_tokens:
            return None
        end = min(chunk.start + chunk.num_tokens, row.new.num_prompt_tokens - 1)
        return [self.model.logprobs(row.hashes[i], row.token_ids[i + 1], count) for i in range(chunk.start, end)]

    def _row(self, row_id: int) -> FakeRow:
        row = self.rows.get(row_id) or self.failed_rows.get(row_id)
        if row is None:
            raise ContractBroken(f"row {row_id} is not here")
        return row

    def _check_table(self, row: FakeRow) -> None:
        for group, ids, table in zip(self.kv_groups, self._ranges, row.tables, strict=True):
            first = max(0, row.num_computed - group.kept) if group.kept else 0  # earlier ones may be reused
            held = table[first // self.block_size :]
            self._require(len(set(held)) == len(held), f"row {row.new.row_id}: a block twice in its table")
            self._require(all(block in ids for block in held), "block id out of range")

    @staticmethod
    def _require(condition: bool, message: str) -> None:
        if not condition:
            raise ContractBroken(message)


def pooled_of(token_ids: Sequence[int]) -> bytes:
    """The pooled result of a prompt in this fake: two numbers that identify the prompt."""
    last = prefix_hashes(token_ids)[-1]
    return struct.pack("<2f", last % 65_521, last // 65_521 % 65_521)


class ReferenceChoice(NamedTuple):
    token_ids: list[int]
    finish_reason: FinishReason
    stop_token_id: int | None


def reference_outputs(
    record: RequestRecord, model: FakeModel | None = None, *, max_output_tokens: int | None = None
) -> list[ReferenceChoice]:
    """The expected output of every choice of `record`, computed directly.

    Raises:
        ValueError: the record has no max_tokens, and no `max_output_tokens` is given.
    """
    limit = max_output_tokens if max_output_tokens is not None else record.task.params.max_tokens
    if limit is None:
        raise ValueError("give max_output_tokens: the record has no max_tokens")
    return [_reference_choice(record, model or FakeModel(), limit, choice) for choice in range(record.task.params.n)]


def reference_tokens(
    record: RequestRecord, model: FakeModel | None = None, *, max_output_tokens: int | None = None
) -> list[list[int]]:
    """Output token ids per choice; see `reference_outputs`."""
    outputs = reference_outputs(record, model, max_output_tokens=max_output_tokens)
    return [choice.token_ids for choice in outputs]


def _reference_choice(record: RequestRecord, model: FakeModel, limit: int, choice: int) -> ReferenceChoice:
    params = record.task.params
    eos = () if params.ignore_eos else record.task.eos_token_ids
    row = NewRow(
        row_id=0, token_ids=[], num_prompt_tokens=0, num_computed=0, block_ids=[], params=params, seed=record.task.seed,
        choice=choice, eos_token_ids=eos,
    )  # fmt: skip
    prefix = prefix_hashes(record.prompt_token_ids, record.adapter)[-1]
    output: list[int] = []
    while len(output) < limit:
        token = model.next_token(prefix, row, len(output))
        prefix = mix(prefix, token)
        output.append(token)
        if token in (*eos, *params.stop_token_ids) and len(output) > params.min_tokens:
            return ReferenceChoice(output, FinishReason.STOP, token)
    return ReferenceChoice(output, FinishReason.LENGTH, None)


def make_record(
    prompt: Sequence[int] = (1, 2, 3, 4, 5),
    *,
    request_id: str | None = None,
    seed: int = 0,
    eos_token_ids: tuple[int, ...] = (),
    cache_salt: str = "",
    priority: int = 0,
    queue_timeout_s: float = 0.0,
    tenant: str = "",
    weight: int = 1,
    adapter: Adapter | None = None,
    **params: Any,
) -> RequestRecord:
    """A record with a fresh id; further keywords are SamplingParams (max_tokens is 8 unless given)."""
    return RequestRecord(
        request_id=request_id or f"request-{next(_ids)}",
        prompt_token_ids=list(prompt),
        task=Generate(params=SamplingParams(**({"max_tokens": 8} | params)), seed=seed, eos_token_ids=eos_token_ids),
        cache_salt=cache_salt,
        priority=priority,
        queue_timeout_s=queue_timeout_s,
        tenant=tenant,
        weight=weight,
        adapter=adapter,
    )


def make_pool_record(prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> RequestRecord:
    """A pooling record; keywords are PoolingParams or fields of the record."""
    record = make_record(prompt, **{name: fields.pop(name) for name in RECORD_FIELDS if name in fields})
    return msgspec.structs.replace(record, task=Pool(pooling=PoolingParams(**fields)))


RECORD_FIELDS = ("request_id", "cache_salt", "priority", "queue_timeout_s")


def make_delta(
    first_index: int = 0, token_ids: Sequence[int] = (), *, request_id: str = "r", choice: int = 0, **fields: Any
) -> Delta:
    """A delta of a generation; further keywords are fields of Tokens or of Delta."""
    of_tokens = {name: fields.pop(name) for name in Tokens.__struct_fields__ if name in fields}
    tokens = Tokens(first_index=first_index, token_ids=list(token_ids), **of_tokens)
    return Delta(request_id=request_id, choice=choice, result=tokens, **fields)


class ManualClock:
    """Call it for the time in seconds; `advance` moves it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        self.now += seconds
        return self.now
