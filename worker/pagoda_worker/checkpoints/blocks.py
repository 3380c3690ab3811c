"""Matrices in blocks, as in GGUF files: rows of blocks of 32 or 256 values with scales of their own.

A block is `scale * level`, or `scale * level + minimum`, or consists of smaller blocks like that. Where these have 32
values, and at most 4 bits if there are minima, they convert to our own levels without rounding any (`Levels`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda_worker.kernels.quantized import AT_ONCE, FLOATS, powers

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Levels:
    """32 levels per scale: (levels - 2**(bits - 1)) * scales, or levels * scales + minima.

    Attributes:
        of: Blocks [B, bytes] -> levels [B, values] uint8, and scales and, if there are any, minima [B, values / 32]
            float32.
        coded: Levels are E2M1 bit patterns.
    """

    bits: int
    of: Callable[[Tensor], tuple[Tensor, ...]]
    coded: bool = False
    minima: bool = False


@dataclass(frozen=True)
class Block:
    """`values` in `num_bytes`. One of `levels` and `floats` ([B, bytes] -> float32 [B, values]) reads them."""

    values: int
    num_bytes: int
    levels: Levels | None = None
    floats: Callable[[Tensor], Tensor] | None = None

    def widened(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        """Bytes of rows [.., R] -> their values [.., K] in `dtype`, each rounded once."""
        rows = raw.reshape(-1, raw.shape[-1])
        per_row = raw.shape[-1] // self.num_bytes * self.values
        wide = torch.empty(len(rows), per_row, dtype=dtype, device=raw.device)
        step = max(1, AT_ONCE // per_row)
        for start in range(0, len(rows), step):
            blocks = rows[start : start + step].reshape(-1, self.num_bytes)
            wide[start : start + step] = self._floats(blocks).view(-1, per_row)
        return wide.view(*raw.shape[:-1], per_row)

    def _floats(self, blocks: Tensor) -> Tensor:
        if self.floats is not None:
            return self.floats(blocks)
        if self.levels is None:
            raise TypeError("a block format has neither levels nor floats")
        levels, scales, *minima = self.levels.of(blocks)
        if self.levels.coded:
            numbers = torch.tensor(FLOATS, device=levels.device)[levels.long()]
        else:
            numbers = levels.float() - (0 if minima else 1 << self.levels.bits - 1)
        scaled = numbers.view(*scales.shape, -1) * scales.unsqueeze(-1)
        return (scaled + minima[0].unsqueeze(-1) if minima else scaled).flatten(1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """A float16 number of each block [B, 1], as float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of the bytes of each row, then the high ones."""
    return torch.cat((packed & 0xF, packed >> 4), -1)


def _bits(packed: Tensor) -> Tensor:
    """[B, n] -> [B, 8 n]: the lowest bit of the first byte first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 1).flatten(1)


def _table(levels: Tensor) -> Tensor:
    """Nibbles -> their levels, plus 128."""
    known = torch.tensor([value + 128 for value in IQ4], dtype=torch.uint8, device=levels.device)
    return known[levels.long()]


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[:, 2:] ^ 0x80, _half(blocks, 0)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0)


def _mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _nibbles(blocks[:, 1:]), powers(blocks[:, :1])


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return (_nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4) + (128 - 16), _half(blocks, 0)


def _iq4_nl(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _table(_nibbles(blocks[:, 2:])), _half(blocks, 0)


def _iq4_xs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale, 8 scales of 6 bits (the high two first, then the low four), levels."""
    twos = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, 2:4].unsqueeze(-1) >> twos & 3).flatten(1)
    low = torch.stack((blocks[:, 4:8] & 0xF, blocks[:, 4:8] >> 4), -1).flatten(1)
    scales = (low | high << 4).float() - 32
    return _table(_nibbles(blocks[:, 8:].reshape(len(blocks), 8, 16)).flatten(1)), _half(blocks, 0) * scales


def _q4_1(blocks: Tensor) -> tuple[Tensor, ...]:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_1(blocks: Tensor) -> Tensor:
    levels = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0) * levels + _half(blocks, 2)


def _pairs(packed: Tensor) -> Tensor:
    """[B, 64] -> [B, 256]: of each 32 bytes the lowest two bits, then the next two, and so on."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device).view(4, 1)
    return (packed.view(-1, 2, 1, 32) >> shifts & 3).flatten(1)


def _q2_k(blocks: Tensor) -> Tensor:
    packed, levels = blocks[:, :16], _pairs(blocks[:, 16:80].contiguous())
    scales, minima = _half(blocks, 80) * (packed & 0xF), _half(blocks, 82) * (packed >> 4)
    return (scales.unsqueeze(-1) * levels.view(-1, 16, 16) - minima.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """Third bits of levels, the lower two, scales of 6 bits (the low four first), scale."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
    third = (blocks[:, :32].unsqueeze(1) >> shifts & 1).flatten(1)
    levels = (_pairs(blocks[:, 32:96].contiguous()) | third << 2).float() - 4
    twos = shifts[:4] * 2
    high = (blocks[:, 104:108].unsqueeze(1) >> twos & 3).flatten(1)
    scales = (_nibbles(blocks[:, 96:104]) | high << 4).float() - 32
    return ((_half(blocks, 108) * scales).unsqueeze(-1) * levels.view(-1, 16, 16)).flatten(1)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Two float16 numbers, then 8 scales and 8 minima, which are negative, of 6 bits in 12 bytes: both [B, 8]."""
    scale, minimum, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((scale & 0x3F, both & 0xF | scale >> 2 & 0x30), -1)
    minima = torch.cat((minimum & 0x3F, both >> 4 | minimum >> 2 & 0x30), -1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q4_k(blocks: Tensor) -> tuple[Tensor, ...]:
    levels = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 256)
    return levels, *_scales_and_minima(blocks)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
    fifth = blocks[:, 16:48].unsqueeze(1) >> shifts & 1
    levels = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32) | fifth << 4
    return (levels * scales.unsqueeze(-1) + minima.unsqueeze(-1)).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    levels = (low | _pairs(blocks[:, 128:192].contiguous()) << 4).float() - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    return (scales.unsqueeze(-1) * levels.view(-1, 16, 16)).flatten(1)


BLOCKS = {
    "Q8_0": Block(32, 34, Levels(8, _q8_0)),
    "Q4_0": Block(32, 18, Levels(4, _q4_0)),
    "MXFP4": Block(32, 17, Levels(4, _mxfp4, coded=True)),
    "Q4_1": Block(32, 20, Levels(4, _q4_1, minima=True)),
    "Q4_K": Block(256, 144, Levels(4, _q4_k, minima=True)),
    "Q5_0": Block(32, 22, Levels(8, _q5_0)),
    "IQ4_NL": Block(32, 18, Levels(8, _iq4_nl)),
    "IQ4_XS": Block(256, 136, Levels(8, _iq4_xs)),
    "Q5_1": Block(32, 24, floats=_q5_1),
    "Q2_K": Block(256, 84, floats=_q2_k),
    "Q3_K": Block(256, 110, floats=_q3_k),
    "Q5_K": Block(256, 176, floats=_q5_k),
    "Q6_K": Block(256, 210, floats=_q6_k),
}
