"""MXFP4 (the microscaling formats of the Open Compute Project) as gpt-oss stores its experts.

    {name}_blocks [E, N, K / 32, 16] uint8: E2M1 floats, two to a byte, the lower half first
    {name}_scales [E, N, K / 32] uint8: the exponent of a power of two, plus 127

All other matrices are stored as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pagoda_worker.checkpoints.checkpoint import Wanted
from pagoda_worker.checkpoints.config_reader import ConfigReader, UnsupportedConfig
from pagoda_worker.checkpoints.formats.layout import Layout, num_groups
from pagoda_worker.kernels.quantized import Format, QuantizedWeight, powers

GROUP = 32
FORM = Format(bits=4, group=GROUP, activation_bits=16, floats=True)


@dataclass(frozen=True)
class FloatStacks:
    """See `StackPacking`."""

    where: str
    form: Format = FORM

    def tensors(self, name: str, shape: tuple[int, int, int]) -> dict[str, Wanted]:
        count, n, k = shape
        groups = num_groups(f"{self.where}: {name}", (n, k), GROUP)
        return {
            f"{name}_blocks": Wanted((count, n, groups, GROUP // 2), ("U8",)),
            f"{name}_scales": Wanted((count, n, groups), ("U8",)),
        }

    def read(self, name: str, take: Callable[[str], torch.Tensor]) -> Iterator[QuantizedWeight]:
        for blocks, scales in zip(take(f"{name}_blocks"), take(f"{name}_scales"), strict=True):
            yield QuantizedWeight(
                levels=torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(1),
                scales=powers(scales),
                zeros=None,
                bits=FORM.bits,
                activation_bits=FORM.activation_bits,
                floats=True,
            )


def read_mxfp4(fields: dict[str, Any], where: str) -> Layout:
    """Raises UnsupportedConfig for a field whose meaning is not implemented."""
    reader = ConfigReader(fields, where, {"quant_method"}, {"dequantize": (None, False)})
    plain = reader.maybe("modules_to_not_convert", list) or []
    reader.finish()
    if any("experts" in str(name) for name in plain):
        raise UnsupportedConfig(f"{where}: 'modules_to_not_convert' must not name experts, as only they are quantised")
    return Layout("mxfp4", lambda linear: None, FloatStacks(where))
