"""How a step's inputs reach a device: two copies carry what the host knows; what only the device knows is not copied.

The step before may have chosen a row's newest token on the device. The host then packs a placeholder, and the device
puts the id in its place.
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
    """Move `batch`, built on the host, to the device: one copy for its int64 tensors and one for its int32 tensors.

    Each tensor is aligned to 16 bytes, as a separate one would be, so that kernels compiled for that alignment fit.
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
    """Send tensors [n] of one dtype in one copy."""
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
    """Put `ids[sources[i]]` at place `places[i]` of the batch's tokens; free if there is nothing to put.

    An invalid id becomes 0, which any model can compute; the row ends when the host reads the ids.
    """
    if not places:
        return
    target, source = accelerator.upload(torch.tensor([places, sources])).unbind()
    batch.token_ids.index_copy_(0, target, ids.index_select(0, source).clamp_(min=0))
