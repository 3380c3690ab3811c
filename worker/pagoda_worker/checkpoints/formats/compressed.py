"""compressed-tensors, the format of llm-compressor: integers in one of two layouts.

    int-quantized   weight [N, K] int8, weight_scale [N, 1], weight_zero_point [N, 1] int8 if asymmetric;
                    activations are rounded to int8 at run time, each token with a scale of its own
    pack-quantized  weight_packed [N, K * bits / 32] int32, weight_scale [N, K / group], weight_shape [2], and if
                    asymmetric weight_zero_point [N * bits / 32, K / group] int32, packed along the outputs

Packed fields are levels, int8 integers are levels minus the middle one. `config_groups` maps targets (a layer's name,
"re:" and an expression, or the class Linear; the first is the most specific) to schemes; `ignore` exempts layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from pagoda_worker.checkpoints.checkpoint import Wanted
from pagoda_worker.checkpoints.config_reader import ConfigReader, UnsupportedConfig
from pagoda_worker.checkpoints.expressions import compiled
from pagoda_worker.checkpoints.formats.layout import WORD_BITS, Layout, Packing, Stored, num_groups, unpacked
from pagoda_worker.kernels.quantized import FORMATS, Format, QuantizedWeight

INT, PACKED, MIXED = "int-quantized", "pack-quantized", "mixed-precision"
EXPRESSION = "re:"
LINEAR_CLASS = "Linear"
HARMLESS = {"quant_method", "global_compression_ratio", "version", "sparsity_config"}
# How the numbers were found, and dtypes that the headers repeat.
HARMLESS_ARGUMENTS = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}


@dataclass(frozen=True)
class IntPacking:
    symmetric: bool
    form: Format = FORMATS["int8"]

    def tensors(self, linear: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        wanted = {"weight": Wanted(shape, ("I8",)), "weight_scale": Wanted((shape[0], 1))}
        return wanted if self.symmetric else wanted | {"weight_zero_point": Wanted((shape[0], 1), ("I8",))}

    def faults(self, stored: Stored) -> list[str]:
        return []

    def read(self, stored: Stored) -> QuantizedWeight:
        return QuantizedWeight(
            levels=_above_middle(stored["weight"]),
            scales=stored["weight_scale"].float().contiguous(),
            zeros=None if self.symmetric else _above_middle(stored["weight_zero_point"]),
            bits=self.form.bits,
            activation_bits=self.form.activation_bits,
        )


@dataclass(frozen=True)
class WordPacking:
    where: str
    form: Format
    symmetric: bool

    def tensors(self, linear: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        n, k = shape
        groups = num_groups(f"{self.where}: {linear}", shape, self.form.group)
        wanted = {
            "weight_packed": Wanted((n, self._words(k)), ("I32",)),
            "weight_scale": Wanted((n, groups)),
            "weight_shape": Wanted((2,), ("I64", "I32")),
        }
        return wanted if self.symmetric else wanted | {"weight_zero_point": Wanted((self._words(n), groups), ("I32",))}

    def faults(self, stored: Stored) -> list[str]:
        said, shape = stored["weight_shape"].tolist(), list(stored.shape)
        return [] if said == shape else [f"{stored.linear}.weight_shape is {said}, expected {shape}"]

    def read(self, stored: Stored) -> QuantizedWeight:
        bits, (n, k) = self.form.bits, stored.shape
        zeros = None if self.symmetric else unpacked(stored["weight_zero_point"].t(), bits, n).t().contiguous()
        return QuantizedWeight(
            levels=unpacked(stored["weight_packed"], bits, k),
            scales=stored["weight_scale"].float().contiguous(),
            zeros=zeros,
            bits=bits,
            activation_bits=self.form.activation_bits,
        )

    def _words(self, count: int) -> int:
        return -(-count * self.form.bits // WORD_BITS)


def _above_middle(whole: torch.Tensor) -> torch.Tensor:
    """int8 -> uint8, plus 128"""
    return whole.contiguous().view(torch.uint8) ^ 0x80


def read_compressed(fields: dict[str, Any], where: str) -> Layout:
    """Raises UnsupportedConfig for a field whose meaning is not implemented."""
    must_be: dict[str, tuple[Any, ...]] = {
        "kv_cache_scheme": (None, {}), "transform_config": (None, {}), "moe_sparsity_config": (None, {}),
        "quantization_status": (None, "compressed", "frozen"),
    }  # fmt: skip
    reader = ConfigReader(fields, where, HARMLESS, must_be)
    _refuse_sparsity(fields.get("sparsity_config"), where)
    form = reader.choice("format", MIXED, INT, PACKED)
    ignored = _patterns(reader.maybe("ignore", list) or [], f"{where}: 'ignore'")
    named = reader.take("config_groups", dict)
    groups = [_group(value, form, f"{where}: config_groups.{name}") for name, value in named.items()]
    reader.finish()
    if not groups:
        raise UnsupportedConfig(f"{where}: 'config_groups' is empty")

    def packing_of(linear: str) -> Packing | None:
        if any(_matches(linear, pattern) for pattern in ignored):
            return None
        fitting = [(target, packing) for targets, packing in groups for target in targets if _matches(linear, target)]
        return min(fitting, key=lambda one: _rank(one[0]))[1] if fitting else None

    return Layout("compressed-tensors", packing_of)


def _group(value: Any, form: str, where: str) -> tuple[tuple[str, ...], Packing]:
    """One of `config_groups`: its targets, and how they are packed."""
    reader = ConfigReader(_object(value, where), where, (), {"output_activations": (None,)})
    form = reader.choice("format", form, INT, PACKED)
    if form == MIXED:
        raise UnsupportedConfig(f"{where}: 'format' is missing")
    targets = _patterns(reader.take("targets", list), f"{where}: 'targets'")
    weights = ConfigReader(
        _object(reader.take("weights", dict), f"{where}.weights"),
        f"{where}.weights",
        HARMLESS_ARGUMENTS,
        {"actorder": (None, False, "weight", "static"), "dynamic": (None, False), "block_structure": (None,)},
    )
    inputs = reader.maybe("input_activations", dict)
    reader.finish()
    packing = _int_packing(weights, inputs, where) if form == INT else _word_packing(weights, inputs, where)
    weights.finish()
    return targets, packing


def _int_packing(weights: ConfigReader, inputs: dict[str, Any] | None, where: str) -> IntPacking:
    weights.choice("num_bits", 8)
    weights.choice("type", "int")
    if _scale_group(weights, where):
        raise UnsupportedConfig(f"{where}.weights: strategy='group' is not supported for {INT} weights")
    if inputs is None:
        raise UnsupportedConfig(f"{where}: 'input_activations' is missing, but {INT} weights need int8 activations")
    required = {"dynamic": (True,), "block_structure": (None,), "actorder": (None, False), "group_size": (None,)}
    reader = ConfigReader(inputs, f"{where}.input_activations", HARMLESS_ARGUMENTS, required)
    reader.choice("num_bits", 8)
    reader.choice("type", "int")
    reader.choice("symmetric", True)
    if reader.take("strategy", str) != "token":
        raise UnsupportedConfig(f"{where}.input_activations: strategy must be 'token', got {inputs['strategy']!r}")
    reader.finish()
    return IntPacking(weights.take("symmetric", bool, True))


def _word_packing(weights: ConfigReader, inputs: dict[str, Any] | None, where: str) -> WordPacking:
    if inputs is not None:
        raise UnsupportedConfig(f"{where}: 'input_activations' are not supported for {PACKED} weights")
    bits = weights.choice("num_bits", 8, 4)
    weights.choice("type", "int")
    form = Format(bits=bits, group=_scale_group(weights, where), activation_bits=16)
    return WordPacking(where, form, weights.take("symmetric", bool, True))


def _scale_group(weights: ConfigReader, where: str) -> int:
    """Inputs that share a scale; 0 is all of them."""
    size = weights.maybe("group_size", int)
    inferred = None if size is None else "channel" if size == -1 else "group"
    strategy = weights.maybe("strategy", str) or inferred
    if strategy not in ("channel", "group"):
        raise UnsupportedConfig(f"{where}.weights: strategy={strategy!r} is neither channel nor group")
    if strategy == "channel":
        if size not in (None, -1):
            raise UnsupportedConfig(f"{where}.weights: group_size={size} cannot be combined with strategy='channel'")
        return 0
    if size is None or size < 1:
        raise UnsupportedConfig(f"{where}.weights: group_size={size} is not positive")
    return size


def _refuse_sparsity(value: Any, where: str) -> None:
    if value and not (isinstance(value, dict) and value.get("format") == "dense"):
        raise UnsupportedConfig(f"{where}: 'sparsity_config' other than dense is not supported")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnsupportedConfig(f"{where} must be an object, got {value!r}")
    return value


def _patterns(values: list[Any], where: str) -> tuple[str, ...]:
    for value in values:
        if not isinstance(value, str) or not value:
            raise UnsupportedConfig(f"{where} must be a list of names, got {value!r}")
    try:
        compiled([value.removeprefix(EXPRESSION) for value in values if value.startswith(EXPRESSION)])
    except ValueError as error:
        raise UnsupportedConfig(f"{where}: {error}") from error
    return tuple(values)


def _matches(linear: str, pattern: str) -> bool:
    if pattern.startswith(EXPRESSION):
        return re.match(pattern.removeprefix(EXPRESSION), linear) is not None
    return pattern in (linear, LINEAR_CLASS)


def _rank(target: str) -> int:
    """A layer's own name outranks an expression, which outranks the class."""
    return 2 if target == LINEAR_CLASS else 1 if target.startswith(EXPRESSION) else 0
