"""Rows kept on the device: what a decode step uploads, that it matches the host's batch, and when it is rewritten."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.fakes_accelerator import FakeAccelerator, HeldFetch
from tests.worker.fakes_capturable import BLOCK, BOMB, MAX_LEN, POISON, VOCAB, HashModel
from tests.worker.fakes_engine import GREEDY, Choice, Engine
from tests.worker.fakes_model import Driver, FakeLoaded, new_row
from tests.worker.step.test_adapted_rows import ONE, TWO, FakeAdapters

from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import NO_BLOCK, Chunk, ReplaceBlock, StepPlan
from pagoda_worker.config import WorkerConfig
from pagoda_worker.rows.batch import Batch, build_batch
from pagoda_worker.rows.rows import Ints, Row
from pagoda_worker.rows.slots import NO_ADAPTER
from pagoda_worker.step.graphs import Graphed, ladder
from pagoda_worker.step.lines import Lines
from pagoda_worker.step.pending import OnDevice
from pagoda_worker.step.runner import LostStep, ModelRunner

CPU = torch.device("cpu")
MAX_ROWS, NUM_BLOCKS = 6, 60
HEAD, CELL, TOKEN = 4 * 8, 2 * 8, 2 * 8  # bytes that a row may need uploaded: its state, a block, its token


class Unlucky(FakeAccelerator):
    """An upload fails while `fails` is set."""

    fails = False

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return super().upload(host)


@dataclass
class Loaded(FakeLoaded):
    vocab_size: int = VOCAB
    max_model_len: int = MAX_LEN

    def new_kv_cache(self, num_blocks: int, block_size: int) -> tuple[torch.Tensor]:
        return super().new_kv_cache(num_blocks + 1, block_size)


def host_runner() -> ModelRunner:
    loaded = Loaded(HashModel(), adapters=FakeAdapters())
    return ModelRunner(loaded, NUM_BLOCKS, WorkerConfig(block_size=BLOCK, max_rows=MAX_ROWS))  # type: ignore[arg-type]


def lines_for(max_rows: int, num_tables: int = 1) -> Lines:
    scratch = [NUM_BLOCKS] * num_tables
    return Lines(max_rows=max_rows, max_len=MAX_LEN, block_size=BLOCK, scratch_blocks=scratch, device=CPU)


def device_runner(accelerator: FakeAccelerator) -> ModelRunner:
    sizes = ladder(MAX_ROWS)
    graphed = Graphed(HashModel(), accelerator, sizes, lines_for(MAX_ROWS), adapted=True)
    config = WorkerConfig(block_size=BLOCK, max_rows=MAX_ROWS)
    runner = ModelRunner(Loaded(graphed, adapters=FakeAdapters()), NUM_BLOCKS, config, accelerator=accelerator)  # type: ignore[arg-type]
    graphed.capture(runner.kv_cache, lambda done, of: None)
    return runner


# --- uploads ----------------------------------------------------------------------------------------------------------


def decoding(num_rows: int, prompt: int) -> tuple[FakeAccelerator, Driver]:
    """Rows whose prompts of this length are prefilled, with the uploads so far forgotten."""
    accelerator = FakeAccelerator()
    driver = Driver(device_runner(accelerator), block_size=BLOCK, free=list(range(NUM_BLOCKS)))
    driver.run([driver.add(i, [i + 1] * prompt) for i in range(num_rows)])
    accelerator.uploads.clear()
    return accelerator, driver


@pytest.mark.parametrize("num_rows", [1, 3, 5])
def test_a_step_in_which_nothing_changes_sends_nothing(num_rows: int) -> None:
    accelerator, driver = decoding(num_rows, prompt=4)
    sent = []
    for _ in range(14):
        driver.run([])
        sent.append(sum(accelerator.uploads))
        assert len(accelerator.uploads) <= 1
        accelerator.uploads.clear()
    assert sent[0] <= num_rows * (HEAD + CELL + TOKEN)  # after the prefill
    assert sent[1:12] == [0] * 11
    assert sent[12] == num_rows * (HEAD + CELL)  # position 16: every row starts a new block
    assert sent[13] == 0


def test_two_steps_in_flight_send_no_more() -> None:
    accelerator, driver = decoding(3, prompt=4)
    pending = [driver.runner.launch(driver.plan([])) for _ in range(2)]
    accelerator.uploads.clear()
    for _ in range(11):
        pending.append(driver.runner.launch(driver.plan([])))
        driver.runner.collect(pending.pop(0))
    assert accelerator.uploads == [3 * (HEAD + CELL)]


def test_a_row_that_leaves_costs_the_others_nothing() -> None:
    """The last row moves to its line, with state, table and token; lines beyond the step's size stay as they are."""
    accelerator, driver = decoding(5, prompt=4)
    driver.run([])
    accelerator.uploads.clear()
    driver.finish(1)
    driver.run([])
    assert accelerator.uploads == [HEAD + CELL + TOKEN]
    driver.run([])
    assert len(accelerator.uploads) == 1


