"""Mixtures of experts: Mixtral (arXiv 2401.04088), Qwen2-MoE, Qwen3-MoE, OLMoE (arXiv 2409.02060), gpt-oss
(arXiv 2508.10925)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pagoda_worker.checkpoints.config_reader import ConfigReader, UnsupportedConfig, in_range, invalid, shown
from pagoda_worker.checkpoints.names import Names
from pagoda_worker.checkpoints.rope_fields import RopeDefaults, read_rope
from pagoda_worker.checkpoints.spec import DecoderSpec, LayerSpec, MlpShape, MoeShape
from pagoda_worker.kernels.ops import CLAMP, CLAMPED, CLAMPED_GAIN
from pagoda_worker.kernels.routing import Routing
from pagoda_worker.models.families.llama import attention_of, common_fields, layers_of, mlp_of, sliding_layers
from pagoda_worker.models.families.qwen import read_qwen2, read_qwen3

MOST_EXPERTS = 1024
MOST_IN_ALL = 2**16  # over all layers: each has names of its own, which are listed before a checkpoint is read
FUSED: dict[str, Any] = {"expert_up": ("mlp.experts.gate_up_proj",), "expert_down": "mlp.experts.down_proj"}
QWEN = Names()
MIXTRAL = Names(
    router="block_sparse_moe.gate",
    expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    expert_down="block_sparse_moe.experts.{}.w2",
)
# As transformers 5 keeps them in memory, and writes them if told to keep its own names.
QWEN_FUSED = replace(QWEN, **FUSED)
# gpt-oss: attention sinks, biases everywhere, and gate and up interleaved.
GPT_OSS = Names(
    **FUSED,
    router="mlp.router",
    expert_inputs_first=True,
    expert_turns=True,
)
GPT_OSS_ROPE = RopeDefaults(
    scaling={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)


def routing_of(config: ConfigReader, renormalised: bool) -> Routing:
    """The number of experts has one of two names, depending on the exporter rather than the family."""
    experts = "num_experts" if config.maybe("num_experts", int) is not None else "num_local_experts"
    return replace(experts_of(config, experts), renormalised=renormalised)


def experts_of(config: ConfigReader, experts: str) -> Routing:
    """`experts`: the field with the number of experts."""
    count = in_range("config.json", experts, config.take(experts, int), 1, MOST_EXPERTS)
    if count * config.size("num_hidden_layers") > MOST_IN_ALL:
        raise invalid("config.json", f"{experts!r}={count} per layer exceeds {MOST_IN_ALL} experts in all")
    name = "num_experts_per_tok"
    return Routing(
        experts=count,
        chosen=in_range("config.json", name, config.take(name, int), 1, min(count, 64)),
        renormalised=False,
    )


def layer_numbers(config: ConfigReader, name: str) -> list[int] | None:
    """A field that lists layers, which may be missing."""
    numbers, layers = config.maybe(name, list), config.size("num_hidden_layers")
    if not all(type(number) is int for number in numbers or []):
        raise UnsupportedConfig(f"config.json: {name!r} must be layer numbers, got {shown(numbers)}")
    for number in numbers or []:
        in_range("config.json", name, number, 0, layers - 1)
    return numbers


def read_mixtral(config: ConfigReader) -> DecoderSpec:
    mlp = mlp_of(config, "hidden_act")
    moe = MoeShape(routing=routing_of(config, renormalised=True), width=mlp.width, activation=mlp.activation)
    layers = tuple(replace(layer, mlp=moe) for layer in sliding_layers(config, mlp))
    return DecoderSpec(**common_fields(config), layers=layers, names=MIXTRAL, spellings=(QWEN_FUSED, QWEN))


def read_qwen2_moe(config: ConfigReader) -> DecoderSpec:
    shared = MlpShape(width=config.size("shared_expert_intermediate_size"), activation=config.activation("hidden_act"))
    every_other = read_qwen2(config, lambda layer, full: layer < full and layer % 2 == 0)
    spec = _with_experts(config, every_other, shared)
    return replace(spec, qkv_bias=config.take("qkv_bias", bool, True))


def read_qwen3_moe(config: ConfigReader) -> DecoderSpec:
    return _with_experts(config, read_qwen3(config, lambda layer, full: True), None)


def _with_experts(config: ConfigReader, spec: DecoderSpec, shared: MlpShape | None) -> DecoderSpec:
    """Every `decoder_sparse_step`-th layer has them, except `mlp_only_layers`."""
    step, dense = config.size("decoder_sparse_step", 1), layer_numbers(config, "mlp_only_layers") or []
    moe = MoeShape(
        routing=routing_of(config, config.take("norm_topk_prob", bool, False)),
        width=config.size("moe_intermediate_size"),
        activation=config.activation("hidden_act"),
        shared=shared,
        shared_gate=shared is not None,
    )

    def has_experts(index: int) -> bool:
        return index not in dense and (index + 1) % step == 0

    layers = _replaced(spec, lambda index, layer: replace(layer, mlp=moe) if has_experts(index) else layer)
    return replace(spec, layers=layers, names=QWEN, spellings=(QWEN_FUSED,))


def _replaced(spec: DecoderSpec, change: Callable[[int, LayerSpec], LayerSpec]) -> tuple[LayerSpec, ...]:
    return tuple(change(index, layer) for index, layer in enumerate(spec.layers))


def read_olmoe(config: ConfigReader) -> DecoderSpec:
    attention, mlp = attention_of(config), mlp_of(config, "hidden_act")
    bias = config.take("attention_bias", bool, False)
    routing = routing_of(config, config.take("norm_topk_prob", bool, False))
    windows = (None,) * config.size("num_hidden_layers")
    layers = layers_of(windows, attention, mlp, read_rope(config, attention.head_dim))
    moe = MoeShape(routing=routing, width=mlp.width, activation=mlp.activation)
    return DecoderSpec(
        **common_fields(config),
        layers=tuple(replace(layer, mlp=moe) for layer in layers),
        names=QWEN,
        spellings=(QWEN_FUSED,),
        qkv_bias=bias,
        out_bias=bias,
        width_norms=True,
    )


def read_gpt_oss(config: ConfigReader) -> DecoderSpec:
    """Every other layer slides, starting with the first."""
    layers = config.size("num_hidden_layers")
    for name, only in (("swiglu_limit", CLAMP), ("swiglu_alpha", CLAMPED_GAIN)):
        config.choice(name, only, int(only))
    config.activation("hidden_act", known={"silu": "silu"})
    config.ignore("initial_context_length")  # a duplicate of a field of the scaling
    attention = replace(attention_of(config), sinks=True)
    routing = routing_of(config, renormalised=True)
    repeated = config.take("experts_per_token", int, routing.chosen)
    if repeated != routing.chosen:
        raise invalid("config.json", f"'experts_per_token'={repeated}, but 'num_experts_per_tok'={routing.chosen}")
    moe = MoeShape(
        routing=routing,
        width=config.size("intermediate_size"),
        activation=CLAMPED,
        bias=True,
    )
    kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(layers)]
    windows = config.layer_windows(config.maybe_size("sliding_window"), kinds)
    rope = read_rope(config, attention.head_dim, GPT_OSS_ROPE)
    bias = config.take("attention_bias", bool, True)
    return DecoderSpec(
        **common_fields(config),
        layers=tuple(LayerSpec(attention=replace(attention, window=window), rope=rope, mlp=moe) for window in windows),
        names=GPT_OSS,
        spellings=(QWEN,),
        qkv_bias=bias,
        out_bias=bias,
    )
