"""DeepSeek V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention, and experts in groups.

GLM-4.7-Flash is a V3 whose file states the kind of every layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagoda_worker.checkpoints.config_reader import ConfigReader, UnsupportedConfig, invalid, shown
from pagoda_worker.checkpoints.names import Names
from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.rope_fields import RopeDefaults, mscale, read_rope
from pagoda_worker.checkpoints.spec import DecoderSpec, LatentShape, LayerSpec, MlpShape, MoeShape
from pagoda_worker.kernels.ops import AttentionShape
from pagoda_worker.kernels.routing import Routing
from pagoda_worker.models.families.llama import common_fields, mlp_of
from pagoda_worker.models.families.moe import FUSED, experts_of

SHARED: dict[str, Any] = {
    "shared_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared_down": "mlp.shared_experts.down_proj",
}
NAMES = Names(**SHARED)
NAMES_FUSED = Names(**SHARED, **FUSED)
NAMES_APART = Names(**SHARED, latent_up=("self_attn.k_b_proj", "self_attn.v_b_proj"))
# Fields that transformers derives from others, and fields for training only.
REPEATED = ("head_dim", "qk_head_dim", "num_key_value_heads", "ep_size", "aux_loss_alpha", "seq_aux")


def read_deepseek_v2(config: ConfigReader) -> DecoderSpec:
    config.choice("scoring_func", "softmax")
    config.choice("norm_topk_prob", False)
    grouped = config.choice("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    return _deepseek(config, grouped_routing(config, sigmoid=False, grouped=grouped), RopeDefaults(interleaved=True))


def read_deepseek_v3(config: ConfigReader) -> DecoderSpec:
    config.choice("scoring_func", "sigmoid")
    config.choice("topk_method", "noaux_tc")
    interleaved = config.take("rope_interleave", bool, True)
    return _deepseek(config, grouped_routing(config, sigmoid=True), RopeDefaults(interleaved=interleaved))


def grouped_routing(config: ConfigReader, *, sigmoid: bool, grouped: bool = True) -> Routing:
    """Routing over `n_routed_experts`; with sigmoids, a group's score is that of its best two experts."""
    plain = experts_of(config, "n_routed_experts")
    groups, chosen_groups = config.maybe_size("n_group") or 1, config.maybe_size("topk_group") or 1
    size, rest = divmod(plain.experts, groups)
    top = 2 if sigmoid else 1
    if grouped and groups > 1 and (rest or chosen_groups > groups or chosen_groups * size < plain.chosen or size < top):
        raise invalid(
            "config.json",
            f"{plain.chosen} of {plain.experts} experts cannot be chosen from 'topk_group'={chosen_groups} "
            f"of 'n_group'={groups} groups",
        )
    return replace(
        plain,
        renormalised=sigmoid and config.take("norm_topk_prob", bool, True),
        sigmoid=sigmoid,
        scale=config.positive("routed_scaling_factor", 1.0),
        groups=groups if grouped else 1,
        chosen_groups=chosen_groups if grouped and groups > 1 else 1,
        group_top=top,
    )


def behind_dense(config: ConfigReader, layers: tuple[LayerSpec, ...], routing: Routing) -> tuple[LayerSpec, ...]:
    """All but the first layers with experts, and an MLP that every token passes."""
    config.choice("moe_layer_freq", 1)
    width, activation = config.size("moe_intermediate_size"), config.activation("hidden_act")
    shared = config.maybe("n_shared_experts", int)
    moe = MoeShape(
        routing=routing,
        width=width,
        activation=activation,
        shared=MlpShape(width=width * config.size("n_shared_experts"), activation=activation) if shared else None,
        favour=routing.sigmoid,
    )
    dense = _dense_layers(config, len(layers))
    return tuple(layer if index < dense else replace(layer, mlp=moe) for index, layer in enumerate(layers))


def _dense_layers(config: ConfigReader, layers: int) -> int:
    """The number of dense layers before those with experts: from a number, or from the kind of every layer."""
    first, kinds = config.take("first_k_dense_replace", int, 0), config.maybe("mlp_layer_types", list)
    if kinds is None:
        return first
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise UnsupportedConfig(
            f"config.json: 'mlp_layer_types' must name every layer, dense ones before sparse ones, got {shown(kinds)}"
        )
    return dense


def guessing_layers(config: ConfigReader) -> int:
    """How many multi-token prediction layers a checkpoint may have after the others, by either field name."""
    counts = [config.maybe(name, int) or 0 for name in ("num_nextn_predict_layers", "num_mtp_layers")]
    return min(max(0, *counts), 16)


def _deepseek(config: ConfigReader, routing: Routing, defaults: RopeDefaults) -> DecoderSpec:
    for name in REPEATED:
        config.ignore(name)
    for name in ("attention_bias", "mlp_bias"):
        config.choice(name, False)
    config.choice("partial_rotary_factor", 1.0)
    shape, heads = _latent_shape(config), config.size("num_attention_heads")
    rope = read_rope(config, shape.turning, defaults)
    attention = AttentionShape(
        num_heads=heads, num_kv_heads=1, head_dim=shape.rank + shape.turning, scale=_scale(config, shape, rope)
    )
    layer = LayerSpec(
        attention=attention,
        rope=replace(rope, head_dim=attention.head_dim, turning=shape.turning),
        mlp=mlp_of(config, "hidden_act"),
        latent=shape,
    )
    return DecoderSpec(
        **common_fields(config),
        layers=behind_dense(config, (layer,) * config.size("num_hidden_layers"), routing),
        names=NAMES,
        spellings=(NAMES_FUSED, NAMES_APART),
        unused_layers=guessing_layers(config),
    )


def _latent_shape(config: ConfigReader) -> LatentShape:
    shape = LatentShape(
        rank=config.size("kv_lora_rank"),
        turning=config.size("qk_rope_head_dim"),
        plain=config.size("qk_nope_head_dim"),
        value=config.size("v_head_dim"),
        query_rank=config.maybe_size("q_lora_rank"),
    )
    if shape.rank % 2 or shape.turning % 2:
        raise invalid("config.json", f"kv_lora_rank={shape.rank} and qk_rope_head_dim={shape.turning} must be even")
    return shape


def _scale(config: ConfigReader, shape: LatentShape, rope: RopeShape) -> float:
    """Of attention scores; a longer context sharpens them."""
    plain = float((shape.plain + shape.turning) ** -0.5)
    scaling = config.maybe("rope_parameters", dict) or config.maybe("rope_scaling", dict) or {}
    sharpened = scaling.get("mscale_all_dim")
    if rope.kind == "default" or not sharpened:
        return plain
    return plain * mscale(rope.factor, float(sharpened)) ** 2
