"""Granite 3 (dense): Llama with four multipliers, of embeddings, attention scores, branches and logits."""

from __future__ import annotations

from dataclasses import replace

from pagoda_worker.checkpoints.config_reader import ConfigReader
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.models.families.llama import read_llama


def read_granite(config: ConfigReader) -> DecoderSpec:
    return scaled(config, read_llama(config))


def scaled(config: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """The spec with the multipliers of the file."""
    scale = config.positive("attention_multiplier", 1.0)
    return replace(
        spec,
        layers=tuple(replace(layer, attention=replace(layer.attention, scale=scale)) for layer in spec.layers),
        embed_scale=config.positive("embedding_multiplier", 1.0),
        residual_scale=config.positive("residual_multiplier", 1.0),
        logit_scale=1.0 / config.positive("logits_scaling", 1.0),
    )
