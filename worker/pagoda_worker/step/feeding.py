"""How a step's inputs reach a device: what the host knows in two copies, what only the device knows not at all.

A row's newest token may have been chosen on the device by the step before. The host then packs a placeholder, and the
id is put in its place on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from pagoda_worker.device.accelerator import Accelerator
from pagoda_worker.rows.batch import Batch, Places
from pagoda_worker.rows.slots import TokenSlots

ALIGNED_BYTES = 16


def uploaded(batch: Batch, accelerator: Accelerator) -> Batch:
    """`batch`, built on the host, on the device: one copy for its int64 tensors and one for its int32 tensors.

    Each begins where 16 bytes do, as a tensor of its own would: kernels are compiled for that, once.
    """
    adapted = [one for one in (batch.slots, batch.logit_slots) if one is not None]
    wide = (batch.token_ids, batch.positions, batch.logit_indices, *(one.tensor.long() for one in adapted))
    token_ids, positions, logit_indices, *rest = _sent(
        (*wide, batch.kv_indices, *(places.kv_indices for places in batch.others)), accelerator
    )
    sent, indices = rest[: len(adapted)], rest[len(adapted) :]
    slots = [TokenSlots(one.slots, there.device, there) for one, there in zip(adapted, sent, strict=True)]
    held = (batch.block_tables, *(places.block_tables for places in batch.others))
    lengths, *tables = _sent((batch.lengths, *(table.flatten() for table in held)), accelerator)
    first, *others = map(Places, indices, (table.view(held[0].shape) for table in tables))
    return replace(
        batch,
        token_ids=token_ids,
        positions=positions,
        logit_indices=logit_indices,
        kv_indices=first.kv_indices,
        block_tables=first.block_tables,
        others=tuple(others),
        slots=slots[0] if slots else None,
        logit_slots=slots[1] if slots else None,
        device_lengths=lengths,
    )


def _sent(parts: Sequence[torch.Tensor], accelerator: Accelerator) -> list[torch.Tensor]:
    """Tensors [n] of one dtype, in one copy."""
    step = ALIGNED_BYTES // parts[0].element_size()
    starts = [0, *accumulate(-(-len(part) // step) * step for part in parts)]
    packed = parts[0].new_zeros(starts[-1])
    for part, start in zip(parts, starts, strict=False):
        packed[start : start + len(part)] = part
    there = accelerator.upload(packed)
    return [there[start : start + len(part)] for part, start in zip(parts, starts, strict=False)]


def feed(
    batch: Batch, places: Sequence[int], sources: Sequence[int], ids: torch.Tensor, accelerator: Accelerator
) -> None:
    """Put `ids[sources[i]]` at place `places[i]` of the batch's tokens; nothing to put costs nothing.

    An id that is none becomes 0, which any model can compute; whoever reads the ids on the host ends the row.
    """
    if not places:
        return
    target, source = accelerator.upload(torch.tensor([places, sources])).unbind()
    batch.token_ids.index_copy_(0, target, ids.index_select(0, source).clamp_(min=0))
