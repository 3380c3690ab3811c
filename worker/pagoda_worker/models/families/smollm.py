"""SmolLM3: Llama whose every fourth layer turns nothing."""

from __future__ import annotations

from dataclasses import replace

from pagoda_worker.checkpoints.config_reader import ConfigReader, UnsupportedConfig, shown
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.models.families.llama import read_llama


def turning_layers(config: ConfigReader, layers: int) -> list[bool]:
    """Which layers turn their heads: `no_rope_layers` has, whatever its name says, a 1 for each that does."""
    interval = config.size("no_rope_layer_interval", 4)
    turning = config.maybe("no_rope_layers", list) or [int((i + 1) % interval != 0) for i in range(layers)]
    if len(turning) != layers or any(one not in (0, 1) for one in turning):
        raise UnsupportedConfig(
            f"config.json: 'no_rope_layers' must have 0 or 1 for each of {layers} layers, got {shown(turning)}"
        )
    return [bool(one) for one in turning]


def read_smollm3(config: ConfigReader) -> DecoderSpec:
    spec = read_llama(config, tied=True)
    turning, window = turning_layers(config, spec.num_layers), config.maybe_size("sliding_window")
    if not config.take("use_sliding_window", bool, False):
        window = None
    kinds = ["full_attention" if turns or window is None else "sliding_attention" for turns in turning]
    layers = zip(spec.layers, turning, config.layer_windows(window, kinds), strict=True)
    return replace(
        spec,
        layers=tuple(
            replace(layer, attention=replace(layer.attention, window=window), rope=layer.rope if turns else None)
            for layer, turns, window in layers
        ),
    )
