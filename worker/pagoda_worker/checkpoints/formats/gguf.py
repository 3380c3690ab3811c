"""GGUF: every matrix consists of blocks of the kind that its own header names; see `checkpoints.blocks`.

Blocks with one scale per 32 levels become our levels unchanged, also those of 4 bits with minima. All others are
widened and rounded to int8 in groups of 32, which takes about half the bytes of bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from pagoda_worker.checkpoints.blocks import BLOCKS, Block
from pagoda_worker.checkpoints.checkpoint import Wanted
from pagoda_worker.checkpoints.fingerprint import Entry
from pagoda_worker.checkpoints.formats.layout import Layout, Packing, Stored
from pagoda_worker.kernels.quantized import AT_ONCE, Format, QuantizedWeight, around_the_middle, quantize, stacked

GROUP = 32
ROUNDED = Format(bits=8, group=GROUP, activation_bits=8)
ROUNDED_BITS = 8 + 32 / GROUP  # of a weight: its level, and its part of a float32 scale


@dataclass(frozen=True)
class BlockPacking:
    kind: str  # of BLOCKS

    @property
    def form(self) -> Format:
        """Activations are rounded, as by the format's own program, except where levels are floats: no kernel does
        that."""
        levels = BLOCKS[self.kind].levels
        if levels is None or levels.bits == 8:
            return ROUNDED
        bits = 16 if levels.coded else 8
        return Format(bits=4, group=GROUP, activation_bits=bits, floats=levels.coded, minima=levels.minima)

    def tensors(self, linear: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        return {"weight": Wanted(shape, (self.kind,))}

    def faults(self, stored: Stored) -> list[str]:
        return []

    def read(self, stored: Stored) -> QuantizedWeight:
        block, rows = BLOCKS[self.kind], stored["weight"]
        return stacked([self._read(block, part) for part in torch.split(rows, max(1, AT_ONCE // stored.shape[1]))])

    def _read(self, block: Block, rows: torch.Tensor) -> QuantizedWeight:
        if block.levels is None:
            return quantize(block.widened(rows, torch.float32), self.form)
        levels, *others = (part.view(len(rows), -1) for part in block.levels.of(rows.reshape(-1, block.num_bytes)))
        if not block.levels.minima:
            return around_the_middle(levels, others[0], self.form)
        scales, minima = map(_as_kept, others)
        return replace(around_the_middle(levels, scales, self.form), minima=minima)


def _as_kept(numbers: torch.Tensor) -> torch.Tensor:
    """Scales or minima, in Q4_K products, as the kernels keep them: rounded to float16, unless one is too large."""
    halves = numbers.half().float()
    return halves if bool(halves.isfinite().all()) else numbers


def block_layout(entries: Mapping[str, Entry]) -> Layout | None:
    """The layout of these matrices; None if none is in blocks."""

    def packing_of(linear: str) -> Packing | None:
        entry = entries.get(f"{linear}.weight")
        return BlockPacking(entry.dtype) if entry is not None and entry.dtype in BLOCKS else None

    return Layout("gguf", packing_of) if any(entry.dtype in BLOCKS for entry in entries.values()) else None


def rounding_remark(entries: Mapping[str, Entry], linears: Mapping[str, tuple[int, int]]) -> str:
    """A remark on matrices that the kernels cannot hold as they are; "" if there are none."""
    found = [entry for name in linears if (entry := entries.get(f"{name}.weight")) is not None]
    rounded = [entry for entry in found if entry.dtype in BLOCKS and BLOCKS[entry.dtype].levels is None]
    if not rounded:
        return ""
    values = sum(BLOCKS[entry.dtype].values * (entry.num_bytes // BLOCKS[entry.dtype].num_bytes) for entry in rounded)
    before, after = sum(entry.num_bytes for entry in rounded), values * ROUNDED_BITS / 8
    kinds = ", ".join(sorted({entry.dtype for entry in rounded}))
    return (
        f"{len(rounded)} matrices of {kinds}, and those merged with them, are rounded to int8 in groups of {GROUP}, "
        f"as no kernel takes them as they are: {after / 2**20:.0f} MiB instead of {before / 2**20:.0f}"
    )
