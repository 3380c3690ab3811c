"""Recorded decode steps replay what was recorded, without reading the host, and with the same bits."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.fakes_accelerator import FakeAccelerator
from tests.worker.fakes_capturable import BLOCK, MAX_LEN, VOCAB, WIDTH, CapturableOps, decoder
from tests.worker.fakes_model import new_row

from pagoda_proto.steps import Chunk
from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.ops import BackendError
from pagoda_worker.rows.batch import Batch, build_batch
from pagoda_worker.rows.rows import Row
from pagoda_worker.rows.slots import NO_ADAPTER
from pagoda_worker.step.graphs import Graphed, ladder, reserve_for, rung
from pagoda_worker.step.lines import Lines
from pagoda_worker.step.pending import Work

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
    """One decoder over two caches of equal contents: `kv` for replays, `other` for steps run operation by operation."""

    ops: AtenOps
    accelerator: FakeAccelerator

    def __post_init__(self) -> None:
        self.decoder = decoder(self.ops)
        (group,) = self.decoder.kv_groups
        self.kv, self.other = ([self.ops.new_kv_cache(group, NUM_BLOCKS + 1, BLOCK)] for _ in range(2))
        generator = torch.Generator().manual_seed(5)
        for mine, its in zip(self.kv[0].layers, self.other[0].layers, strict=True):
            mine.copy_(torch.randn(mine.shape, generator=generator))
            its.copy_(mine)
        self.graphed = Graphed(self.decoder, self.accelerator, SIZES, self.lines())

    def lines(self) -> Lines:
        return Lines(max_rows=MAX_ROWS, max_len=MAX_LEN, block_size=BLOCK, scratch_blocks=[SCRATCH], device=CPU)

    def captured(self) -> Case:
        self.graphed.capture(self.kv, lambda done, of: None)
        for mine, its in zip(self.kv[0].layers, self.other[0].layers, strict=True):
            its[SCRATCH].copy_(mine[SCRATCH])  # recording wrote there
            assert torch.equal(mine, its)
        return self

    def replayed(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits, concatenated: of the replay, and operation by operation."""
        with torch.inference_mode():
            replayed = self.graphed.replayed(work, [])
            assert replayed is not None
            assert replayed.logits is not None
            hidden = self.decoder.forward(build_batch(work, BLOCK, CPU), self.other)
            plain = torch.cat((hidden.float(), self.decoder.logits(hidden)), 1)
            return torch.cat((replayed.hidden.float(), replayed.logits), 1), plain

    def caches_agree(self) -> bool:
        """Whether the caches agree, including unused blocks, except for the scratch block."""
        pairs = zip(self.kv[0].layers, self.other[0].layers, strict=True)
        return all(torch.equal(mine[:SCRATCH], its[:SCRATCH]) for mine, its in pairs)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(CapturableOps(CPU), FakeAccelerator()).captured()


def decodes(num_rows: int, rng: random.Random, num_tokens: int = 1) -> Work:
    """Rows of random lengths with new tokens; every row has its own blocks, in random order."""
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    work = []
    for i in range(num_rows):
        computed = rng.randrange(MAX_LEN - num_tokens + 1)
        tokens = np.array([rng.randrange(VOCAB) for _ in range(computed + num_tokens)])
        table = np.array(blocks[i * WIDTH : (i + 1) * WIDTH])
        work.append((Row.of(new_row(i, [0], [0]), tokens, table), Chunk(i, computed, num_tokens, True)))
    return work


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
def test_a_step_takes_the_least_size_that_holds_it(max_rows: int, num_rows: int) -> None:
    sizes = ladder(max_rows)
    work = decodes(1, random.Random(1)) * num_rows
    assert rung(sizes, work) == min((one for one in sizes if one >= num_rows), default=None)


def test_a_step_is_replayed_when_every_row_computes_and_samples_one_token() -> None:
    work, (longer,) = decodes(3, random.Random(1)), decodes(1, random.Random(2), num_tokens=2)
    (row, chunk), *rest = work
    assert rung(SIZES, work) == 4
    assert rung(SIZES, [*work, longer]) is None
    assert rung(SIZES, [(row, Chunk(chunk.row_id, chunk.start, 1, False)), *rest]) is None


@pytest.mark.parametrize("num_rows", range(1, MAX_ROWS + 1))
def test_a_replayed_step_is_the_step(case: Case, num_rows: int) -> None:
    rng, before = random.Random(num_rows), case.accelerator.replays
    for _ in range(3):
        assert torch.equal(*case.replayed(decodes(num_rows, rng)))
    assert case.accelerator.replays == before + 3
    assert case.caches_agree()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, MAX_ROWS), min_size=2, max_size=6), st.integers(0, 10**6))
def test_nothing_of_an_earlier_step_is_left(case: Case, counts: list[int], seed: int) -> None:
    rng = random.Random(seed)
    for count in counts:
        assert torch.equal(*case.replayed(decodes(count, rng)))
    assert case.caches_agree()


def test_what_is_no_decode_step_is_not_replayed(case: Case) -> None:
    before, rng = case.accelerator.replays, random.Random(1)
    assert case.graphed.replayed([*decodes(1, rng), *decodes(1, rng, num_tokens=3)], []) is None
    assert case.graphed.replayed(decodes(1, rng) * (MAX_ROWS + 1), []) is None
    assert case.accelerator.replays == before


