"""Families of encoders, each a function from config.json to a spec, by the architecture they are published under.

To add one: a function `read(ConfigReader) -> EncoderSpec` here, and a line in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagoda_proto.pooling.kinds import HF_COLBERT, architecture_of
from pagoda_worker.checkpoints.config_reader import (
    HARMLESS,
    REQUIRED_VALUES,
    ConfigReader,
    UnsupportedConfig,
    invalid,
)
from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.rope_fields import RopeDefaults, rope_shape
from pagoda_worker.encoders.spec import BUCKETS, EncoderLayer, EncoderSpec, Names
from pagoda_worker.kernels.ops import AttentionShape

SEES_BOTH_WAYS: dict[str, tuple[Any, ...]] = dict.fromkeys(("is_decoder", "is_causal"), (False, None))
# For training, other heads, and code that we do not run: none of them changes a hidden state.
ENCODER_HARMLESS = HARMLESS | {
    "attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout", "gradient_checkpointing",
    "output_past", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type",
    "directionality", "problem_type", "sbert_ce_default_activation_function", "sentence_transformers", "qa_dropout",
    "seq_classif_dropout", "dropout", "tie_weights_", "tie_word_embeddings", "cls_token_id",
    "sep_token_id", "classifier_bias", "classifier_pooling", "decoder_bias",
    "deterministic_flash_attn", "embedding_dropout", "mlp_dropout", "initializer_cutoff_factor", "reference_compile",
    "repad_logits_with_grad", "sparse_pred_ignore_index", "sparse_prediction", "matryoshka_dimensions",
    "is_matryoshka", "pad_vocab_size_multiple", "use_flash_attn", "fused_bias_fc", "fused_dropout_add_ln",
    "use_xentropy", "unpad_inputs", "use_memory_efficient_attention", "last_layer_subset",
    "dense_seq_output", "embd_pdrop", "attn_pdrop", "resid_pdrop", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "reorder_and_upcast_attn",
    "pack_qkv", "emb_pooler", "attn_implementation", "model_max_length",
    "add_cross_attention", "chunk_size_feed_forward",
}  # fmt: skip
ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "relu": "relu", "silu": "silu", "swish": "silu", "swiglu": "silu", "geglu": "gelu",
}  # fmt: skip


JINA_GATES = {"geglu": "gelu", "reglu": "relu"}


def _activation(config: ConfigReader, name: str, default: str = "gelu") -> str:
    value = config.take(name, str, default)
    if value not in ACTIVATIONS:
        raise UnsupportedConfig(f"config.json: {name}={value[:64]!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def _attention(hidden: int, heads: int, window: int | None = None) -> AttentionShape:
    dim = hidden // heads
    if hidden % heads or dim % 2:
        raise invalid("config.json", f"a hidden size of {hidden} does not divide into {heads} heads of an even size")
    return AttentionShape(
        num_heads=heads, num_kv_heads=heads, head_dim=dim, scale=dim**-0.5, window=window, causal=False
    )


def _sizes(config: ConfigReader) -> tuple[int, int, int]:
    """Layers, hidden size and heads, by their usual names."""
    return config.size("num_hidden_layers"), config.size("hidden_size"), config.size("num_attention_heads")


def _widths(config: ConfigReader, hidden: int, of_mlp: str = "intermediate_size") -> dict[str, Any]:
    """The widths; `of_mlp` is the field with the MLP's."""
    return {"vocab_size": config.size("vocab_size"), "hidden_size": hidden, "width": config.size(of_mlp)}


def _bert_like(config: ConfigReader, names: Names, reserved: int = 0, **more: Any) -> EncoderSpec:
    """Learned positions, less those `reserved` for padding; a norm after every sum."""
    layers, hidden, heads = _sizes(config)
    kind = config.take("position_embedding_type", str, "absolute")
    if kind != "absolute":
        raise UnsupportedConfig(f"config.json: position_embedding_type={kind[:64]!r} is not supported")
    places = config.size("max_position_embeddings")
    if places <= reserved:
        raise invalid("config.json", f"'max_position_embeddings' must be above {reserved}, got {places}")
    return EncoderSpec(
        names=names,
        **_widths(config, hidden),
        activation=_activation(config, "hidden_act"),
        norm_eps=config.positive("layer_norm_eps", 1e-12),
        max_positions=places - reserved,
        layers=(EncoderLayer(attention=_attention(hidden, heads)),) * layers,
        num_places=places,
        first_place=reserved,
        **more,
    )


