"""Where a decoder gets its weights from: plain tensors, and matrices that may be quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from pagoda_worker.kernels.quantized import Format, QuantizedWeight, Weight, dequantize, quantize, stacked


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


def joined(
    parts: list[Weight], dtype: torch.dtype, rounded: Callable[[torch.Tensor, Format], QuantizedWeight] = quantize
) -> Weight:
    """Matrices with the same inputs stacked into one: in their own format if they are quantised alike; in int8 if they
    have groups of the same size, and one of them rounds activations; otherwise in `dtype`."""
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts):
        if len({(w.bits, w.group, w.activation_bits, w.floats, w.minima is None) for w in quantized}) == 1:
            return stacked(quantized)
        if len({w.group for w in quantized}) == 1 and any(w.activation_bits == 8 for w in quantized):
            form = Format(bits=8, group=quantized[0].group, activation_bits=8)
            return stacked([w if w.bits == w.activation_bits == 8 else rounded(dequantize(w), form) for w in quantized])
    return torch.cat([_plain(part, dtype) for part in parts])


def _plain(part: Weight, dtype: torch.dtype) -> torch.Tensor:
    return dequantize(part).to(dtype) if isinstance(part, QuantizedWeight) else part
