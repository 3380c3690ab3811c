"""Tables with an entry per position of a row, allocated before any row is read, within the available memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagoda_worker.checkpoints.rope import RopeShape, RotaryTable
from pagoda_worker.device.available import GIB, available_bytes

SHARE = 0.5  # of available memory: weights are loaded after them


class TooManyPositions(ValueError):
    """Tables of so many positions would not fit; the message names the option."""


def rotary_tables(
    shapes: Sequence[RopeShape], max_positions: int, device: torch.device, others: int = 0, *, copies: int = 1
) -> list[RotaryTable]:
    """A table for each shape, with `copies` of all positions. `others`: bytes per position of further tables.

    Raises:
        TooManyPositions: before anything is allocated.
    """
    taken = max_positions * (others + copies * sum(shape.bytes_per_position for shape in shapes))
    available = available_bytes(device)
    if taken > available * SHARE:
        raise TooManyPositions(
            f"position tables for {max_positions} tokens take {taken / GIB:.2f} GiB, more than {SHARE:.0%} of the "
            f"{available / GIB:.2f} GiB of available memory: lower max_model_len"
        )
    return [RotaryTable(shape, max_positions, device, copies) for shape in shapes]
