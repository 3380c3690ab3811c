"""Rows swapped in from host memory continue as if they had never left, to the last bit."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.fakes_accelerator import FakeAccelerator
from tests.worker.fakes_model import (
    BLOCK_SIZE,
    KV_SHAPE,
    NUM_BLOCKS,
    FakeLoaded,
    FakeModel,
    FakeOps,
    fake_runner,
    new_row,
)
from tests.worker.speculation.test_drafting import Allowing, draft_model, plain, speculating
from tests.worker.step.test_runner import MANNERS, tiny_llama, tokens_of

from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import AppendBlocks, Chunk, KVGroup, NewRow, RowOutput, StepPlan, StepResult
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.kernels.kv_cache import Blocks
from pagoda_worker.loading.memory import GIB, NotEnoughMemory
from pagoda_worker.step import moving
from pagoda_worker.step.moving import BlockMover, SwapSpace
from pagoda_worker.step.pending import Pending
from pagoda_worker.step.runner import LostStep, ModelRunner

NUM_SWAP_BLOCKS = 12
SWAP_SPACE_GIB = NUM_SWAP_BLOCKS * KV_SHAPE.bytes_per_block(BLOCK_SIZE) / GIB  # for the fake model
PROMPT = [(7 * i + 3) % 400 for i in range(37)]
OTHER = [(11 * i + 5) % 400 for i in range(44)]


# --- one row, on every back end --------------------------------------------------------------------------------------


def llama(kernels: str, cache: str) -> ModelRunner:
    return tiny_llama(kernels, kv_cache_dtype=cache, swap_space_gib=0.001)


RUNNERS: dict[str, Callable[[], ModelRunner]] = {
    "fake": lambda: fake_runner(swap_space_gib=SWAP_SPACE_GIB),
    **{
        f"{kernels} {cache}": (lambda kernels=kernels, cache=cache: llama(kernels, cache))  # type: ignore[misc]
        for kernels in ("reference", "torch", *(["native"] if LIBRARY.exists() else []))
        for cache in ("auto", "int8")
    },
}


def decode(runner: ModelRunner, step: int, row_id: int, start: int, count: int) -> list[RowOutput]:
    """Run `count` decode steps of one row from token `start` on, in blocks that it has; the first plan is `step`."""
    plans = (StepPlan(step=step + i, chunks=[Chunk(row_id, start + i, 1, True)]) for i in range(count))
    results = [runner.execute(plan) for plan in plans]
    assert [result.errors for result in results] == [[]] * count
    return [result.outputs[0] for result in results]


def begin(runner: ModelRunner, blocks: list[int], params: SamplingParams) -> list[RowOutput]:
    """Run the prompt of row 1 and two more tokens; 39 tokens are then computed, and the 40th is known."""
    row = new_row(1, PROMPT, blocks, params=params)
    result = runner.execute(StepPlan(step=1, new_rows=[row], chunks=[Chunk(1, 0, len(PROMPT), True)]))
    return [*result.outputs, *decode(runner, 2, 1, len(PROMPT), 2)]


def content(outputs: Sequence[RowOutput]) -> list[Any]:
    """Everything except the row's id: it must be equal to the last bit."""
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.mark.parametrize("manner", MANNERS[:3])
@pytest.mark.parametrize("make", RUNNERS.values(), ids=RUNNERS)
def test_a_swapped_row_goes_on_with_the_same_bits(make: Callable[[], ModelRunner], manner: dict[str, Any]) -> None:
    """The plan that swaps it out gives its blocks to another row, and it comes back in other blocks."""
    params = SamplingParams(**manner)
    undisturbed = make()
    expected = begin(undisturbed, [0, 1, 2, 3], params) + decode(undisturbed, 4, 1, len(PROMPT) + 2, 6)

    runner = make()
    outputs = begin(runner, [0, 1, 2, 3], params)
    known = PROMPT + tokens_of(outputs)
    taken = runner.execute(
        StepPlan(
            step=4,
            finished_rows=[1],
            new_rows=[new_row(2, OTHER, [2, 1, 0])],
            swap_outs=[(0, 3), (1, 0), (2, 5)],
            chunks=[Chunk(2, 0, len(OTHER), True)],
        )
    )
    assert taken.errors == []
    back = new_row(3, known, [7, 4, 9, 8], num_prompt_tokens=len(PROMPT), num_computed=len(known) - 1, params=params)
    resumed = runner.execute(
        StepPlan(
            step=5,
            new_rows=[back],
            swap_ins=[(3, 7), (0, 4), (5, 9)],
            chunks=[Chunk(2, len(OTHER), 1, True), Chunk(3, len(known) - 1, 1, True)],
        )
    )
    assert resumed.errors == []
    outputs += [output for output in resumed.outputs if output.row_id == 3]
    outputs += decode(runner, 6, 3, len(known), 5)
    assert content(outputs) == content(expected)

    again = make()  # recomputed, as without swap space
    row = new_row(4, known, [0, 1, 2, 3], num_prompt_tokens=len(PROMPT), params=params)
    first = again.execute(StepPlan(step=1, new_rows=[row], chunks=[Chunk(4, 0, len(known), True)]))
    recomputed = [*first.outputs, *decode(again, 2, 4, len(known), 5)]
    assert tokens_of(recomputed) == tokens_of(expected[3:])


