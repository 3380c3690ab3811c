"""Phi-3 (arXiv 2404.14219) and Phi-4: Llama with merged matrices, and per-frequency factors for long contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagoda_worker.checkpoints.config_reader import ConfigReader
from pagoda_worker.checkpoints.names import Names
from pagoda_worker.checkpoints.rope_fields import RopeDefaults
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.models.families.llama import common_fields, mlp_of, sliding_layers

MERGED: Mapping[str, Any] = {"qkv": ("self_attn.qkv_proj",), "up": ("mlp.gate_up_proj",)}
NAMES = Names(**MERGED)
ROPE = RopeDefaults(partial=1.0, other_names={"su": "longrope", "yarn": "longrope"})


def read_phi3(config: ConfigReader) -> DecoderSpec:
    for unused in ("full_attn_mod", "interpolate_factor"):
        config.choice(unused, 1)
    return DecoderSpec(
        **common_fields(config), names=NAMES, layers=sliding_layers(config, mlp_of(config, "hidden_act"), ROPE)
    )
