"""GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel write it.

    qweight [K / per_word, N] int32: levels, packed along the inputs
    qzeros  [K / group, N / per_word] int32: levels of zero, packed along the outputs; version 1 stores them minus one
    scales  [K / group, N]
    g_idx   [K] int32: the group of every input; only input // group is loaded

with per_word = 32 / bits. Version 1 subtracted 1 from every field of a packed word by one subtraction from the word, so
one addition to the word gives back what was there, borrows included. Exporters are known to write biases of zeros
where the architecture has none.
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

# How the weights were found; nothing about how they are stored.
HARMLESS = {
    "quant_method", "sym", "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse",
    "tokenizer", "dataset", "meta", "backend", "model_name_or_path", "model_file_base_name", "block_name_to_quantize",
    "module_name_preceding_first_block", "batch_size", "pad_token_id", "model_seqlen", "max_input_length",
    "cache_block_outputs", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "act_group_aware",
    "autoround_version", "provider", "iters", "lr", "minmax_lr", "nsamples", "seqlen", "amp", "scale_dtype",
    "enable_minmax_tuning", "enable_quanted_input", "gradient_accumulate_steps", "low_gpu_mem_usage", "train_bs",
}  # fmt: skip
ONES = {4: 0x11111111, 8: 0x01010101}  # one in every field of a word


@dataclass(frozen=True)
class GptqPacking:
    where: str
    form: Format
    zeros_minus_one: bool
    reordered: bool  # according to config.json: then g_idx must be there to disprove it

    def tensors(self, linear: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        bits, (n, k) = self.form.bits, shape
        per_word, groups = WORD_BITS // bits, num_groups(f"{self.where}: {linear}", shape, self.form.group)
        if n % per_word or k % per_word:
            raise UnsupportedConfig(f"{self.where}: bits={bits} cannot pack the {n} x {k} matrix of {linear}")
        return {
            "qweight": Wanted((k // per_word, n), ("I32",)),
            "qzeros": Wanted((groups, n // per_word), ("I32",)),
            "scales": Wanted((groups, n)),
            "g_idx": Wanted((k,), ("I32",), optional=not self.reordered),
            "bias": Wanted((n,), optional=True),
        }

    def faults(self, stored: Stored) -> list[str]:
        if "g_idx" in stored:
            k = stored.shape[1]
            plain = torch.arange(k, dtype=torch.int32) // (self.form.group or k)
            if not torch.equal(stored["g_idx"].cpu(), plain):
                raise UnsupportedConfig(
                    f"{self.where}: 'desc_act': g_idx reorders the inputs of {stored.linear}, which is not supported"
                )
        return []

    def read(self, stored: Stored) -> QuantizedWeight:
        n, k = stored.shape
        qzeros = stored["qzeros"]
        if self.zeros_minus_one:
            qzeros = qzeros + ONES[self.form.bits]
        return QuantizedWeight(
            levels=unpacked(stored["qweight"].t(), self.form.bits, k),
            scales=stored["scales"].float().t().contiguous(),
            zeros=zeros_or_none(unpacked(qzeros, self.form.bits, n).t(), self.form.bits),
            bits=self.form.bits,
            activation_bits=self.form.activation_bits,
        )


def read_gptq(fields: dict[str, Any], where: str) -> Layout:
    """Raises UnsupportedConfig for a field whose meaning is not implemented."""
    must_be = {"is_marlin_format": (None, False), "dynamic": (None, {}), "pack_dtype": (None, "int32")}
    reader = ConfigReader(fields, where, HARMLESS, must_be)
    reader.choice("method", "gptq")
    bits, group = reader.size("bits"), reader.take("group_size", int)
    if bits not in ONES:
        raise UnsupportedConfig(f"{where}: bits={bits} is not one of 4, 8")
    if group != -1 and group < 1:
        raise UnsupportedConfig(f"{where}: group_size={group} is neither -1 nor positive")
    versions = {reader.choice(name, "gptq", "gptq_v2") for name in ("checkpoint_format", "format") if name in fields}
    if len(versions) > 1:
        raise UnsupportedConfig(f"{where}: checkpoint_format and format contradict each other")
    form = Format(bits=bits, group=max(group, 0), activation_bits=16)
    minus_one, reordered = "gptq_v2" not in versions, reader.take("desc_act", bool, False)
    packing = GptqPacking(where, form, zeros_minus_one=minus_one, reordered=reordered)
    head, parts = reader.take("lm_head", bool, False), _parts(reader, where)
    reader.finish()

    def packing_of(linear: str) -> Packing | None:
        if linear in HEADS:
            return packing if head else None
        return packing if parts is None or linear.endswith(parts) else None

    return Layout("gptq", packing_of)


def _parts(reader: ConfigReader, where: str) -> tuple[str, ...] | None:
    """The names within a layer that are quantised; None: all."""
    lists = reader.maybe("modules_in_block_to_quantize", list)
    if lists is None:
        return None
    names = [name for one in lists for name in (one if isinstance(one, list) else [one])]
    if not all(isinstance(name, str) and name for name in names):
        raise UnsupportedConfig(f"{where}: 'modules_in_block_to_quantize' must be lists of names, got {lists!r}")
    return tuple(f".{name}" for name in names)
