"""Decode steps recorded and replayed: what was recorded, not what the host says by now, and with the same bits."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.fakes_accelerator import FakeAccelerator
from tests.worker.fakes_capturable import BLOCK, MAX_LEN, VOCAB, WIDTH, CapturableOps, decoder
from tests.worker.models.harness import make_batch

from pagoda_worker.batch import Batch
from pagoda_worker.graphs import DecodeBuffers, Graphed, ladder, reserve_for, rung
from pagoda_worker.kernels.aten import AtenOps

MAX_ROWS = 11
SIZES = ladder(MAX_ROWS)
NUM_BLOCKS = MAX_ROWS * WIDTH
SCRATCH = NUM_BLOCKS
CPU = torch.device("cpu")


class ReadsTheHost(CapturableOps):
    def lengths(self, batch: Batch) -> torch.Tensor:
        return torch.tensor(batch.context_lens)


class Waits(CapturableOps):
    def lengths(self, batch: Batch) -> torch.Tensor:
        return batch.lengths + int(batch.lengths.max().item()) * 0


@dataclass
class Case:
    """One decoder over two caches of equal contents: `kv` is for replays, `other` for steps operation by operation."""

    ops: AtenOps
    accelerator: FakeAccelerator

    def __post_init__(self) -> None:
        self.decoder = decoder(self.ops)
        self.kv, self.other = (self.ops.new_kv_cache(self.decoder.kv_shape, NUM_BLOCKS + 1, BLOCK) for _ in range(2))
        generator = torch.Generator().manual_seed(5)
        for mine, its in zip(self.kv.layers, self.other.layers, strict=True):
            mine.copy_(torch.randn(mine.shape, generator=generator))
            its.copy_(mine)
        buffers = DecodeBuffers(max_rows=MAX_ROWS, max_len=MAX_LEN, block_size=BLOCK, scratch_block=SCRATCH, device=CPU)
        self.graphed = Graphed(self.decoder, self.accelerator, SIZES, buffers)

    def captured(self) -> Case:
        self.graphed.capture(self.kv, lambda done, of: None)
        for mine, its in zip(self.kv.layers, self.other.layers, strict=True):
            its[SCRATCH].copy_(mine[SCRATCH])  # recording wrote there
            assert torch.equal(mine, its)
        return self

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            return self.graphed.forward(batch, self.kv).clone(), self.decoder.forward(batch, self.other)

    def caches_agree(self) -> bool:
        """Also about the blocks that nobody's row has, except the scratch block."""
        pairs = zip(self.kv.layers, self.other.layers, strict=True)
        return all(torch.equal(mine[:SCRATCH], its[:SCRATCH]) for mine, its in pairs)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(CapturableOps(CPU), FakeAccelerator()).captured()


def decode_batch(num_rows: int, rng: random.Random) -> Batch:
    """Rows of any length with one new token; every row has its own blocks, in any order."""
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    rows = []
    for i in range(num_rows):
        computed = rng.randrange(MAX_LEN)
        rows.append(([rng.randrange(VOCAB)], computed, blocks[i * WIDTH : i * WIDTH + computed // BLOCK + 1]))
    return make_batch(rows, BLOCK)


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (256, [1, 2, 4, *range(8, 257, 8)]),
        (300, [1, 2, 4, *range(8, 257, 8), 272, 288, 300]),
    ],
)
def test_ladder(max_rows: int, sizes: list[int]) -> None:
    assert ladder(max_rows) == sizes


def test_the_ladder_ends_where_launching_costs_nothing() -> None:
    assert ladder(4000)[-2:] == [496, 512]


@given(st.integers(1, 600), st.integers(1, 600))
def test_a_batch_takes_the_least_size_that_holds_it(max_rows: int, num_rows: int) -> None:
    sizes = ladder(max_rows)
    batch = DecodeBuffers(max_rows=num_rows, max_len=16, block_size=16, scratch_block=0, device=CPU).batch(num_rows)
    size = rung(sizes, batch)
    assert size == min((one for one in sizes if one >= num_rows), default=None)


@pytest.mark.parametrize("num_rows", range(1, MAX_ROWS + 1))
def test_a_replayed_step_is_the_step(case: Case, num_rows: int) -> None:
    rng, before = random.Random(num_rows), case.accelerator.replays
    for _ in range(3):
        replayed, plain = case.forward(decode_batch(num_rows, rng))
        assert torch.equal(replayed, plain)
    assert case.accelerator.replays == before + 3
    assert case.caches_agree()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, MAX_ROWS), min_size=2, max_size=6), st.integers(0, 10**6))
