"""Sampling on the device, as `sampler` defines it, without a sort.

Weights are integers: exp((logit - top) / temperature) in units of 2**-s (s about 44). Integer sums are exact, so
neither the number of programs nor the order of their atomics affects a result. The price: a token's weight is off by up
to one unit, and a draw closer to the boundary between two tokens than a row's total rounding error (under 1e-8 of the
mass for 150 000 tokens) may fall on the other side than on the CPU.

Three launches: `prepare` changes the logits as the rows' lines say and finds their range; `weigh` builds a histogram of
masses and counts over that range; `choose` finds tokens and updates the lines. A *find* determines the first token, by
descending logit and ascending id, whose cumulative mass (or count) exceeds a target. The histogram gives its bin; the
tokens of the bin, a few hundred, are listed in order of id; bisection over their logits' bits finds the logit, and a
division the number of equal tokens before it. top_k is a find by count; top_p and the draw are finds by mass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagoda_worker.kernels.triton import sampling_lines as column
from pagoda_worker.kernels.triton.find import find, find_id, histogram_bin, range_of, token_mass
from pagoda_worker.kernels.triton.philox import uniform
from pagoda_worker.kernels.triton.sampling_lines import ALWAYS, EARLY, IN_PROMPT, SamplingLines
from pagoda_worker.sampling.device_sampler import NO_TOKEN, NONE_ALLOWED

BINS = 2048
SLICE = 4096  # logits that one program of `prepare` and `weigh` reads
BLOCK = 2048  # logits that `choose` reads at a time

_IN_PROMPT: tl.constexpr = tl.constexpr(IN_PROMPT)
_ALWAYS: tl.constexpr = tl.constexpr(ALWAYS)
_EARLY: tl.constexpr = tl.constexpr(EARLY)
_NO_TOKEN: tl.constexpr = tl.constexpr(NO_TOKEN)
_NONE_ALLOWED: tl.constexpr = tl.constexpr(NONE_ALLOWED)


@triton.jit
def penalties_of(reals, at):
    """(repetition, frequency, presence) in float32, and whether any is in effect."""
    repetition = tl.load(reals + at + column.REPETITION).to(tl.float32)
    frequency = tl.load(reals + at + column.FREQUENCY).to(tl.float32)
    presence = tl.load(reals + at + column.PRESENCE).to(tl.float32)
    return repetition, frequency, presence, (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)


@triton.jit
def prepare_kernel(
    logits, ends, marks, masses, sizes, lines, numbers, reals, counts, allowed, edits,
    vocab, stride, words, edits_stride, PLAIN: tl.constexpr, SLICE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """A slice of one row: change its logits in place and find their range; clear the histograms of a row that draws.

    ends [2, rows, slices] float32: highest and lowest logit. marks [2, rows, slices] int32: the first id of the
    highest; and 2 if a logit is +inf or NaN, plus 1 if any logit of the model is above -inf. PLAIN rows have no lines:
    their logits do not change, and they draw.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * SLICE + tl.arange(0, SLICE)
    inside = ids < vocab
    z = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    fault = tl.max(((z != z) | (z == float("inf"))).to(tl.int32), 0)
    alive = tl.max((z > float("-inf")).to(tl.int32), 0)
    heat = tl.full((), 1.0, tl.float64)
    if not PLAIN:
        line = tl.load(lines + row)
        at = line * column.WIDTH
        heat = tl.load(reals + at + column.TEMPERATURE)
        masked, edited = tl.load(numbers + at + column.ALLOWED) != 0, tl.load(numbers + at + column.EDITED) != 0
        repetition, frequency, presence, penalised = penalties_of(reals, at)
        if masked:
            word = tl.load(allowed + line * words + ids // 32, mask=inside, other=-1)
            z = tl.where(((word >> (ids % 32)) & 1) != 0, z, float("-inf"))
        if edited:
            edit = edits + line * edits_stride
            last = tl.load(numbers + at + column.LAST)
            early = tl.load(numbers + at + column.POSITION) < tl.load(numbers + at + column.MIN_TOKENS)
            for number in range(tl.load(edit)):
                one = edit + 1 + 3 * number
                after = tl.load(one + 2)
                holds = (after == _ALWAYS) | ((after == _EARLY) & early) | (after == last)
                z = tl.where((ids == tl.load(one)) & holds, z + tl.load(one + 1).to(tl.float32, bitcast=True), z)
        if penalised:
            count = tl.load(counts + line * vocab + ids, mask=inside, other=0)
            times = (count & (_IN_PROMPT - 1)).to(tl.float32)
            less = tl.where(z > 0.0, tl.div_rn(z, tl.zeros_like(z) + repetition), z * repetition)
            less = less - frequency * times - presence * (times > 0.0).to(tl.float32)
            z = tl.where(count != 0, less, z)
        if masked | edited | penalised:
            tl.store(logits + row * stride + ids, z, mask=inside)
            fault |= tl.max(((z != z) | (z == float("inf"))).to(tl.int32), 0)
    top = tl.max(z, 0)
    slices = tl.num_programs(1)
    here, lower = row * slices + part, tl.num_programs(0) * slices
    tl.store(ends + here, top)
    tl.store(ends + lower + here, tl.min(tl.where(z > float("-inf"), z, float("inf")), 0))
    tl.store(marks + here, tl.min(tl.where(inside & (z == top), ids, 2147483647), 0))
    tl.store(marks + lower + here, 2 * fault + alive)
    if (part == 0) & (heat > 0.0):
        bins = row * BINS + tl.arange(0, BINS)
        tl.store(masses + bins, tl.zeros([BINS], tl.int64))
        tl.store(sizes + bins, tl.zeros([BINS], tl.int32))


@triton.jit
def weigh_kernel(
    masses, sizes, logits, ends, lines, reals, vocab, stride, slices,
    PLAIN: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Add a slice of one row to its histograms: masses [R, BINS] int64, sizes [R, BINS] int32. Greedy rows have none.

    Bins descend from the top in equal steps; the last one has all tokens without mass. PLAIN rows have temperature 1.
    """
    row = tl.program_id(0).to(tl.int64)
    heat = tl.full((), 1.0, tl.float64)
    if not PLAIN:
        heat = tl.load(reals + tl.load(lines + row) * column.WIDTH + column.TEMPERATURE)
    if heat > 0.0:
        ids = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
        inside = ids < vocab
        z = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
        top, steps = range_of(ends, row, tl.num_programs(0), slices, heat, SLICES, BINS)
        mass = token_mass(z, top, heat, SHIFT)
        at = row * BINS + histogram_bin(z, mass, top, steps, BINS)
        tl.atomic_add(masses + at, mass, mask=inside & (mass > 0), sem="relaxed")
        tl.atomic_add(sizes + at, 1, mask=inside, sem="relaxed")


@triton.jit
def choose_kernel(
    tokens, masses, sizes, listed, logits, ends, marks, lines, numbers, reals, counts, vocab, stride, slices,
    SLICES: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's token, which becomes its line's latest output. `listed` [R, V] int32 is scratch for a bin's ids."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    line = tl.load(lines + row)
    at = line * column.WIDTH
    parts = tl.arange(0, SLICES)
    here, known = row * slices + parts, parts < slices
    slice_tops = tl.load(ends + here, mask=known, other=float("-inf"))
    top = tl.max(slice_tops, 0)
    best = tl.where(known & (slice_tops == top), tl.load(marks + here, mask=known, other=0), 2147483647)
    token = tl.min(best, 0).to(tl.int64)
    state = tl.load(marks + rows * slices + here, mask=known, other=0)
    lost = (tl.max(state >> 1, 0) != 0) | (tl.max(state & 1, 0) == 0)
    token = tl.where(lost, _NO_TOKEN, tl.where(top == float("-inf"), _NONE_ALLOWED, token))
    position = tl.load(numbers + at + column.POSITION)
    heat = tl.load(reals + at + column.TEMPERATURE)
    if (token >= 0) & (heat > 0.0):
        token = draw(
            row, at, position, heat, masses, sizes, listed, logits, ends, rows, numbers, reals, vocab, stride, slices,
            SLICES, BINS, SHIFT, BLOCK,
        )  # fmt: skip
    tl.store(tokens + row, token)
    tl.debug_barrier()  # every thread has read the line
    if token >= 0:
        tl.store(numbers + at + column.POSITION, position + 1)
        tl.store(numbers + at + column.LAST, token)
        _repetition, _frequency, _presence, penalised = penalties_of(reals, at)
        cell = counts + line * vocab + token
        tl.store(cell, tl.load(cell, mask=penalised, other=0) + 1, mask=penalised)


@triton.jit
def draw(
    row, at, position, heat, masses, sizes, listed, logits, ends, rows, numbers, reals, vocab, stride, slices,
    SLICES: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token at the row's random number.

    top_k, top_p and the draw are the same search, three times in a row: a loop compiles it only once.
    """
    z_row, list_row = logits + row * stride, listed + row * vocab
    mass_row, count_row = masses + row * BINS, sizes + row * BINS
    peak, steps = range_of(ends, row, rows, slices, heat, SLICES, BINS)
    bins = tl.arange(0, BINS)
    survivors = tl.sum(tl.load(mass_row + bins), 0)
    some = tl.sum(tl.load(count_row + bins, mask=bins < BINS - 1, other=0), 0)
    k, p = tl.load(numbers + at + column.TOP_K), tl.load(reals + at + column.TOP_P)
    u = uniform(tl.load(numbers + at + column.SEED), tl.load(numbers + at + column.CHOICE), position)
    key, ordinal, size = some * 0, survivors * 0, some * 0
    for search in range(3):
        if search == 1:
            survivors = likely_mass(
                survivors, tl.load(reals + at + column.MIN_P), z_row, peak, heat, vocab, SHIFT, BLOCK
            )
        share = tl.where(search == 1, tl.ceil(p * survivors.to(tl.float64)) - 1, u * survivors.to(tl.float64))
        target = tl.minimum(tl.maximum(share.to(tl.int64), 0), survivors - 1)
        target = tl.where(search == 0, (k - 1).to(tl.int64), target)
        if (search == 2) | ((search == 1) & (p < 1.0)) | ((search == 0) & (k > 0) & (k < some)):
            key, ordinal, through, size = find(
                target, z_row, mass_row, count_row, list_row, peak, steps, heat, vocab, search == 0, BINS, SHIFT, BLOCK
            )
            survivors = through
    return find_id(key, ordinal, size, z_row, list_row, BLOCK).to(tl.int64)


@triton.jit
def likely_mass(survivors, least, z_row, peak, heat, vocab, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The smaller of `survivors` and the mass of tokens whose weight is at least `least` of the top token's."""
    if least > 0.0:
        likely = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            z = tl.load(z_row + ids, mask=ids < vocab, other=float("-inf"))
            weight = tl.exp((z.to(tl.float64) - peak) / heat)
            likely += tl.where(weight >= least, token_mass(z, peak, heat, SHIFT), 0)
        survivors = tl.minimum(survivors, tl.sum(likely, 0))
    return survivors


def shift_of(vocab: int) -> int:
    """Fractional bits of a weight: as many as keep a row's sum below 2**62."""
    return 62 - max(1, (vocab - 1).bit_length())


@dataclass(frozen=True)
class Room:
    """What the launches of a step pass on: see `prepare_kernel`, `weigh_kernel` and `choose_kernel`."""

    ends: torch.Tensor
    marks: torch.Tensor
    masses: torch.Tensor
    sizes: torch.Tensor
    listed: torch.Tensor

    @property
    def slices(self) -> int:
        return self.ends.shape[2]


def prepare(logits: torch.Tensor, table: SamplingLines | None, lines: torch.Tensor, draws: bool) -> Room:
    """Change `logits` [R, V] float32 as `lines` [R] int64 of the table say, and find their ranges.

    Without a table nothing changes. Unless there are `draws` (some row has a temperature), there are no histograms.
    """
    rows, vocab = logits.shape
    ranges, drawing = (2, rows, triton.cdiv(vocab, SLICE)), rows if draws else 0
    room = Room(
        logits.new_empty(ranges),
        logits.new_empty(ranges, dtype=torch.int32),
        logits.new_empty((drawing, BINS), dtype=torch.int64),
        logits.new_empty((drawing, BINS), dtype=torch.int32),
        logits.new_empty((drawing, vocab), dtype=torch.int32),
    )
    tables = [lines] * 5 if table is None else [table.numbers, table.reals, table.counts, table.allowed, table.edits]
    prepare_kernel[ranges[1:]](
        logits, room.ends, room.marks, room.masses, room.sizes, lines, *tables, vocab, logits.stride(0),
        tables[3].stride(0), tables[4].stride(0), PLAIN=table is None, SLICE=SLICE, BINS=BINS, enable_fp_fusion=False,
    )  # fmt: skip
    return room


def weigh(logits: torch.Tensor, room: Room, table: SamplingLines | None, lines: torch.Tensor) -> None:
    """Fill the histograms; without a table, at temperature 1."""
    rows, vocab = logits.shape
    weigh_kernel[(rows, room.slices)](
        room.masses, room.sizes, logits, room.ends, lines, lines if table is None else table.reals, vocab,
        logits.stride(0), room.slices, PLAIN=table is None, SLICES=triton.next_power_of_2(room.slices), SLICE=SLICE,
        BINS=BINS, SHIFT=shift_of(vocab), enable_fp_fusion=False,
    )  # fmt: skip


def sample(logits: torch.Tensor, table: SamplingLines, lines: torch.Tensor, draws: bool = True) -> torch.Tensor:
    """The next tokens [R] int64 of rows with distinct `lines` [R] int64, or NO_TOKEN, or NONE_ALLOWED.

    Overwrites `logits` [R, V] float32 and advances the lines. `draws`: whether some row has a temperature.
    """
    rows, vocab = logits.shape
    tokens = torch.empty_like(lines)
    if not rows:
        return tokens
    room = prepare(logits, table, lines, draws)
    if draws:
        weigh(logits, room, table, lines)
    choose_kernel[(rows,)](
        tokens, room.masses, room.sizes, room.listed, logits, room.ends, room.marks, lines, table.numbers, table.reals,
        table.counts, vocab, logits.stride(0), room.slices, SLICES=triton.next_power_of_2(room.slices), BINS=BINS,
        SHIFT=shift_of(vocab), BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens
