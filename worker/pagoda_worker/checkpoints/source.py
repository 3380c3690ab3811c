"""Where a decoder gets its weights from: plain tensors, and matrices that may be quantised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch

from pagoda_worker.kernels.quantized import QuantizedWeight, Weight, dequantize


class Source(Protocol):
    def tensor(self, name: str) -> torch.Tensor:
        """A norm, a bias or the embedding, in the run dtype on the device."""

    def exact(self, name: str) -> torch.Tensor:
        """The same in float32."""

    def linear(self, name: str) -> Weight:
        """The matrix [N, K] of a linear layer: quantised, or in the run dtype."""

    def widened(self, name: str) -> torch.Tensor:
        """The matrix [N, K] of a linear layer in the run dtype, even if it is quantised."""

    def experts(self, name: str) -> Iterator[Weight]:
        """The matrices [N, K] of a tensor [E, N, K], in the form that `linear` returns."""

    def tied(self, embedding: torch.Tensor) -> Weight:
        """The embedding [V, H] as the output matrix."""


def joined(parts: list[Weight], dtype: torch.dtype) -> Weight:
    """Matrices with the same inputs stacked into one; in `dtype` unless they are quantised alike."""
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) < len(parts) or len({(w.bits, w.group, w.activation_bits, w.floats) for w in quantized}) > 1:
        return torch.cat([_plain(part, dtype) for part in parts])
    zeros = None
    if any(part.zeros is not None for part in quantized):
        zeros = torch.cat([_zeros(part) for part in quantized])
    levels, scales = torch.cat([part.levels for part in quantized]), torch.cat([part.scales for part in quantized])
    return replace(quantized[0], levels=levels, scales=scales, zeros=zeros)


def _plain(part: Weight, dtype: torch.dtype) -> torch.Tensor:
    return dequantize(part).to(dtype) if isinstance(part, QuantizedWeight) else part


def _zeros(part: QuantizedWeight) -> torch.Tensor:
    if part.zeros is not None:
        return part.zeros
    return torch.full(part.scales.shape, 1 << part.bits - 1, dtype=torch.uint8, device=part.scales.device)
