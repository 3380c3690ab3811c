"""Quantised layers and checkpoints as their own tools write them, in the published layouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pagoda_worker.kernels.quantized import QuantizedWeight

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def to_words(fields: torch.Tensor, bits: int, order: Iterable[int] | None = None) -> torch.Tensor:
    """Fields [R, C] of `bits` bits -> int32 [R, ceil(C * bits / 32)]; the i-th lowest field holds number order[i]."""
    per_word = 32 // bits
    places = list(order or range(per_word))
    rows = []
    for row in fields.tolist():
        row += [0] * (-len(row) % per_word)
        words = [
            sum(row[start + place] << bits * i for i, place in enumerate(places))
            for start in range(0, len(row), per_word)
        ]
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def minus_one(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Subtract one from every field, with one subtraction per word."""
    return words - sum(1 << bits * i for i in range(32 // bits))


def rounded(weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, activation_bits: int) -> QuantizedWeight:
    """Quantise a matrix to `bits` bits; asymmetric groups span from their minimum to their maximum."""
    parts = weight.double().unflatten(1, (-1, group or weight.shape[1]))
    top, middle = (1 << bits) - 1, 1 << bits - 1
    if symmetric:
        scales, zeros = parts.abs().amax(-1) / (middle - 1), torch.full(parts.shape[:2], middle)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = (high - low) / top
        zeros = (-low / scales).round()
    scales = scales.half().double()
    levels = (parts / scales.unsqueeze(-1)).round().add(zeros.unsqueeze(-1)).clamp(0, top)
    return QuantizedWeight(
        levels=levels.flatten(1).to(torch.uint8),
        scales=scales.float(),
        zeros=None if symmetric else zeros.to(torch.uint8),
        bits=bits,
        activation_bits=activation_bits,
    )


def zeros_of(weight: QuantizedWeight) -> torch.Tensor:
    return torch.full(weight.scales.shape, 1 << weight.bits - 1) if weight.zeros is None else weight.zeros.long()


def plain(weight: QuantizedWeight) -> torch.Tensor:
    """[N, K] float32"""
    group = weight.levels.shape[1] // weight.scales.shape[1]
    zeros, scales = (part.repeat_interleave(group, 1) for part in (zeros_of(weight), weight.scales))
    return (weight.levels.long() - zeros) * scales


def gptq(weight: QuantizedWeight, version: int = 1) -> Tensors:
    qzeros = to_words(zeros_of(weight).t(), weight.bits)
    k = weight.levels.shape[1]
    return {
        "qweight": to_words(weight.levels, weight.bits).t().contiguous(),
        "qzeros": minus_one(qzeros, weight.bits) if version == 1 else qzeros,
        "scales": weight.scales.t().half().contiguous(),
        "g_idx": (torch.arange(k) // (k // weight.scales.shape[1])).int(),
    }


def awq(weight: QuantizedWeight) -> Tensors:
    return {
        "qweight": to_words(weight.levels.t(), 4, AWQ_ORDER),
        "qzeros": to_words(zeros_of(weight).t(), 4, AWQ_ORDER),
        "scales": weight.scales.t().half().contiguous(),
    }


def int_quantized(weight: QuantizedWeight) -> Tensors:
    tensors = {"weight": (weight.levels.short() - 128).to(torch.int8), "weight_scale": weight.scales}
    if weight.zeros is None:
        return tensors
    return tensors | {"weight_zero_point": (weight.zeros.short() - 128).to(torch.int8)}


def pack_quantized(weight: QuantizedWeight) -> Tensors:
    tensors = {
        "weight_packed": to_words(weight.levels, weight.bits),
        "weight_scale": weight.scales.half(),
        "weight_shape": torch.tensor(weight.levels.shape),
    }
    if weight.zeros is None:
        return tensors
    return tensors | {"weight_zero_point": to_words(weight.zeros.t(), weight.bits).t().contiguous()}


def weights_scheme(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group or None, "dynamic": False,
        "strategy": "group" if group else "channel", "observer": "minmax", "observer_kwargs": {}, "actorder": None,
        "block_structure": None,
    }  # fmt: skip


TOKEN_SCHEME = {
    "num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "dynamic": True, "strategy": "token",
    "observer": None, "observer_kwargs": {}, "actorder": None, "block_structure": None,
}  # fmt: skip


def compressed_config(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """The configuration as llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
        "global_compression_ratio": 1.5, "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
    } | more  # fmt: skip


def gptq_config(bits: int = 4, group: int = 32, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, "lm_head": False,
        "damp_percent": 0.01, "true_sequential": True, "static_groups": False, "model_name_or_path": None,
    } | more  # fmt: skip


def awq_config(group: int = 32, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": None,
    } | more  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How a test writes a checkpoint. `covers` says whether a layer, by name, is quantised."""

    config: dict[str, Any]
    pack: Callable[[QuantizedWeight], Tensors]
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    activation_bits: int = 16
    covers: Callable[[str], bool] = lambda linear: linear != "lm_head"

    def but(self, **changes: Any) -> Recipe:
        """The same with other fields in quantization_config."""
        return replace(self, config=self.config | changes)


@dataclass(frozen=True)
class Written:
    """A quantised checkpoint, and its contents."""

    path: Path
    plain_path: Path  # a float32 checkpoint of the dequantised numbers
    tensors: Tensors  # of the plain checkpoint
    weights: dict[str, QuantizedWeight]


def is_linear(name: str) -> bool:
    return name.endswith((*(f".{part}.weight" for part in PARTS), "lm_head.weight"))


def apart(tensors: Tensors) -> Tensors:
    """Split stacked experts into a tensor per expert and matrix, as quantised checkpoints store them."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        place, _, part = name.rpartition(".experts.")
        if part not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for index, both in enumerate(tensor):
            for one, rows in zip(parts, both.chunk(len(parts)), strict=True):
                found[f"{place}.experts.{index}.{one}.weight"] = rows.contiguous()
    return found


def write(model: Any, recipe: Recipe, path: Path) -> Written:
    """Write a transformers model (float32) by the recipe, and beside it the plain checkpoint."""
    tied = model.config.tie_word_embeddings
    tensors = {name: t.detach().contiguous() for name, t in model.state_dict().items()}
    tensors = apart({name: t for name, t in tensors.items() if not (tied and name == "lm_head.weight")})
    fields = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    weights: dict[str, QuantizedWeight] = {}
    packed: Tensors = {}
    for name, tensor in tensors.items():
        linear = name.removesuffix(".weight")
        if is_linear(name) and recipe.covers(linear):
            weights[linear] = rounded(
                tensor, recipe.bits, recipe.group, symmetric=recipe.symmetric, activation_bits=recipe.activation_bits
            )
            packed |= {f"{linear}.{suffix}": part for suffix, part in recipe.pack(weights[linear]).items()}
        else:
            packed[name] = tensor
    tensors |= {f"{linear}.weight": plain(weight) for linear, weight in weights.items()}
    save(path / "quantised", fields | {"quantization_config": recipe.config}, packed)
    save(path / "plain", fields, tensors)
    return Written(path / "quantised", path / "plain", tensors, weights)


def save(path: Path, fields: dict[str, Any], tensors: Tensors) -> None:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(fields))
    save_file(tensors, path / "model.safetensors")
