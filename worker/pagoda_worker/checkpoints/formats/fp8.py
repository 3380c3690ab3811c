"""8-bit floats (E4M3) with a scale for each block of a matrix, as in DeepSeek's and Qwen's own checkpoints.

    weight           [N, K] float8
    weight_scale_inv [ceil(N / rows), ceil(K / columns)]: factors of the floats of a block

There are no kernels for them, so matrices are widened, which takes twice their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagoda_worker.checkpoints.checkpoint import Wanted
from pagoda_worker.checkpoints.config_reader import ConfigReader, UnsupportedConfig, in_range, shown
from pagoda_worker.checkpoints.formats.layout import Layout, Packing, Stored
from pagoda_worker.checkpoints.names import HEADS
from pagoda_worker.kernels.quantized import Format

MOST = 2**16  # rows or columns of a block


@dataclass(frozen=True)
class Float8Packing:
    rows: int
    columns: int

    @property
    def form(self) -> Format:
        return Format(bits=8, group=self.columns, activation_bits=16, floats=True)

    def tensors(self, linear: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        blocks = -(-shape[0] // self.rows), -(-shape[1] // self.columns)
        return {"weight": Wanted(shape, ("F8_E4M3",)), "weight_scale_inv": Wanted(blocks)}

    def faults(self, stored: Stored) -> list[str]:
        return []

    def read(self, stored: Stored) -> torch.Tensor:
        k = stored.shape[1]
        scales = stored["weight_scale_inv"].float()
        by_column = scales.repeat_interleave(min(self.columns, k), 1)[:, :k]
        parts = zip(torch.split(stored["weight"], self.rows), by_column, strict=True)
        return torch.cat([rows.float() * scale for rows, scale in parts])


def read_fp8(fields: dict[str, Any], where: str) -> Layout:
    """Raises UnsupportedConfig for a field whose meaning is not implemented."""
    reader = ConfigReader(fields, where, {"quant_method"}, {"dequantize": (None, False)})
    reader.choice("fmt", "e4m3")
    reader.choice("scale_fmt", "float", "ue8m0")  # of inputs; weight scales are stored in float32 regardless
    reader.choice("activation_scheme", "dynamic")  # inputs are not rounded
    block = reader.take("weight_block_size", list)
    if len(block) != 2 or not all(type(size) is int for size in block):
        raise UnsupportedConfig(f"{where}: 'weight_block_size' must be two sizes, got {shown(block)}")
    rows, columns = (in_range(where, "weight_block_size", size, 1, MOST) for size in block)
    plain = [name for field in ("modules_to_not_convert", "ignored_layers") for name in reader.maybe(field, list) or []]
    reader.finish()
    if not all(isinstance(name, str) and name for name in plain):
        raise UnsupportedConfig(f"{where}: 'modules_to_not_convert' must be a list of names, got {shown(plain)}")
    packing = Float8Packing(rows, columns)

    def packing_of(linear: str) -> Packing | None:
        around = f".{linear}."
        return None if linear in HEADS or any(f".{name}." in around for name in plain) else packing

    return Layout("fp8", packing_of)
