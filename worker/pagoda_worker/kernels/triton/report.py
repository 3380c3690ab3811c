"""Log-probabilities on the device, as `logprobs` defines them: of the raw logits, ranks by descending logit and id."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagoda_worker.kernels.triton.find import find, range_of, sort_key
from pagoda_worker.kernels.triton.sampling import BINS, BLOCK, prepare, shift_of, weigh


@dataclass(frozen=True)
class Report:
    """Of R tokens and of the n most likely ones of their rows, in order."""

    logprobs: torch.Tensor  # [R] float32
    ranks: torch.Tensor  # [R] int32, from 1
    top_ids: torch.Tensor  # [R, n] int64
    top_logprobs: torch.Tensor  # [R, n] float32


@triton.jit
def report_kernel(
    logprobs, ranks, top_out, top_logprobs, masses, counts, listed, first_ids, logits, tokens, tops, lows,
    temperature, vocab, stride, slices, num_top,
    TOP: tl.constexpr, SLICES: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. `listed` [R, V] and `first_ids` [R, TOP] int32 are room for ids; TOP is 0 or a power of two."""
    row = tl.program_id(0).to(tl.int64)
    z_row, list_row = logits + row * stride, listed + row * vocab
    mass_row, count_row = masses + row * BINS, counts + row * BINS
    heat = tl.load(temperature + row)
    top, steps = range_of(tops, lows, row, slices, heat, SLICES, BINS)
    mass = tl.sum(tl.load(mass_row + tl.arange(0, BINS)), 0).to(tl.float64)
    log_mass = top + tl.log(mass * (1.0 / (1 << SHIFT)))
    token = tl.load(tokens + row)
    own = tl.load(z_row + token)
    own_key = sort_key(tl.where(own == 0.0, 0.0, own))
    key, ordinal = own_key, token * 0
    if TOP > 0:
        key, ordinal, _mass, _size = find(
            (num_top - 1).to(tl.int64), z_row, mass_row, count_row, list_row, top, steps, heat, vocab, True,
            BINS, SHIFT, BLOCK,
        )  # fmt: skip
    before = token * 0
    taken, equals = token * 0, token * 0
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = tl.load(z_row + ids, mask=ids < vocab, other=float("-inf"))
        keys = sort_key(tl.where(z == 0.0, 0.0, z))
        ahead = (keys > own_key) | ((keys == own_key) & (ids < token))
        before += tl.sum((ahead & (ids < vocab)).to(tl.int64), 0)
        if TOP > 0:
            equal = (keys == key) & (ids < vocab)
            place = equals + tl.cumsum(equal.to(tl.int64), 0) - 1
            take = (keys > key) | (equal & (place <= ordinal))
            tl.store(first_ids + row * TOP + taken + tl.cumsum(take.to(tl.int64), 0) - 1, ids, mask=take)
            taken += tl.sum(take.to(tl.int64), 0)
            equals += tl.sum(equal.to(tl.int64), 0)
    tl.store(logprobs + row, (own.to(tl.float64) - log_mass).to(tl.float32))
    tl.store(ranks + row, (before + 1).to(tl.int32))
    if TOP > 0:
        tl.debug_barrier()
        lane = tl.arange(0, TOP)
        known = lane < num_top
        ids = tl.load(first_ids + row * TOP + lane, mask=known, other=0)
        z = tl.load(z_row + ids, mask=known, other=float("-inf"))
        keys = sort_key(tl.where(z == 0.0, 0.0, z))
        ids_other = tl.load(first_ids + row * TOP + lane, mask=known, other=0)[:, None]
        z_other = tl.load(z_row + ids_other, mask=known[:, None], other=float("-inf"))
        keys_other = sort_key(tl.where(z_other == 0.0, 0.0, z_other))
        ahead = (keys_other > keys[None, :]) | ((keys_other == keys[None, :]) & (ids_other < ids[None, :]))
        place = tl.sum((ahead & known[:, None]).to(tl.int32), 0)
        at = row * num_top + place
        tl.store(top_out + at, ids.to(tl.int64), mask=known)
        tl.store(top_logprobs + at, (z.to(tl.float64) - log_mass).to(tl.float32), mask=known)


def report(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> Report:
    """On `tokens` [R] int64 by the raw `logits` [R, V] float32, which must have a finite maximum in each row."""
    rows, vocab = logits.shape
    found = Report(
        logits.new_empty(rows),
        logits.new_empty(rows, dtype=torch.int32),
        logits.new_empty((rows, num_top), dtype=torch.int64),
        logits.new_empty((rows, num_top)),
    )
    if not rows:
        return found
    _, ranges = prepare(logits, None)
    plain = torch.ones(rows, dtype=torch.float64, device=logits.device)
    masses, counts = weigh(logits, ranges, plain)
    room = 0 if not num_top else max(2, triton.next_power_of_2(num_top))
    listed = logits.new_empty((rows, vocab), dtype=torch.int32)
    first_ids = logits.new_empty((rows, max(1, room)), dtype=torch.int32)
    report_kernel[(rows,)](
        found.logprobs, found.ranks, found.top_ids, found.top_logprobs, masses, counts, listed, first_ids, logits,
        tokens, ranges.tops, ranges.lows, plain, vocab, logits.stride(0), ranges.slices, num_top, TOP=room,
        SLICES=triton.next_power_of_2(ranges.slices), BINS=BINS, SHIFT=shift_of(vocab), BLOCK=BLOCK,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return found