def test_the_order_of_chunks_costs_nothing() -> None:
    accelerator, driver = decoding(6, prompt=4)
    driver.run([])
    accelerator.uploads.clear()
    driver.finish(0)
    driver.finish(1)
    driver.run([])
    assert accelerator.uploads == [2 * (HEAD + CELL + TOKEN)]
    for _ in range(3):
        driver.known = dict(reversed(driver.known.items()))
        driver.run([])
    assert len(accelerator.uploads) == 1


def test_padding_is_sent_once() -> None:
    accelerator, driver = decoding(5, prompt=4)  # replayed at size 6, so one line is padding from the beginning
    driver.run([])
    accelerator.uploads.clear()
    driver.finish(4)
    driver.finish(3)  # replayed at size 4
    driver.run([])
    assert accelerator.uploads == [HEAD + CELL]
    driver.run([])
    assert len(accelerator.uploads) == 1


def test_a_step_beside_a_prefill_costs_the_rows_their_state_and_not_their_tables() -> None:
    accelerator, driver = decoding(3, prompt=20)
    driver.run([])
    driver.run([driver.add(7, [1, 2, 3])])
    accelerator.uploads.clear()
    driver.run([])
    assert accelerator.uploads == [4 * (HEAD + TOKEN) + CELL]


def test_a_replaced_block_is_sent_with_its_table() -> None:
    accelerator, driver = decoding(2, prompt=20)
    driver.run([])
    accelerator.uploads.clear()
    plan = driver.plan([])
    plan.block_copies.append((1, 50))
    plan.replace_blocks.append(ReplaceBlock(0, 1, 50))
    driver.runner.execute(plan)
    assert accelerator.uploads == [HEAD + TOKEN + 2 * CELL]


# --- the device's batch equals the host's -----------------------------------------------------------------------------


