"""Log-probabilities on the device, as `logprobs` defines them: of raw logits, ranks by descending logit, then id."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagoda_proto.params import MAX_LOGPROBS
from pagoda_worker.kernels.triton.find import find, range_of, sort_key
from pagoda_worker.kernels.triton.sampling import BINS, BLOCK, prepare, shift_of, weigh

TOP = triton.next_power_of_2(MAX_LOGPROBS)  # one compiled kernel for all values of num_top


@triton.jit(do_not_specialize=["num_top"])
def report_kernel(
    out, first_ids, masses, sizes, listed, logits, tokens, ends, vocab, stride, slices, num_top,
    TOP: tl.constexpr, SLICES: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. `listed` [R, V] and `first_ids` [R, TOP] int32 are scratch for ids."""
    row = tl.program_id(0).to(tl.int64)
    z_row, list_row, first_row = logits + row * stride, listed + row * vocab, first_ids + row * TOP
    mass_row, count_row = masses + row * BINS, sizes + row * BINS
    heat = tl.full((), 1.0, tl.float64)
    top, steps = range_of(ends, row, tl.num_programs(0), slices, heat, SLICES, BINS)
    mass = tl.sum(tl.load(mass_row + tl.arange(0, BINS)), 0).to(tl.float64)
    log_mass = top + tl.log(mass * (1.0 / (1 << SHIFT)))
    token = tl.load(tokens + row)
    own = tl.load(z_row + token)
    own_key = sort_key(own)
    key, ordinal, _mass, _size = find(
        token * 0 + num_top - 1, z_row, mass_row, count_row, list_row, top, steps, heat, vocab, True, BINS, SHIFT, BLOCK
    )
    before, taken, equals = token * 0, token * 0, token * 0
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        keys = sort_key(tl.load(z_row + ids, mask=ids < vocab, other=float("-inf")))
        ahead = (keys > own_key) | ((keys == own_key) & (ids < token))
        before += tl.sum((ahead & (ids < vocab)).to(tl.int64), 0)
        equal = (keys == key) & (ids < vocab)
        place = equals + tl.cumsum(equal.to(tl.int64), 0) - 1
        take = ((keys > key) & (ids < vocab)) | (equal & (place <= ordinal))
        at = taken + tl.cumsum(take.to(tl.int64), 0) - 1
        tl.store(first_row + at, ids, mask=take & (at < TOP))
        taken += tl.sum(take.to(tl.int64), 0)
        equals += tl.sum(equal.to(tl.int64), 0)
    tl.debug_barrier()
    lane = tl.arange(0, TOP)
    known = (lane < num_top) & (lane < taken)  # fewer only if there are NaNs, which have no place in the order
    ids = tl.load(first_row + lane, mask=known, other=0)
    z = tl.load(z_row + ids, mask=known, other=float("-inf"))
    keys = sort_key(z)
    ids_other = tl.load(first_row + lane, mask=known, other=0)[:, None]
    keys_other = sort_key(tl.load(z_row + ids_other, mask=known[:, None], other=float("-inf")))
    ahead = (keys_other > keys[None, :]) | ((keys_other == keys[None, :]) & (ids_other < ids[None, :]))
    place = tl.sum((ahead & known[:, None]).to(tl.int32), 0)
    line = out + row * (2 + 2 * num_top)
    tl.store(line, (own.to(tl.float64) - log_mass).to(tl.float32).to(tl.float64))
    tl.store(line + 1, (before + 1).to(tl.float64))
    tl.store(line + 2 + place, ids.to(tl.float64), mask=known)
    tl.store(line + 2 + num_top + place, (z.to(tl.float64) - log_mass).to(tl.float32).to(tl.float64), mask=known)


def report(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """Report on `tokens` [R] int64 by the raw `logits` [R, V] float32 -> [R, 2 + 2 * num_top] float64.

    `device_sampler.Chosen` documents the lines. `num_top` is at least 1 and at most V and MAX_LOGPROBS. The result for
    logits without a finite maximum is meaningless.
    """
    rows, vocab = logits.shape
    found = logits.new_empty((rows, 2 + 2 * num_top), dtype=torch.float64)
    if not rows:
        return found
    room = prepare(logits, None, tokens, draws=True)
    weigh(logits, room, None, tokens)
    report_kernel[(rows,)](
        found, logits.new_empty((rows, TOP), dtype=torch.int32), room.masses, room.sizes, room.listed, logits, tokens,
        room.ends, vocab, logits.stride(0), room.slices, num_top, TOP=TOP,
        SLICES=triton.next_power_of_2(room.slices), BINS=BINS, SHIFT=shift_of(vocab), BLOCK=BLOCK, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
    return found
