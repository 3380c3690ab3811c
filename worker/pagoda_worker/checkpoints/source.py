"""Where a decoder gets its weights from: plain tensors, and matrices that may be quantised."""

from __future__ import annotations

from collections.abc import Iterator
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


def joined(parts: list[Weight], dtype: torch.dtype) -> Weight:
    """Matrices with the same inputs stacked into one: of their own format if they are quantised alike, in int8 if they
    differ only in what 8 bits hold nearly exactly, and otherwise in `dtype`."""
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    inputs = {(part.group, part.activation_bits) for part in quantized}
    if len(quantized) < len(parts) or len(inputs) > 1:
        return torch.cat([_plain(part, dtype) for part in parts])
    if len({(part.bits, part.floats, part.minima is None) for part in quantized}) > 1:
        if quantized[0].activation_bits != 8:
            return torch.cat([_plain(part, dtype) for part in parts])
        quantized = [_in_eight_bits(part) for part in quantized]
    return stacked(quantized)


def _in_eight_bits(part: QuantizedWeight) -> QuantizedWeight:
    if part.bits == 8:
        return part
    return quantize(dequantize(part), Format(bits=8, group=part.group, activation_bits=part.activation_bits))


def _plain(part: Weight, dtype: torch.dtype) -> torch.Tensor:
    return dequantize(part).to(dtype) if isinstance(part, QuantizedWeight) else part