def read_bert(config: ConfigReader) -> EncoderSpec:
    """arXiv 1810.04805"""
    return _bert_like(config, Names(), num_types=config.size("type_vocab_size", 2))


def read_jina_bert(config: ConfigReader) -> EncoderSpec:
    """arXiv 2310.19923: BERT with ALiBi (arXiv 2108.12409) in place of positions, and a gated MLP."""
    layers, hidden, heads = _sizes(config)
    config.choice("position_embedding_type", "alibi")
    kind = config.take("feed_forward_type", str, "original")
    if kind not in JINA_GATES:
        raise UnsupportedConfig(f"config.json: feed_forward_type={kind[:64]!r} is not one of {', '.join(JINA_GATES)}")
    config.take("hidden_act", str, "gelu")  # for the MLP without a gate
    return EncoderSpec(
        names=Names(up=("mlp.gated_layers",), down="mlp.wo", mlp_norm="mlp.layernorm"),
        **_widths(config, hidden),
        activation=JINA_GATES[kind],
        norm_eps=config.positive("layer_norm_eps", 1e-12),
        max_positions=config.size("max_position_embeddings"),
        layers=(EncoderLayer(attention=_attention(hidden, heads)),) * layers,
        gated=True,
        up_bias=False,
        num_types=config.size("type_vocab_size", 2),
        alibi=True,
    )


def read_roberta(config: ConfigReader) -> EncoderSpec:
    """arXiv 1907.11692, and XLM-R, 1911.02116: positions count from the padding id plus one."""
    reserved = config.take("pad_token_id", int, 1) + 1
    return _bert_like(config, Names(), reserved, num_types=config.size("type_vocab_size", 1))


def read_mpnet(config: ConfigReader) -> EncoderSpec:
    """arXiv 2004.09297: learned positions, and a bias by distance that all layers share."""
    names = Names(
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        attention_norm="attention.LayerNorm",
        relative="encoder.relative_attention_bias",
    )
    reserved = config.take("pad_token_id", int, 1) + 1
    buckets = config.size("relative_attention_num_buckets", 32)
    if buckets not in BUCKETS:
        raise UnsupportedConfig(
            f"config.json: relative_attention_num_buckets={buckets} is not from {BUCKETS[0]} to {BUCKETS[-1]}"
        )
    return _bert_like(config, names, reserved, num_buckets=buckets)


def read_distilbert(config: ConfigReader) -> EncoderSpec:
    """arXiv 1910.01108"""
    names = Names(
        layer="transformer.layer.",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        attention_norm="sa_layer_norm",
        up=("ffn.lin1",),
        down="ffn.lin2",
        mlp_norm="output_layer_norm",
    )
    config.take("sinusoidal_pos_embds", bool, False)  # stored like any others
    hidden, heads = config.size("dim"), config.size("n_heads")
    places = config.size("max_position_embeddings", 512)
    return EncoderSpec(
        names=names,
        **_widths(config, hidden, "hidden_dim"),
        activation=_activation(config, "activation"),
        norm_eps=1e-12,
        max_positions=places,
        layers=(EncoderLayer(attention=_attention(hidden, heads)),) * config.size("n_layers"),
        num_places=places,
    )


def _rope_fields(config: ConfigReader) -> dict[str, Any]:
    """In either spelling."""
    return config.maybe("rope_parameters", dict) or config.maybe("rope_scaling", dict) or {}


def _rotary(config: ConfigReader, head_dim: int, default_theta: float, longest: int) -> RopeShape:
    parameters = _rope_fields(config)
    return _turned(parameters, head_dim, config.positive("rope_theta", default_theta), longest)


def _turned(parameters: Mapping[str, Any], head_dim: int, theta: float, longest: int) -> RopeShape:
    """From `rope_parameters`, for a model of `longest` positions, however its family spells that."""
    beside = ConfigReader({"max_position_embeddings": longest})
    return rope_shape(beside, parameters, head_dim, RopeDefaults(theta=theta))


