"""AWQ (arXiv 2306.00978), version GEMM, as AutoAWQ writes it.

    qweight [K, N / 8] int32, qzeros [K / group, N / 8] int32: levels, packed along the outputs
    scales  [K / group, N]

The eight fields of a word, lowest bits first, hold outputs 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagoda_worker.checkpoints.checkpoint import Wanted
from pagoda_worker.checkpoints.config_reader import ConfigReader, UnsupportedConfig
from pagoda_worker.checkpoints.formats.layout import (
    WORD_BITS,
    Layout,
    Packing,
    Stored,
    num_groups,
    unpacked,
    zeros_or_none,
)
from pagoda_worker.checkpoints.names import HEADS
from pagoda_worker.kernels.quantized import Format, QuantizedWeight

BITS, PER_WORD = 4, WORD_BITS // 4
FIELD_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
# How the weights were found, and settings of other programs' kernels.
HARMLESS = {
    "quant_method", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "damp_percent",
    "damp_auto_increment", "true_sequential", "sym", "tokenizer", "dataset", "meta", "act_group_aware", "batch_size",
    "block_name_to_quantize", "module_name_preceding_first_block", "pad_token_id", "model_seqlen", "max_input_length",
    "cache_block_outputs", "static_groups", "mse",
}  # fmt: skip


@dataclass(frozen=True)
class AwqPacking:
    where: str
    form: Format

    def tensors(self, linear: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        n, k = shape
        groups = num_groups(f"{self.where}: {linear}", shape, self.form.group)
        if n % PER_WORD:
            raise UnsupportedConfig(f"{self.where}: bits={BITS} cannot pack the {n} outputs of {linear}")
        return {
            "qweight": Wanted((k, n // PER_WORD), ("I32",)),
            "qzeros": Wanted((groups, n // PER_WORD), ("I32",)),
            "scales": Wanted((groups, n)),
        }

    def faults(self, stored: Stored) -> list[str]:
        return []

    def read(self, stored: Stored) -> QuantizedWeight:
        return QuantizedWeight(
            levels=_outputs_first(stored["qweight"]),
            scales=stored["scales"].float().t().contiguous(),
            zeros=zeros_or_none(_outputs_first(stored["qzeros"]), BITS),
            bits=BITS,
            activation_bits=self.form.activation_bits,
        )


def _outputs_first(words: torch.Tensor) -> torch.Tensor:
    """[R, N / 8] int32 -> [N, R] uint8"""
    fields = unpacked(words, BITS, words.shape[1] * PER_WORD).view(len(words), -1, PER_WORD)
    return fields[..., FIELD_OF_OUTPUT].flatten(1).t().contiguous()


def read_awq(fields: dict[str, Any], where: str) -> Layout:
    """Raises UnsupportedConfig for a field whose meaning is not implemented."""
    must_be = {
        "zero_point": (None, True), "desc_act": (None, False), "lm_head": (None, False), "dynamic": (None, {}),
        "pack_dtype": (None, "int32"),
    }  # fmt: skip
    lowered = {name: value.lower() if isinstance(value, str) else value for name, value in fields.items()}
    reader = ConfigReader(lowered, where, HARMLESS, must_be)
    reader.choice("method", "awq")
    reader.choice("bits", BITS)
    for name in ("version", "format", "checkpoint_format"):
        reader.choice(name, "gemm")
    group = reader.take("group_size", int)
    if group != -1 and group < 1:
        raise UnsupportedConfig(f"{where}: group_size={group} is neither -1 nor positive")
    plain = reader.maybe("modules_to_not_convert", list) or []
    if not all(isinstance(name, str) and name for name in plain):
        raise UnsupportedConfig(f"{where}: 'modules_to_not_convert' must be a list of names, got {plain!r}")
    reader.finish()
    packing = AwqPacking(where, Format(bits=BITS, group=max(group, 0), activation_bits=16))

    def packing_of(linear: str) -> Packing | None:
        return None if linear in HEADS or any(name in linear for name in plain) else packing

    return Layout("awq", packing_of)
