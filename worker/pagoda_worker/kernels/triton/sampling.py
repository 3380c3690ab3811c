"""Sampling on the device, by the definition of `sampler`, without a sort.

Weights are whole numbers, exp((logit - top) / temperature) in units of 2**-s (s about 44). Sums of whole numbers are
exact, so neither the number of programs nor the order of their atomics can show in a result. The price: a token's
weight is off by up to one unit, and a draw that comes closer to a border between two tokens than the units of a row
add up to (under 1e-8 of the mass for 150 000 tokens) may fall on the other side of it than the CPU's would.

Three launches: `prepare` changes the logits as requests ask and finds their range; `weigh` makes a histogram of masses
and counts over that range; `choose` finds tokens. To *find* is: which is the first token, in descending logit and
ascending id, whose cumulative mass (or count) exceeds a target? The histogram says in which bin; the tokens of the bin,
a few hundred, are listed in order of id; bisection over their logits' bits finds the logit, and a division how many of
its equals come before. top_k is a find by count, top_p and the draw are finds by mass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagoda_worker.kernels.triton.find import find, find_id, histogram_bin, range_of, token_mass
from pagoda_worker.kernels.triton.philox import uniform

BINS = 2048
SLICE = 4096  # logits that one program of `prepare` and `weigh` reads
BLOCK = 2048  # logits that `choose` reads at a time
OK, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2
IN_PROMPT = 1 << 30  # set in a token's count if it is in the prompt; the rest counts it in the output

_IN_PROMPT: tl.constexpr = tl.constexpr(IN_PROMPT)


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What R rows ask of sampling, as tensors on the device. Optional parts cost nothing where no row has them.

    Attributes:
        temperature: [R] float64; 0 is greedy.
        top_k: [R] int32; 0 keeps all.
        top_p, min_p: [R] float64.
        seed: [R] int64, the bits of the unsigned 64-bit seed.
        choice, position: [R] int64; position counts the row's outputs so far.
        penalties: [R, 3] float32: repetition, frequency, presence; neutral is 1, 0, 0.
        counts: [C, V] int32: how often a token is in the output, plus IN_PROMPT.
        counts_row: [R] int32, line of `counts`; -1 for rows without penalties.
        allowed: [A, ceil(V / 32)] int32 bit masks, lowest bit first; allowed_row: [R] int32, -1 allows all.
        edit_ids, edit_values, num_edits: [R, E] int32, [R, E] float32, [R] int32: what is added to these logits. A
            token that is forbidden (a bad word's last, an ending before min_tokens) gets -inf. Ids are distinct.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    position: torch.Tensor
    penalties: torch.Tensor
    counts: torch.Tensor | None = None
    counts_row: torch.Tensor | None = None
    allowed: torch.Tensor | None = None
    allowed_row: torch.Tensor | None = None
    edit_ids: torch.Tensor | None = None
    edit_values: torch.Tensor | None = None
    num_edits: torch.Tensor | None = None


@dataclass(frozen=True)
class Tokens:
    """Per row: token_ids [R] int64, and status [R] int32: OK, or why the token means nothing."""

    token_ids: torch.Tensor
    status: torch.Tensor


@triton.jit
def prepare_kernel(
    scores, tops, top_ids, lows, faults, alive, logits, vocab, stride, words, num_edits_max,
    penalties, counts, counts_row, allowed, allowed_row, edit_ids, edit_values, num_edits,
    COUNTS: tl.constexpr, ALLOWED: tl.constexpr, EDITS: tl.constexpr, STORE: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """A slice of one row: change its logits, leave them in `scores`, and their range in [R, slices] arrays."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * SLICE + tl.arange(0, SLICE)
    inside = ids < vocab
    z = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    fault = tl.max(((z != z) | (z == float("inf"))).to(tl.int32), 0)
    any_alive = tl.max((z > float("-inf")).to(tl.int32), 0)
    if ALLOWED:
        line = tl.load(allowed_row + row).to(tl.int64)
        word = tl.load(allowed + line * words + ids // 32, mask=inside & (line >= 0), other=-1)
        z = tl.where(((word >> (ids % 32)) & 1) != 0, z, float("-inf"))
    if EDITS:
        for edit in range(tl.load(num_edits + row)):
            at = row * num_edits_max + edit
            z = tl.where(ids == tl.load(edit_ids + at), z + tl.load(edit_values + at), z)
    if COUNTS:
        line = tl.load(counts_row + row).to(tl.int64)
        count = tl.load(counts + line * vocab + ids, mask=inside & (line >= 0), other=0)
        repetition, frequency = tl.load(penalties + row * 3), tl.load(penalties + row * 3 + 1)
        presence = tl.load(penalties + row * 3 + 2)
        times = (count & (_IN_PROMPT - 1)).to(tl.float32)
        less = tl.where(z > 0.0, tl.div_rn(z, tl.zeros_like(z) + repetition), z * repetition)
        less = less - frequency * times - presence * (times > 0.0).to(tl.float32)
        z = tl.where(count != 0, less, z)
    z = tl.where(z == 0.0, 0.0, z)  # one zero of the two
    if STORE:
        tl.store(scores + row * vocab + ids, z, mask=inside)
    top = tl.max(z, 0)
    fault |= tl.max(((z != z) | (z == float("inf"))).to(tl.int32), 0)
    at = row * tl.num_programs(1) + part
    tl.store(tops + at, top)
    tl.store(top_ids + at, tl.min(tl.where(inside & (z == top), ids, 2147483647), 0))
    tl.store(lows + at, tl.min(tl.where(z > float("-inf"), z, float("inf")), 0))
    tl.store(faults + at, fault)
    tl.store(alive + at, any_alive)


@triton.jit
def weigh_kernel(
    masses, counts, scores, tops, lows, temperature, vocab, stride, slices,
    SLICES: tl.constexpr, SLICE: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Add a slice of one row to its histograms: masses [R, BINS] int64, counts [R, BINS] int32. Greedy rows have none.

    Bins descend from the top in equal steps; the last one has every token of no mass.
    """
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    if heat > 0.0:
        ids = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
        inside = ids < vocab
        z = tl.load(scores + row * stride + ids, mask=inside, other=float("-inf"))
        top, steps = range_of(tops, lows, row, slices, heat, SLICES, BINS)
        mass = token_mass(z, top, heat, SHIFT)
        at = row * BINS + histogram_bin(z, mass, top, steps, BINS)
        tl.atomic_add(masses + at, mass, mask=inside & (mass > 0), sem="relaxed")
        tl.atomic_add(counts + at, 1, mask=inside, sem="relaxed")


@triton.jit
def choose_kernel(
    token_ids, status, masses, counts, listed, scores, tops, top_ids, lows, faults, alive,
    temperature, top_k, top_p, min_p, seed, choice, position, vocab, slices,
    SLICES: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's token. `listed` [R, V] int32 is room for the ids of a bin."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    parts = tl.arange(0, SLICES)
    at, known = row * slices + parts, parts < slices
    slice_tops = tl.load(tops + at, mask=known, other=float("-inf"))
    top = tl.max(slice_tops, 0)
    fault = tl.max(tl.load(faults + at, mask=known, other=0), 0) != 0
    nothing = tl.max(tl.load(alive + at, mask=known, other=0), 0) == 0
    best = tl.where(known & (slice_tops == top), tl.load(top_ids + at, mask=known, other=0), 2147483647)
    token = tl.min(best, 0).to(tl.int64)
    state = tl.where(fault | nothing, 1, tl.where(top == float("-inf"), 2, 0))
    if (state == 0) & (heat > 0.0):
        z_row, list_row = scores + row * vocab, listed + row * vocab
        mass_row, count_row = masses + row * BINS, counts + row * BINS
        peak, steps = range_of(tops, lows, row, slices, heat, SLICES, BINS)
        bins = tl.arange(0, BINS)
        total = tl.sum(tl.load(mass_row + bins), 0)
        k = tl.load(top_k + row).to(tl.int64)
        if (k > 0) & (k < tl.sum(tl.load(count_row + bins, mask=bins < BINS - 1, other=0), 0)):
            _key, _ordinal, total, _size = find(
                k - 1, z_row, mass_row, count_row, list_row, peak, steps, heat, vocab, True, BINS, SHIFT, BLOCK
            )
        survivors = total
        p = tl.load(top_p + row)
        if p < 1.0:
            target = tl.ceil(p * total.to(tl.float64)).to(tl.int64) - 1
            target = tl.minimum(tl.maximum(target, 0), total - 1)
            _key, _ordinal, survivors, _size = find(
                target, z_row, mass_row, count_row, list_row, peak, steps, heat, vocab, False, BINS, SHIFT, BLOCK
            )
        least = tl.load(min_p + row)
        if least > 0.0:
            likely = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocab, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                z = tl.load(z_row + ids, mask=ids < vocab, other=float("-inf"))
                weight = tl.exp((z.to(tl.float64) - peak) / heat)
                likely += tl.where(weight >= least, token_mass(z, peak, heat, SHIFT), 0)
            survivors = tl.minimum(survivors, tl.sum(likely, 0))
        u = uniform(tl.load(seed + row), tl.load(choice + row), tl.load(position + row))
        target = tl.minimum((u * survivors.to(tl.float64)).to(tl.int64), survivors - 1)
        key, ordinal, _, size = find(
            target, z_row, mass_row, count_row, list_row, peak, steps, heat, vocab, False, BINS, SHIFT, BLOCK
        )
        token = find_id(key, ordinal, size, z_row, list_row, BLOCK).to(tl.int64)
    tl.store(token_ids + row, tl.where(state == 0, token, 0))
    tl.store(status + row, state)


def shift_of(vocab: int) -> int:
    """Bits behind the point of a weight: as many as keep a row's sum below 2**62."""
    return 62 - max(1, (vocab - 1).bit_length())


@dataclass(frozen=True)
class Ranges:
    """What `prepare` finds out about R rows, [R, slices] each: see `prepare_kernel`."""

    tops: torch.Tensor
    top_ids: torch.Tensor
    lows: torch.Tensor
    faults: torch.Tensor
    alive: torch.Tensor

    @property
    def slices(self) -> int:
        return self.tops.shape[1]


def prepare(logits: torch.Tensor, requests: Requests | None) -> tuple[torch.Tensor, Ranges]:
    """logits [R, V] float32 -> processed logits [R, V] and their ranges; without requests, as they are."""
    rows, vocab = logits.shape
    size = (rows, triton.cdiv(vocab, SLICE))
    whole = logits.new_empty((3, *size), dtype=torch.int32)
    tops, lows = logits.new_empty((2, *size))
    ranges = Ranges(tops, whole[0], lows, whole[1], whole[2])
    scores = logits if requests is None else logits.new_empty(rows, vocab)
    unused = logits

    def part(name: str) -> torch.Tensor:
        tensor: torch.Tensor | None = getattr(requests, name, None)
        return unused if tensor is None else tensor

    allowed, edits = part("allowed"), part("edit_ids")
    prepare_kernel[size](
        scores, ranges.tops, ranges.top_ids, ranges.lows, ranges.faults, ranges.alive, logits, vocab, logits.stride(0),
        allowed.shape[1], edits.shape[1], part("penalties"), part("counts"), part("counts_row"), allowed,
        part("allowed_row"), edits, part("edit_values"), part("num_edits"), COUNTS=part("counts") is not unused,
        ALLOWED=allowed is not unused, EDITS=edits is not unused, STORE=requests is not None, SLICE=SLICE,
        enable_fp_fusion=False,
    )  # fmt: skip
    return scores, ranges


def weigh(scores: torch.Tensor, ranges: Ranges, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The histograms of `weigh_kernel`."""
    rows, vocab = scores.shape
    masses = torch.zeros(rows, BINS, dtype=torch.int64, device=scores.device)
    counts = torch.zeros(rows, BINS, dtype=torch.int32, device=scores.device)
    weigh_kernel[(rows, ranges.slices)](
        masses, counts, scores, ranges.tops, ranges.lows, temperature, vocab, scores.stride(0), ranges.slices,
        SLICES=triton.next_power_of_2(ranges.slices), SLICE=SLICE, BINS=BINS, SHIFT=shift_of(vocab),
        enable_fp_fusion=False,
    )  # fmt: skip
    return masses, counts


def sample(logits: torch.Tensor, requests: Requests) -> Tokens:
    """The next token of each row of `logits` [R, V] float32, which are left as they are."""
    rows, vocab = logits.shape
    found = Tokens(
        torch.empty(rows, dtype=torch.int64, device=logits.device),
        torch.empty(rows, dtype=torch.int32, device=logits.device),
    )
    if not rows:
        return found
    scores, ranges = prepare(logits, requests)
    masses, counts = weigh(scores, ranges, requests.temperature)
    choose_kernel[(rows,)](
        found.token_ids, found.status, masses, counts, torch.empty_like(scores, dtype=torch.int32), scores,
        ranges.tops, ranges.top_ids, ranges.lows, ranges.faults, ranges.alive, requests.temperature, requests.top_k,
        requests.top_p, requests.min_p, requests.seed, requests.choice, requests.position, vocab, ranges.slices,
        SLICES=triton.next_power_of_2(ranges.slices), BINS=BINS, SHIFT=shift_of(vocab), BLOCK=BLOCK,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return found