def row_of(row_id: int, num_tokens: int, rng: random.Random, num_tables: int) -> Row:
    tokens = np.array([rng.randrange(VOCAB) for _ in range(num_tokens)])
    blocks, *others = (np.array(rng.sample(range(NUM_BLOCKS), 6)) for _ in range(num_tables))
    for kept in others:
        kept[: rng.randrange((num_tokens - 1) // BLOCK + 1)] = NO_BLOCK  # outside its window
    slot = rng.randrange(NO_ADAPTER, 3)
    return Row.of(new_row(row_id, [0], [0], num_prompt_tokens=1), tokens, blocks, slot=slot, others=others)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_lines_are_the_batch_the_host_builds(seed: int) -> None:
    """Over steps in which rows arrive, leave, pause, run elsewhere and change blocks, and uploads fail."""
    rng, accelerator = random.Random(seed), Unlucky()
    num_tables = rng.choice([1, 1, 2, 3])
    lines = lines_for(8, num_tables)
    rows: list[Row] = []
    earlier: list[OnDevice] = []
    for _ in range(25):
        rows = [row for row in rows if rng.random() < 0.9]
        while len(rows) < 8 and rng.random() < 0.5:
            rows.append(row_of(rng.randrange(10**9), rng.randrange(1, 60), rng, num_tables))
        if rows and rng.random() < 0.2:
            changed = rng.choice(rows)
            changed.blocks = Ints(np.array(rng.sample(range(NUM_BLOCKS), 6)))
            changed.others = tuple(Ints(np.array(rng.sample(range(NUM_BLOCKS), 6))) for _ in changed.others)
        rng.shuffle(rows)
        now = [row for row in rows if rng.random() < 0.9 and len(row.tokens) < MAX_LEN]
        if not now:
            continue
        if rng.random() < 0.2:  # a step that is not replayed
            ids = torch.tensor([rng.randrange(VOCAB) for _ in now])
            earlier = [launched(now, ids)] if rng.random() < 0.5 else []
            for row, token in zip(now, ids.tolist(), strict=True):
                row.append(token)
            continue
        given_work = [(row, Chunk(row.row_id, len(row.tokens) - 1, 1, True)) for row in now]
        work = lines.arranged(given_work)
        assert sorted(map(id, work)) == sorted(map(id, given_work))
        truth = build_batch(work, BLOCK, CPU)
        size = rng.randrange(len(work), 9)
        hidden = {}
        for step in earlier:  # tokens that the host does not know yet
            for row, _ in work:
                if row.row_id in step.promised:
                    hidden[row.row_id] = int(row.tokens.array[-1])
                    row.tokens.array[-1] = 0
        accelerator.fails = rng.random() < 0.1
        try:
            lines.write(work, size, earlier, accelerator)
        except torch.OutOfMemoryError:
            rows = [row for row in rows if row not in now]
            earlier = []
            continue
        finally:
            for row, _ in work:
                row.tokens.array[-1] = hidden.get(row.row_id, row.tokens.array[-1])
        lines.lay_out(size)
        for place in range(num_tables):
            check(lines.batch(size, adapted=True).at(place), truth.at(place), size)
        earlier = []
        if rng.random() < 0.8:  # the device sampled, otherwise the host
            ids = torch.tensor([rng.randrange(-1, VOCAB) for _ in work])
            lines.advance(ids)
            if rng.random() < 0.6:
                earlier = [launched([row for row, _ in work], ids)]
            for (row, _), token in zip(work, ids.tolist(), strict=True):
                row.append(max(0, token))
        else:
            for row, _ in work:
                row.append(rng.randrange(VOCAB))


def launched(rows: list[Row], ids: torch.Tensor) -> OnDevice:
    promised = {row.row_id: (i, len(row.tokens)) for i, row in enumerate(rows)}
    return OnDevice(ids=ids, fetch=HeldFetch(ids, []), promised=promised)


def check(batch: Batch, truth: Batch, size: int) -> None:
    """The first lines equal `truth`; the others, up to `size`, are padding."""
    count = truth.num_rows
    for name in ("token_ids", "positions", "kv_indices", "lengths"):
        assert torch.equal(getattr(batch, name)[:count], getattr(truth, name)), name
    for i, length in enumerate(truth.context_lens):
        needed = -(-length // BLOCK)
        assert torch.equal(batch.block_tables[i, :needed], truth.block_tables[i, :needed])
    assert batch.slots is not None
    slots = [NO_ADAPTER] * count if truth.slots is None else truth.slots.slots.tolist()
    assert batch.slots.there.tolist() == slots + [NO_ADAPTER] * (size - count)
    assert batch.positions[count:].tolist() == [0] * (size - count)
    assert batch.lengths[count:].tolist() == [1] * (size - count)
    assert batch.kv_indices[count:].tolist() == [NUM_BLOCKS * BLOCK] * (size - count)
    assert batch.block_tables[count:, 0].tolist() == [NUM_BLOCKS] * (size - count)
    assert ((batch.token_ids >= 0) & (batch.token_ids < VOCAB)).all()


# --- whole runs -------------------------------------------------------------------------------------------------------

MANNERS = [GREEDY, GREEDY, GREEDY, SamplingParams(temperature=0.9)]


def choices(seed: int) -> list[Choice]:
    """Choices, some of which share a prompt."""
    rng, found = random.Random(seed), []
    for _ in range(rng.randrange(1, 5)):
        prompt = [rng.randrange(BOMB) for _ in range(rng.randrange(1, 50))]
        params, adapter = rng.choice(MANNERS), rng.choice([None, None, ONE, TWO])
        for i in range(rng.randrange(1, 4)):
            found.append(Choice(prompt, rng.randrange(1, 30), params, choice=i, adapter=adapter))
    return found


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 1), st.sampled_from([5, 16, 10**6]))
def test_whatever_happens_to_rows_their_tokens_stay(seed: int, ahead: int, chunk_tokens: int) -> None:
    expected = Engine(host_runner(), choices(seed), random.Random(1)).run()
    runner = device_runner(FakeAccelerator())
    engine = Engine(runner, choices(seed), random.Random(seed), ahead, 0.15, chunk_tokens)
    assert engine.run() == expected
    assert engine.errors == []


@pytest.mark.parametrize("adapter", [None, ONE])
def test_every_step_after_the_prefill_is_replayed(adapter: Adapter | None) -> None:
    accelerator = FakeAccelerator()
    wanted = [Choice([3, 1, 4], 9, GREEDY), Choice([1, 5], 7, GREEDY, adapter=adapter)]
    assert list(map(len, Engine(device_runner(accelerator), wanted, random.Random(1), ahead=1).run())) == [9, 7]
    assert accelerator.replays == 8


# --- lines that are no longer valid -----------------------------------------------------------------------------------


def continued(prompt: list[int], count: int) -> list[int]:
    return Engine(host_runner(), [Choice(prompt, count, GREEDY)], random.Random(1)).run()[0]


def step_of(number: int, *chunks: Chunk, **changes: object) -> StepPlan:
    return StepPlan(step=number, chunks=list(chunks), **changes)  # type: ignore[arg-type]


def test_a_row_of_another_life_is_not_taken_for_one_of_the_same_name() -> None:
    accelerator = FakeAccelerator()
    runner, tokens = device_runner(accelerator), {}
    for prompt in ([5, 6, 7], [9, 8, 7]):
        new = new_row(1, prompt, [4])
        results = [runner.execute(step_of(1, Chunk(1, 0, 3, True), new_rows=[new]))]
        results += [runner.execute(step_of(i, Chunk(1, 1 + i, 1, True))) for i in (2, 3)]
        tokens[prompt[0]] = [result.outputs[0].token_ids[0] for result in results]
        runner.reset()
    assert tokens == {5: continued([5, 6, 7], 3), 9: continued([9, 8, 7], 3)}


def begun_pair(accelerator: FakeAccelerator) -> ModelRunner:
    """A runner with two rows that have two output tokens each."""
    runner = device_runner(accelerator)
    rows = [new_row(i, [5 + i, 6], [i]) for i in (1, 2)]
    runner.execute(step_of(1, *(Chunk(i, 0, 2, True) for i in (1, 2)), new_rows=rows))
    runner.execute(step_of(2, *(Chunk(i, 2, 1, True) for i in (1, 2))))
    return runner


def go_on_elsewhere(runner: ModelRunner) -> None:
    """The first row comes back with its tokens, beside lines from before, and continues as if undisturbed."""
    known = [6, 6, *continued([6, 6], 2)]
    result = runner.execute(step_of(1, Chunk(1, 0, 4, True), new_rows=[new_row(1, known, [2])]))
    assert result.outputs[0].token_ids == continued([6, 6], 3)[2:]
    result = runner.execute(step_of(2, Chunk(1, 4, 1, True)))
    assert result.outputs[0].token_ids == continued([6, 6], 4)[3:]


def test_after_a_lost_step_no_line_of_before_is_believed() -> None:
    accelerator = Unlucky()
    runner = begun_pair(accelerator)
    accelerator.fails = True
    with pytest.raises(LostStep):
        runner.execute(step_of(3, Chunk(2, 3, 1, True), Chunk(3, 0, 1, True), new_rows=[new_row(3, [11], [3])]))
    accelerator.fails = False
    go_on_elsewhere(runner)


def test_a_sampler_that_fails_leaves_no_line_believed() -> None:
    runner = begun_pair(FakeAccelerator())

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("no")

    sampler = runner._compute._sampler
    runner._compute._sampler.sample, whole = fail, sampler.sample  # type: ignore[method-assign]
    with pytest.raises(LostStep):
        runner.execute(step_of(3, Chunk(2, 3, 1, True)))
    sampler.sample = whole  # type: ignore[method-assign]
    go_on_elsewhere(runner)


def test_a_row_whose_logits_are_no_numbers_ends_alone_and_its_line_is_given_on() -> None:
    accelerator = FakeAccelerator()
    runner = device_runner(accelerator)
    rows = [new_row(1, [5, 6], [1]), new_row(2, [POISON], [2]), new_row(3, [7, 6], [3])]
    chunks = [Chunk(1, 0, 2, True), Chunk(2, 0, 1, True), Chunk(3, 0, 2, True)]
    pending = [runner.launch(step_of(1, *chunks, new_rows=rows))]
    pending.append(runner.launch(step_of(2, Chunk(1, 2, 1, True), Chunk(2, 1, 1, True), Chunk(3, 2, 1, True))))
    assert [error.row_id for error in runner.collect(pending[0]).errors] == [2]
    assert [error.row_id for error in runner.collect(pending[1]).errors] == [2]
    result = runner.execute(step_of(3, Chunk(1, 3, 1, True), Chunk(3, 3, 1, True)))
    assert {one.row_id: one.token_ids for one in result.outputs} == {
        1: continued([5, 6], 3)[2:],
        3: continued([7, 6], 3)[2:],
    }


def test_a_lost_prefill_beside_decoding_rows_leaves_no_line_believed() -> None:
    runner = begun_pair(FakeAccelerator())
    bomb = new_row(3, [BOMB, 1], [3])
    with pytest.raises(LostStep):
        runner.execute(step_of(3, Chunk(2, 3, 1, True), Chunk(3, 0, 2, True), new_rows=[bomb]))
    go_on_elsewhere(runner)