def read_nomic(config: ConfigReader) -> EncoderSpec:
    """arXiv 2402.01613. Published files use the names of the GPT-2 code it came from; transformers uses BERT's."""
    old = config.maybe("n_embd", int) is not None
    hidden, heads = (
        config.size("n_embd" if old else "hidden_size"),
        config.size("n_head" if old else "num_attention_heads"),
    )
    layers = config.size("n_layer" if old else "num_hidden_layers")
    theta, bias = (_nomic_old(config), config.take("qkv_proj_bias", bool, False)) if old else (1000.0, False)
    up_bias = config.take("mlp_fc1_bias", bool, False) if old else False
    down_bias = config.take("mlp_fc2_bias", bool, False) if old else False
    positions = config.size("n_positions" if old else "max_position_embeddings", 2048)
    rope = _rotary(config, hidden // heads, theta, positions)
    config.choice("head_dim", hidden // heads)
    return EncoderSpec(
        names=NOMIC_NAMES,
        **_widths(config, hidden, "n_inner" if old else "intermediate_size"),
        activation=_activation(config, "activation_function" if old else "hidden_act", "silu"),
        norm_eps=config.positive("layer_norm_epsilon" if old else "layer_norm_eps", 1e-12),
        max_positions=positions,
        layers=(EncoderLayer(attention=_attention(hidden, heads), rope=rope),) * layers,
        gated=True,
        qkv_bias=bias,
        out_bias=bias,
        up_bias=up_bias,
        down_bias=down_bias,
        num_types=config.size("type_vocab_size", 2),
    )


NOMIC_NAMES = Names(
    embed_norm="emb_ln",
    layer="encoder.layers.",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
)


def _nomic_old(config: ConfigReader) -> float:
    """The base of the angles; all other fields must be as in the published models."""
    config.choice("prenorm", False)
    config.choice("parallel_block", False)
    config.choice("rotary_emb_fraction", 1.0, 1)
    config.choice("rotary_emb_interleaved", False)
    config.choice("rotary_emb_scale_base", None)
    config.choice("rotary_scaling_factor", None)
    config.choice("use_rms_norm", False)
    config.choice("causal", False)
    config.choice("scale_attn_by_inverse_layer_idx", False)
    config.choice("scale_attn_weights", True)
    config.maybe("max_trained_positions", int)
    return config.positive("rotary_emb_base", 1000.0)


def read_gte(config: ConfigReader) -> EncoderSpec:
    """arXiv 2407.19669"""
    layers, hidden, heads = _sizes(config)
    for name, value in (("position_embedding_type", "rope"), ("layer_norm_type", "layer_norm")):
        config.choice(name, value)
    config.choice("logn_attention_scale", False)
    config.maybe("logn_attention_clip1", bool)
    positions = config.size("max_position_embeddings", 8192)
    rope = _gte_rotary(config, hidden // heads, positions)
    names = Names(
        qkv=("attention.qkv_proj",), out="attention.o_proj", attention_norm="attn_ln",
        up=("mlp.up_gate_proj",), up_first=True, down="mlp.down_proj", mlp_norm="mlp_ln",
    )  # fmt: skip
    return EncoderSpec(
        names=names,
        **_widths(config, hidden),
        activation=_activation(config, "hidden_act"),
        norm_eps=config.positive("layer_norm_eps", 1e-12),
        max_positions=positions,
        layers=(EncoderLayer(attention=_attention(hidden, heads), rope=rope),) * layers,
        gated=True,
        up_bias=False,
        num_types=config.take("type_vocab_size", int, 1),
    )


def _gte_rotary(config: ConfigReader, head_dim: int, longest: int) -> RopeShape:
    """Published files may scale by the family's own kind, "ntk": theta times the factor, and frequencies divided by the
    factor's power of 2 / `head_dim`. That is linear scaling with another theta."""
    parameters = _rope_fields(config)
    theta = config.positive("rope_theta", 160_000.0)
    if "ntk" not in (parameters.get("rope_type"), parameters.get("type")):
        return _turned(parameters, head_dim, theta, longest)
    reader = ConfigReader(parameters, "config.json: rope", ("rope_type", "type"))
    factor, theta = reader.maybe_positive("factor"), reader.positive("rope_theta", theta)
    reader.finish()
    if factor is None:
        raise UnsupportedConfig("config.json: rope type 'ntk' needs factor")
    factor = max(1.0, factor)
    linear = {"rope_type": "linear", "factor": factor ** (2 / head_dim)}
    return _turned(linear, head_dim, theta * factor, longest)


def read_modernbert(config: ConfigReader) -> EncoderSpec:
    """arXiv 2412.13663: a norm before each branch, gates, and windows in two of three layers."""
    count, hidden, heads = _sizes(config)
    every = config.size("global_attn_every_n_layers", 3)
    window = config.size("local_attention", 128) // 2 + 1
    kinds = ["sliding_attention" if i % every else "full_attention" for i in range(count)]
    windows = config.layer_windows(window, kinds)
    config.ignore("classifier_activation")  # its head reads it
    positions = config.size("max_position_embeddings", 8192)
    ropes = _modern_ropes(config, hidden // heads, positions)
    bias, attention_bias = config.take("mlp_bias", bool, False), config.take("attention_bias", bool, False)
    names = Names(
        words="embeddings.tok_embeddings", embed_norm="embeddings.norm", layer="layers.", qkv=("attn.Wqkv",),
        out="attn.Wo", attention_norm="attn_norm", up=("mlp.Wi",), down="mlp.Wo", mlp_norm="mlp_norm",
        final_norm="final_norm",
    )  # fmt: skip
    return EncoderSpec(
        names=names,
        **_widths(config, hidden),
        activation=_activation(config, "hidden_activation"),
        norm_eps=_agreed(config, "norm_eps", "layer_norm_eps"),
        max_positions=positions,
        layers=tuple(
            EncoderLayer(attention=_attention(hidden, heads, one), rope=ropes[one is not None], attention_norm=i > 0)
            for i, one in enumerate(windows)
        ),
        gated=True,
        pre_norm=True,
        norm_bias=config.take("norm_bias", bool, False),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        up_bias=bias,
        down_bias=bias,
    )


def _agreed(config: ConfigReader, name: str, older: str) -> float:
    """The published files have both."""
    config.positive(older, 1e-5)
    return config.positive(name, 1e-5)


def _modern_ropes(config: ConfigReader, head_dim: int, longest: int) -> tuple[RopeShape, RopeShape]:
    """For full-attention layers, and for sliding ones."""
    config.choice("position_embedding_type", "absolute", "sans_pos")  # inherited from BERT, not read
    given: Mapping[str, Any] = config.maybe("rope_parameters", dict) or {}
    older = config.positive("global_rope_theta", 160_000.0), config.positive("local_rope_theta", 10_000.0)
    whole, local = (
        _turned(given.get(kind) or {}, head_dim, theta, longest)
        for kind, theta in zip(("full_attention", "sliding_attention"), older, strict=True)
    )
    return whole, local


FAMILIES: dict[str, Callable[[ConfigReader], EncoderSpec]] = {
    "Bert": read_bert,
    "Roberta": read_roberta,
    "XLMRoberta": read_roberta,
    "Camembert": read_roberta,
    "MPNet": read_mpnet,
    "DistilBert": read_distilbert,
    "NomicBert": read_nomic,
    "New": read_gte,
    "Gte": read_gte,
    "ModernBert": read_modernbert,
    "JinaBert": read_jina_bert,
}
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForPreTraining")
"""How an architecture's name may end; all have the same encoder."""


WRAPPED = {
    "bert": "BertModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel", "camembert": "CamembertModel",
    "mpnet": "MPNetModel", "distilbert": "DistilBertModel", "modernbert": "ModernBertModel",
}  # fmt: skip
"""By `model_type`, the model that HF_ColBERT wraps."""


def encoder_architecture(fields: Mapping[str, Any]) -> str:
    """The architecture of config.json; for a wrapper, that of the wrapped model."""
    name = architecture_of(fields)
    return WRAPPED.get(str(fields.get("model_type")), name) if name == HF_COLBERT else name


def family_of(architecture: str) -> str:
    """The family of an encoder's architecture; "" if it is none."""
    found = (name for name in FAMILIES for head in HEADS if architecture == name + head)
    return next(found, "")


def encoder_spec(architecture: str, fields: dict[str, Any]) -> EncoderSpec:
    """Read the config.json of an encoder.

    Raises:
        UnsupportedConfig: the architecture or a field is not supported; the message names it.
        CheckpointError: a field has a value that no model can have.
    """
    family = family_of(architecture)
    if not family:
        raise UnsupportedConfig(f"config.json: architecture {architecture!r} is not a supported encoder")
    reader = ConfigReader(fields, harmless=ENCODER_HARMLESS, required=REQUIRED_VALUES | SEES_BOTH_WAYS)
    spec = FAMILIES[family](reader)
    reader.finish()
    return spec