def test_the_draft_model_has_its_blocks_back_too() -> None:
    """The fake model hashes the contents of its cache, so a missing block would make a draft wrong."""
    runner = speculating(draft_model(), swap_space_gib=2 * SWAP_SPACE_GIB)
    assert runner.facts.kv_groups[0].num_swap_blocks == NUM_SWAP_BLOCKS
    driver = Allowing(runner)
    tokens = tokens_of(driver.decode(1, PROMPT, 9, allow=False))
    known = PROMPT + tokens
    blocks = range(-(-len(known) // BLOCK_SIZE))
    other = {"new_rows": [new_row(2, OTHER, [2, 1, 0])], "finished_rows": [1]}
    driver.run([Chunk(2, 0, len(OTHER), True)], swap_outs=[(block, 5 - block) for block in blocks], **other)
    back = new_row(3, known, [30, 31, 32, 33], num_prompt_tokens=len(PROMPT), num_computed=len(known) - 1)
    ins = [(5 - block, 30 + block) for block in blocks]
    outputs = [driver.run([Chunk(3, len(known) - 1, 1, True)], new_rows=[back], swap_ins=ins)[3]]
    for _ in range(3):
        start = len(known) + len(tokens_of(outputs)) - 1
        outputs.append(driver.run([Chunk(3, start, 1, True, outputs[-1].num_drafts)])[3])
    assert [output.num_drafted for output in outputs] == [0, 2, 4, 8]
    assert all(len(output.token_ids) == 1 + output.num_drafted for output in outputs)
    assert tokens + tokens_of(outputs) == plain(len(tokens + tokens_of(outputs)))


# --- many rows, preempted and resumed --------------------------------------------------------------------------------


class Swapping:
    """Greedy rows, preempted and resumed at random, over few blocks: freed blocks are reused at once."""

    def __init__(self, seed: int, prompts: list[list[int]], steps: int) -> None:
        self.rng = random.Random(seed)
        self.free, self.swap_free = list(range(14)), list(range(NUM_SWAP_BLOCKS))
        self.prompts = prompts
        self.tokens = [list(prompt) for prompt in prompts]
        self.lengths = [len(prompt) + steps for prompt in prompts]
        self.rows: dict[int, int] = {}  # prompt number -> row id of each running row,
        self.tables: dict[int, list[int]] = {}  # -> its blocks,
        self.swapped: dict[int, list[int]] = {}  # -> and the swap blocks of each row that does not run
        self.num_rows = self.num_swapped_in = 0

    @property
    def done(self) -> bool:
        return all(len(tokens) == length for tokens, length in zip(self.tokens, self.lengths, strict=True))

    def plan(self, step: int) -> StepPlan:
        finished, outs = self.preempt()
        new, ins = self.resume()
        appended, chunks = [], []
        computed = {one.row_id: one.num_computed for one in new}
        for i, row_id in self.rows.items():
            known = len(self.tokens[i])
            if known > len(self.tables[i]) * BLOCK_SIZE:
                more = self.take(self.free, 1)
                self.tables[i] += more
                appended.append(AppendBlocks(row_id, more))
            start = computed.get(row_id, known - 1)
            chunks.append(Chunk(row_id, start, known - start, True))
        return StepPlan(
            step=step, finished_rows=finished, new_rows=new, append_blocks=appended, swap_outs=outs, swap_ins=ins,
            chunks=chunks,
        )  # fmt: skip

    def preempt(self) -> tuple[list[int], list[tuple[int, int]]]:
        finished, outs = [], []
        for i in list(self.rows):
            if self.rng.random() < 0.3 and len(self.tables[i]) <= len(self.swap_free):
                finished.append(self.rows.pop(i))
                self.swapped[i] = self.take(self.swap_free, len(self.tables[i]))
                outs += zip(self.tables[i], self.swapped[i], strict=True)
                self.free += self.tables.pop(i)
        return finished, outs

    def resume(self) -> tuple[list[NewRow], list[tuple[int, int]]]:
        new, ins = [], []
        for i, tokens in enumerate(self.tokens):
            num_blocks = -(-(len(tokens) + 1) // BLOCK_SIZE)
            waits = i not in self.rows and len(tokens) < self.lengths[i] and num_blocks + 4 <= len(self.free)
            if waits and self.rng.random() < 0.7:
                self.rows[i] = self.num_rows = self.num_rows + 1
                self.tables[i] = self.take(self.free, num_blocks)
                held = self.swapped.pop(i, [])
                ins += zip(held, self.tables[i], strict=False)
                self.swap_free += held  # safe: this plan's swap-outs have been chosen
                values: dict[str, Any] = {"num_prompt_tokens": len(self.prompts[i])}
                values["num_computed"] = len(tokens) - 1 if held else 0
                new.append(new_row(self.num_rows, list(tokens), list(self.tables[i]), **values))
        self.num_swapped_in += len(ins)
        return new, ins

    def take(self, pool: list[int], count: int) -> list[int]:
        return [pool.pop(self.rng.randrange(len(pool))) for _ in range(count)]

    def apply(self, result: StepResult) -> None:
        assert result.errors == []
        prompt_of = {row_id: i for i, row_id in self.rows.items()}
        for output in result.outputs:
            i = prompt_of[output.row_id]
            self.tokens[i] += output.token_ids
            if len(self.tokens[i]) == self.lengths[i]:
                self.free += self.tables.pop(i)
                del self.rows[i]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_rows_that_come_and_go_have_the_tokens_of_undisturbed_ones(seed: int, on_device: bool) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(400) for _ in range(rng.randrange(1, 50))] for _ in range(4)]
    runner = fake_runner(accelerator=FakeAccelerator() if on_device else None, swap_space_gib=SWAP_SPACE_GIB)
    rows = Swapping(seed, prompts, steps=9)
    for step in itertools.count(1):
        if rows.done:
            break
        assert step < 1000
        rows.apply(runner.execute(rows.plan(step)))
    assert rows.tokens == [prompt + plain(9, prompt) for prompt in prompts]
    assert rows.num_swapped_in > 0


def test_a_swap_is_in_order_with_steps_that_are_not_answered_yet() -> None:
    """The device has not yet reported the tokens it chose when the row's blocks leave, but their K and V are in
    place."""
    accelerator = FakeAccelerator()
    runner = fake_runner(accelerator=accelerator, swap_space_gib=SWAP_SPACE_GIB)
    plans = [
        StepPlan(step=1, new_rows=[new_row(1, PROMPT, [0, 1, 2])], chunks=[Chunk(1, 0, 37, True)]),
        StepPlan(
            step=2,
            finished_rows=[1],
            new_rows=[new_row(2, OTHER, [2, 1, 0])],
            swap_outs=[(0, 3), (1, 0), (2, 5)],
            chunks=[Chunk(2, 0, len(OTHER), True)],
        ),
    ]
    pending: deque[Pending] = deque(runner.launch(plan) for plan in plans)
    assert not any(one.done for one in pending)
    results = [runner.collect(one) for one in pending]
    back = new_row(3, PROMPT, [7, 4, 9], num_computed=36)
    last = runner.execute(
        StepPlan(step=3, new_rows=[back], swap_ins=[(3, 7), (0, 4), (5, 9)], chunks=[Chunk(3, 36, 1, True)])
    )
    assert last.outputs[0].token_ids == results[0].outputs[0].token_ids == plain(1)


# --- faults -----------------------------------------------------------------------------------------------------------


class Failing(FakeOps):
    """Moves of blocks fail where an error is set."""

    export_error: Exception | None = None
    import_error: Exception | None = None
    copy_error: Exception | None = None

    def export_blocks(self, kv: torch.Tensor, block_ids: list[int]) -> Blocks:
        if self.export_error is not None:
            raise self.export_error
        return super().export_blocks(kv, block_ids)

    def import_blocks(self, kv: torch.Tensor, block_ids: list[int], blocks: Blocks) -> None:
        if self.import_error is not None:
            raise self.import_error
        super().import_blocks(kv, block_ids, blocks)

    def copy_blocks(self, kv: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        if self.copy_error is not None:
            raise self.copy_error
        super().copy_blocks(kv, pairs)


def failing_runner() -> tuple[ModelRunner, Failing]:
    """Row 0 continues; row 1, with 16 tokens computed and one known, is to be swapped out of block 1."""
    ops = Failing()
    loaded: Any = FakeLoaded(FakeModel(), ops)
    runner = ModelRunner(loaded, NUM_BLOCKS, WorkerConfig(block_size=BLOCK_SIZE, swap_space_gib=SWAP_SPACE_GIB))
    rows = [new_row(0, [3, 4], [0]), new_row(1, [5] * 16, [1])]
    runner.execute(StepPlan(step=1, new_rows=rows, chunks=[Chunk(0, 0, 2, True), Chunk(1, 0, 16, True)]))
    return runner, ops


OUT = StepPlan(step=2, finished_rows=[1], swap_outs=[(1, 2)], chunks=[Chunk(0, 2, 1, True)])
IN = StepPlan(
    step=3,
    new_rows=[new_row(2, [5] * 17, [7, 8], num_prompt_tokens=16, num_computed=16)],
    swap_ins=[(2, 7)],
    chunks=[Chunk(0, 3, 1, True), Chunk(2, 16, 1, True)],
)
FORK = StepPlan(
    step=2,
    new_rows=[new_row(2, [5] * 16, [9], num_computed=15)],
    append_blocks=[AppendBlocks(1, [4])],
    block_copies=[(1, 9)],
    chunks=[Chunk(0, 2, 1, True), Chunk(1, 16, 1, True), Chunk(2, 15, 1, True)],
)
ERRORS = [RuntimeError("boom"), torch.OutOfMemoryError("tried to allocate 9 GiB")]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("broken", "plans"), [("export_error", [OUT]), ("import_error", [OUT, IN]), ("copy_error", [FORK])]
)
def test_a_move_that_fails_is_a_lost_step(error: Exception, broken: str, plans: list[StepPlan]) -> None:
    runner, ops = failing_runner()
    *before, last = plans
    for plan in before:
        assert runner.execute(plan).errors == []
    setattr(ops, broken, error)
    with pytest.raises(LostStep) as raised:
        runner.execute(last)
    assert (raised.value.step, raised.value.out_of_memory) == (last.step, isinstance(error, torch.OutOfMemoryError))
    setattr(ops, broken, None)
    forgotten = runner.execute(StepPlan(step=1, chunks=[Chunk(0, 2, 1, True)]))
    assert "unknown" in forgotten.errors[0].message


def test_a_device_lost_in_a_swap_is_nobodys_to_survive() -> None:
    runner, ops = failing_runner()
    ops.export_error = torch.AcceleratorError("unspecified launch failure")
    with pytest.raises(torch.AcceleratorError):
        runner.execute(OUT)


def test_nothing_is_swapped_in_from_an_earlier_life() -> None:
    runner, _ = failing_runner()
    runner.execute(OUT)
    runner.reset()
    into = runner.execute(IN)
    assert {error.row_id for error in into.errors} == {0, 2}  # both are unknown after the reset


# --- the space itself -------------------------------------------------------------------------------------------------


def fake_loaded() -> Any:
    return FakeLoaded()


def filled(seed: int) -> torch.Tensor:
    return torch.randint(0, 2**60, (NUM_BLOCKS, BLOCK_SIZE), generator=torch.Generator().manual_seed(seed))


def test_all_caches_move_alike() -> None:
    first, second = filled(1), filled(2)
    mover = BlockMover(
        [(fake_loaded(), [first]), (fake_loaded(), [second])], BLOCK_SIZE, [range(NUM_BLOCKS)], [range(4)], None
    )
    before = [cache.clone() for cache in (first, second)]
    mover.swap_out([(5, 0), (6, 3)])
    mover.copy([(1, 5), (2, 6)])
    mover.swap_in([(3, 8), (0, 9)])
    for cache, old in zip((first, second), before, strict=True):
        assert torch.equal(cache[[5, 6, 8, 9]], old[[1, 2, 6, 5]])
        untouched = [block for block in range(NUM_BLOCKS) if block not in (5, 6, 8, 9)]
        assert torch.equal(cache[untouched], old[untouched])


def test_blocks_of_a_group_move_in_the_caches_that_go_by_its_table() -> None:
    """Three caches; the second uses another table, whose blocks and swap blocks come after the first one's."""
    caches = [filled(seed) for seed in (1, 2, 3)]
    shapes = [replace(KV_SHAPE, table=table) for table in (0, 1, 0)]
    loaded: list[Any] = [FakeLoaded(kv_groups=(shape,)) for shape in shapes]
    pairs = [(one, [cache]) for one, cache in zip(loaded, caches, strict=True)]
    blocks, swap_blocks = [range(6), range(6, 10)], [range(2), range(2, 5)]
    mover = BlockMover(pairs, BLOCK_SIZE, blocks, swap_blocks, None)
    before = [cache.clone() for cache in caches]
    mover.swap_out([(5, 1), (7, 2), (9, 4)])
    mover.copy([(0, 5), (6, 7)])
    mover.swap_in([(1, 4), (2, 8), (4, 6)])
    for cache, old in zip(caches[::2], before[::2], strict=True):
        assert torch.equal(cache[:6], old[[0, 1, 2, 3, 5, 0]])
    assert torch.equal(caches[1][:4], before[1][[3, 0, 1, 3]])
    assert mover.seconds_per_block(0) > 0
    assert mover.seconds_per_block(1) > 0


@pytest.mark.parametrize("blocks_at_once", [1, 3])
def test_many_blocks_move_in_parts_through_little_memory(monkeypatch: pytest.MonkeyPatch, blocks_at_once: int) -> None:
    block_bytes = KV_SHAPE.bytes_per_block(BLOCK_SIZE)
    monkeypatch.setattr(moving, "STAGED_BYTES", blocks_at_once * block_bytes + 1)
    monkeypatch.setattr(moving, "PIECE_BYTES", 3 * block_bytes + 1)
    sizes: list[int] = []

    class Watched(FakeOps):
        def export_blocks(self, kv: torch.Tensor, block_ids: list[int]) -> Blocks:
            sizes.append(len(block_ids))
            return super().export_blocks(kv, block_ids)

    loaded: Any = FakeLoaded(ops=Watched())
    accelerator = FakeAccelerator()
    cache = filled(3)
    before = cache.clone()
    space = SwapSpace(loaded, KV_SHAPE, cache, BLOCK_SIZE, 8, accelerator)
    assert accelerator.journal == ["pinned"] * 3  # of 3, 3 and 2 blocks
    space.swap_out([(10 + i, 7 - i) for i in range(8)])
    cache.zero_()
    space.swap_in([(7 - i, 20 + i) for i in range(8)])
    assert torch.equal(cache[20:28], before[10:18])
    assert max(sizes) == blocks_at_once
    assert sum(sizes) == 8


def test_too_little_host_memory_names_the_option() -> None:
    class Small(FakeAccelerator):
        def pinned(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            raise RuntimeError("cannot pin so much")

    with pytest.raises(NotEnoughMemory, match=r"swap_space_gib: cannot allocate 12 blocks.*cannot pin"):
        fake_runner(accelerator=Small(), swap_space_gib=SWAP_SPACE_GIB)


def test_a_worker_says_how_much_it_can_swap_and_how_long_that_takes() -> None:
    accelerator = FakeAccelerator()
    facts = fake_runner(accelerator=accelerator, swap_space_gib=SWAP_SPACE_GIB).facts
    assert facts.kv_groups[0].num_swap_blocks == NUM_SWAP_BLOCKS
    assert facts.kv_groups[0].swap_block_s > 0
    assert accelerator.journal == ["pinned", *["synchronized"] * 4]
    none = fake_runner(swap_space_gib=0).facts
    assert none.kv_groups == (KVGroup(NUM_BLOCKS),)
    assert fake_runner().facts.kv_groups == (KVGroup(NUM_BLOCKS),), "a CPU has none by itself"