def test_padding_rows_touch_the_scratch_block_alone(case: Case) -> None:
    before = [layer.clone() for layer in case.kv[0].layers]
    work = decodes(5, random.Random(8))  # padded with three rows
    case.replayed(work)
    written = {int(index) for index in build_batch(work, BLOCK, CPU).kv_indices} | {SCRATCH * BLOCK}
    for old, new in zip(before, case.kv[0].layers, strict=True):
        changed = (old != new).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        assert set(changed) <= written


def test_what_the_host_says_is_not_read_again() -> None:
    """Lengths from the host's list are on the device only during the recording, not during the replay."""
    case = Case(ReadsTheHost(CPU), FakeAccelerator()).captured()
    with pytest.raises(RuntimeError, match="given back"):
        case.replayed(decodes(2, random.Random(2)))


def test_a_step_that_waits_for_the_device_is_refused_with_the_way_out() -> None:
    with pytest.raises(BackendError, match=r"11 rows cannot be recorded .*capturing.*enforce_eager"):
        Case(Waits(CPU), FakeAccelerator()).captured()


@pytest.mark.parametrize("error", [OSError("no compiler"), ValueError("ptxas"), KeyError("cubin")])
def test_whatever_stops_a_recording_is_an_error_of_the_back_end(error: Exception) -> None:
    class Fails(CapturableOps):
        def lengths(self, batch: Batch) -> torch.Tensor:
            raise error

    with pytest.raises(BackendError, match=f"11 rows cannot be recorded .*{type(error).__name__}"):
        Case(Fails(CPU), FakeAccelerator()).captured()


def test_recording_goes_from_the_largest_to_the_smallest_and_tells() -> None:
    case, told = Case(CapturableOps(CPU), FakeAccelerator()), []
    case.graphed.capture(case.kv, lambda done, of: told.append((done, of)))
    assert told == [(number, len(SIZES)) for number in range(1, len(SIZES) + 1)]
    assert list(case.graphed._recordings) == [(size, False) for size in SIZES[::-1]]


def adapted(work: Work, slots: list[int]) -> Work:
    for (row, _), slot in zip(work, slots, strict=True):
        row.slot = slot
    return work


def test_steps_with_adapters_have_recordings_of_their_own() -> None:
    case = Case(CapturableOps(CPU), FakeAccelerator())
    case.graphed = Graphed(case.decoder, case.accelerator, SIZES, case.lines(), adapted=True)
    case.captured()
    kinds = [(size, with_adapters) for with_adapters in (True, False) for size in SIZES[::-1]]
    assert list(case.graphed._recordings) == kinds
    assert case.graphed.num_recordings == len(kinds)
    taken: list[tuple[int, bool]] = []
    for key, one in case.graphed._recordings.items():
        case.graphed._recordings[key] = replace(one, replay=partial(taken.append, key))
    work = decodes(3, random.Random(1))
    assert case.graphed.replayed(work, []) is not None
    assert case.graphed.replayed(adapted(work, [NO_ADAPTER, 1, NO_ADAPTER]), []) is not None
    case.decoder.replacing = frozenset({1})
    assert case.graphed.replayed(work, []) is None, "what comes whole is computed operation by operation"
    assert case.graphed.replayed(adapted(work, [0, 0, 2]), []) is not None
    assert taken == [(4, False), (4, True), (4, True)]


def test_what_is_recorded_without_adapters_replays_no_step_with_one(case: Case) -> None:
    assert case.graphed.replayed(adapted(decodes(2, random.Random(1)), [NO_ADAPTER, 0]), []) is None


def test_without_recordings_nothing_is_replayed() -> None:
    case = Case(CapturableOps(CPU), FakeAccelerator())
    assert case.graphed.replayed(decodes(3, random.Random(4)), []) is None


# --- the fake is as strict as a device --------------------------------------------------------------------------------


def test_what_a_recording_reads_must_still_be_there() -> None:
    inputs, out = [torch.ones(3)], torch.zeros(3)
    replay = FakeAccelerator().capture(lambda: out.copy_(inputs[0][1:2]))
    inputs[0].fill_(5)
    replay()
    assert out.tolist() == [5, 5, 5]
    inputs.clear()
    with pytest.raises(RuntimeError, match="given back"):
        replay()


def test_what_a_recording_made_for_itself_is_gone_after_it() -> None:
    kept: list[torch.Tensor] = []
    x = torch.ones(3)
    replay = FakeAccelerator().capture(lambda: kept.append(x + 1))
    replay()
    assert kept[-1].isnan().all()


@pytest.mark.parametrize("index", ["mask", "nonzero", "item"])
def test_what_depends_on_contents_cannot_be_recorded(index: str) -> None:
    x = torch.ones(3)
    reads = {"mask": lambda: x[x > 0], "nonzero": lambda: x.nonzero(), "item": lambda: x[0].item()}
    with pytest.raises(RuntimeError, match="capturing"):
        FakeAccelerator().capture(reads[index])  # type: ignore[arg-type]


def test_memory_is_looked_at_when_nothing_is_held_for_later() -> None:
    accelerator = FakeAccelerator()
    case = Case(CapturableOps(CPU), accelerator)
    next(case.graphed.captured(case.kv))
    assert accelerator.journal == ["emptied"]


def test_the_reserve_is_told_from_the_two_largest() -> None:
    accelerator = FakeAccelerator(bytes_per_capture=lambda number: [700, 30][number])
    case = Case(CapturableOps(CPU), accelerator)
    assert reserve_for(len(SIZES), case.graphed.captured(case.kv)) == 700 + 30 * (len(SIZES) - 1)
    assert accelerator.captures == 2


def test_the_reserve_of_a_single_size() -> None:
    assert reserve_for(1, iter([90])) == 90
