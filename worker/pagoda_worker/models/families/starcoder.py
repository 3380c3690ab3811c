"""StarCoder2 (arXiv 2402.19173): LayerNorm and biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from pagoda_worker.checkpoints.config_reader import ConfigReader
from pagoda_worker.checkpoints.names import Names
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.models.families.llama import common_fields, sliding_layers, ungated_mlp

NAMES = Names(up=("mlp.c_fc",), down="mlp.c_proj")


def read_starcoder2(config: ConfigReader) -> DecoderSpec:
    bias = config.take("use_bias", bool, True)
    for kind, field in (("layer_norm", "norm_type"), ("default", "mlp_type")):
        config.choice(field, kind)
    mlp = ungated_mlp(config, config.size("intermediate_size"), "hidden_act", "gelu_pytorch_tanh", bias)
    return DecoderSpec(
        **common_fields(config, eps="norm_epsilon"),
        names=NAMES,
        layers=sliding_layers(config, mlp),
        qkv_bias=bias,
        out_bias=bias,
        norm_kind="layer",
        norm_bias=True,
    )
