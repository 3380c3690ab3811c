"""Models where every fourth layer has no rotary embedding: SmolLM3, otherwise a Llama, and Llama 4, text only.

In Llama 4, layers with rotation attend within chunks, the others to everything, and the inputs of experts are weighted.
A checkpoint with image input has its text model below `language_model.`; its vision part is not loaded.
"""

from __future__ import annotations

from dataclasses import replace

from pagoda_worker.checkpoints.config_reader import ConfigReader, UnsupportedConfig, shown
from pagoda_worker.checkpoints.names import Names
from pagoda_worker.checkpoints.rope_fields import RopeDefaults, read_rope
from pagoda_worker.checkpoints.spec import DecoderSpec, LayerSpec, MlpShape, MoeShape
from pagoda_worker.checkpoints.temper import Temper
from pagoda_worker.models.defaults import completed
from pagoda_worker.models.families.llama import attention_of, common_fields, read_llama
from pagoda_worker.models.families.moe import experts_of, layer_numbers

NAMES = Names(
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert_up=("feed_forward.experts.gate_up_proj",),
    expert_down="feed_forward.experts.down_proj",
    expert_inputs_first=True,
    shared_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    shared_down="feed_forward.shared_expert.down_proj",
)
BELOW = replace(NAMES, root="language_model.model.", head="language_model.lm_head")
ROPE = RopeDefaults(interleaved=True)
OF_IMAGES = ("vision_model.", "multi_modal_projector.")


def turning_layers(config: ConfigReader, layers: int) -> list[bool]:
    """Which layers rotate their heads: despite its name, `no_rope_layers` has a 1 for each that does."""
    interval = config.size("no_rope_layer_interval", 4)
    turning = config.maybe("no_rope_layers", list) or [int((i + 1) % interval != 0) for i in range(layers)]
    if len(turning) != layers or any(one not in (0, 1) for one in turning):
        raise UnsupportedConfig(
            f"config.json: 'no_rope_layers' must have 0 or 1 for each of {layers} layers, got {shown(turning)}"
        )
    return [bool(one) for one in turning]


def read_smollm3(config: ConfigReader) -> DecoderSpec:
    config.ignore("max_window_layers")  # ignored by its code, too
    spec = read_llama(config)
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


def read_llama4(config: ConfigReader) -> DecoderSpec:
    config.ignore("for_llm_compressor")  # which program wrote the file
    attention, mlps = attention_of(config), _mlps(config)
    rope, turning = read_rope(config, attention.head_dim, ROPE), turning_layers(config, len(mlps))
    temper, unit = _temper(config), config.take("use_qk_norm", bool, True)
    kinds = ["chunked_attention" if turns else "full_attention" for turns in turning]
    chunks = config.layer_windows(config.size("attention_chunk_size", 8192), kinds, "chunked_attention")
    bias = config.take("attention_bias", bool, False)
    return DecoderSpec(
        **common_fields(config),
        layers=tuple(
            LayerSpec(
                attention=replace(attention, window=chunk, chunked=chunk is not None),
                rope=rope if turns else None,
                mlp=mlp,
                unit_heads=unit and turns,
                temper=None if turns else temper,
            )
            for chunk, turns, mlp in zip(chunks, turning, mlps, strict=True)
        ),
        names=NAMES,
        qkv_bias=bias,
        out_bias=bias,
    )


def read_llama4_with_images(config: ConfigReader) -> DecoderSpec:
    for name in ("vision_config", "boi_token_index", "eoi_token_index", "image_token_index"):
        config.ignore(name)
    config.choice("tie_word_embeddings", False)
    fields = completed("Llama4ForCausalLM", config.take("text_config", dict))
    text = ConfigReader(fields, "config.json: text_config")
    spec = read_llama4(text)
    text.finish()
    return replace(spec, names=BELOW, unused=OF_IMAGES)


def _mlps(config: ConfigReader) -> list[MlpShape | MoeShape]:
    """Experts and a shared MLP in every `interleave_moe_layer_step`-th layer or those named; dense ones in the rest."""
    layers, step = config.size("num_hidden_layers"), config.size("interleave_moe_layer_step", 1)
    named = layer_numbers(config, "moe_layers")
    width, activation = config.size("intermediate_size"), config.activation("hidden_act")
    moe = MoeShape(
        routing=replace(experts_of(config, "num_local_experts"), sigmoid=True, inputs=True),
        width=width,
        activation=activation,
        shared=MlpShape(width=width, activation=activation),
    )
    dense = MlpShape(width=config.size("intermediate_size_mlp", 16384), activation=activation)
    with_experts = range(step - 1, layers, step) if named is None else named
    return [moe if index in with_experts else dense for index in range(layers)]


def _temper(config: ConfigReader) -> Temper | None:
    """Older files enable it by a number."""
    field = "attn_temperature_tuning"
    span, weight = config.positive("floor_scale", 8192.0), config.positive("attn_scale", 0.1)
    return Temper(span=span, weight=weight) if config.choice(field, True, False, 4) else None