def test_nothing_of_an_earlier_batch_is_left(case: Case, counts: list[int], seed: int) -> None:
    rng = random.Random(seed)
    for count in counts:
        replayed, plain = case.forward(decode_batch(count, rng))
        assert torch.equal(replayed, plain)
    assert case.caches_agree()


def test_what_is_no_decode_step_runs_operation_by_operation(case: Case) -> None:
    before = case.accelerator.replays
    mixed = make_batch([([3, 4, 5], 0, [0]), ([6], 20, [1, 2])], BLOCK)
    many = decode_batch(MAX_ROWS, random.Random(1))
    wide = make_batch([([1], 0, [i]) for i in range(MAX_ROWS + 1)], BLOCK)
    for batch in (mixed, wide):
        assert rung(SIZES, batch) is None
        assert torch.equal(*case.forward(batch))
    assert case.accelerator.replays == before
    assert torch.equal(*case.forward(many))
    assert case.accelerator.replays == before + 1


def test_padding_rows_touch_the_scratch_block_alone(case: Case) -> None:
    rng = random.Random(8)
    before = [layer.clone() for layer in case.kv.layers]
    batch = decode_batch(5, rng)  # three rows of padding
    case.forward(batch)
    written = {int(index) for index in batch.kv_indices} | {SCRATCH * BLOCK}
    for old, new in zip(before, case.kv.layers, strict=True):
        changed = (old != new).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        assert set(changed) <= written


def test_what_the_host_says_is_not_read_again() -> None:
    """The same step with lengths from the host's list is wrong when replayed: the recording holds the list's bounds."""
    case = Case(ReadsTheHost(CPU), FakeAccelerator()).captured()
    assert not torch.equal(*case.forward(decode_batch(2, random.Random(2))))


def test_a_step_that_waits_for_the_device_is_refused_with_the_way_out() -> None:
    with pytest.raises(RuntimeError, match=r"11 rows cannot be recorded .*capturing.*enforce_eager"):
        Case(Waits(CPU), FakeAccelerator()).captured()


def test_recording_goes_from_the_largest_to_the_smallest_and_tells() -> None:
    case, told = Case(CapturableOps(CPU), FakeAccelerator()), []
    case.graphed.capture(case.kv, lambda done, of: told.append((done, of)))
    assert told == [(number, len(SIZES)) for number in range(1, len(SIZES) + 1)]
    assert list(case.graphed._recordings) == SIZES[::-1]


def test_without_recordings_everything_runs_operation_by_operation() -> None:
    case = Case(CapturableOps(CPU), FakeAccelerator())
    assert torch.equal(*case.forward(decode_batch(3, random.Random(4))))
    assert case.accelerator.replays == 0


def test_the_reserve_is_told_from_the_two_largest() -> None:
    accelerator = FakeAccelerator(bytes_per_capture=lambda number: [700, 30][number])
    case = Case(CapturableOps(CPU), accelerator)
    assert reserve_for(SIZES, case.graphed.captured(case.kv)) == 700 + 30 * (len(SIZES) - 1)
    assert accelerator.captures == 2


def test_the_reserve_of_a_single_size() -> None:
    assert reserve_for([1], iter([90])) == 90
