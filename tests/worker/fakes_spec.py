"""A decoder's spec from numbers that all its layers share, except for windows and ropes."""

from __future__ import annotations

from typing import Any

from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.spec import DecoderSpec, LayerSpec, MlpShape
from pagoda_worker.kernels.ops import AttentionShape

ATTENTION = ("num_heads", "num_kv_heads", "head_dim")


def spec_of(**fields: Any) -> DecoderSpec:
    """`windows` (sliding, unless `chunked`) and `rope_of_layer` (indices into `ropes`, or None) have an entry per
    layer; other fields go where they belong."""
    numbers = {name: fields.pop(name) for name in ATTENTION}
    chunked = fields.pop("chunked", False)
    scale, softcap = fields.pop("attention_scale"), fields.pop("attention_softcap", None)
    mlp = MlpShape(
        width=fields.pop("intermediate_size"),
        activation=fields.pop("activation", "silu"),
        bias=fields.pop("mlp_bias", False),
        gated=fields.pop("gated", True),
    )
    ropes: tuple[RopeShape, ...] = fields.pop("ropes")
    layers = tuple(
        LayerSpec(
            attention=AttentionShape(
                **numbers, scale=scale, softcap=softcap, window=window, chunked=chunked and window is not None
            ),
            rope=None if rope is None else ropes[rope],
            mlp=mlp,
        )
        for window, rope in zip(fields.pop("windows"), fields.pop("rope_of_layer"), strict=True)
    )
    return DecoderSpec(**fields, layers=layers)


def windows_of(spec: DecoderSpec) -> tuple[int | None, ...]:
    return tuple(layer.attention.window for layer in spec.layers)
