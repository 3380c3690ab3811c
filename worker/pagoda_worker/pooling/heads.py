"""Heads that give scores: their tensors, by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagoda_proto.pooling.params import CLASSIFY
from pagoda_worker.checkpoints.checkpoint import Checkpoint, CheckpointError
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.pooling.pooler import Pooler, widest
from pagoda_worker.pooling.stages import ACTIVATIONS, Dense, Floats, LayerNorm, Stage

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layer:
    """A matrix of a head: its name and activation. `norm`: the LayerNorm that follows."""

    name: str
    activation: str = "identity"
    norm: str = ""
    asked: str = ""  # the field of config.json that may name another activation


ELEMENTWISE = ACTIVATIONS.keys() - {"softmax"}
SPELLINGS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu", "linear": "identity"}
TWO_LAYERS = (Layer("classifier.dense", "tanh"), Layer("classifier.out_proj"))
POOLER = (Layer("pooler.dense", "tanh"), Layer("classifier"))
HEADS: Mapping[str, tuple[Layer, ...]] = {
    "Bert": POOLER,
    "Roberta": TWO_LAYERS,
    "XLMRoberta": TWO_LAYERS,
    "Camembert": TWO_LAYERS,
    "MPNet": TWO_LAYERS,
    "DistilBert": (Layer("pre_classifier", "relu"), Layer("classifier")),
    "NomicBert": POOLER,
    "New": POOLER,
    "Gte": POOLER,
    "JinaBert": POOLER,
    "ModernBert": (Layer("head.dense", "gelu", "head.norm", "classifier_activation"), Layer("classifier")),
}
DECODER_HEAD = (Layer("score"),)


def tensor(checkpoint: Checkpoint, name: str) -> Floats:
    """Raises CheckpointError if it is missing."""
    if name not in checkpoint.entries:
        raise CheckpointError(checkpoint.path, [f"missing tensors: {name}"])
    found: Floats = checkpoint.get(name, torch.float32, CPU).numpy()
    return found


def optional(checkpoint: Checkpoint, name: str) -> Floats | None:
    return tensor(checkpoint, name) if name in checkpoint.entries else None


def dense(checkpoint: Checkpoint, name: str, activation: str, inputs: int) -> Dense:
    """Raises CheckpointError if it does not take this many inputs."""
    weight, bias = tensor(checkpoint, f"{name}.weight"), optional(checkpoint, f"{name}.bias")
    if weight.ndim != 2 or weight.shape[1] != inputs or (bias is not None and bias.shape != weight.shape[:1]):
        raise CheckpointError(checkpoint.path, [f"{name} has shape {list(weight.shape)}, expected {inputs} inputs"])
    return Dense(weight, bias, activation)


def way_of(fields: Mapping[str, Any]) -> str:
    """How the head's input is pooled from an encoder's states. Raises UnsupportedConfig."""
    way = fields.get("classifier_pooling", "cls")
    if way not in ("cls", "mean"):
        raise UnsupportedConfig(f"config.json: classifier_pooling={str(way)[:64]!r} is neither cls nor mean")
    return str(way)


def classifier(
    checkpoint: Checkpoint, layers: tuple[Layer, ...], way: str, hidden_size: int, fields: Mapping[str, Any]
) -> Pooler:
    """The pooler of a model with a head of these layers.

    Raises:
        CheckpointError: a tensor of it is missing or misshapen, or config.json counts other labels.
        UnsupportedConfig: config.json names an unknown activation.
    """
    stages: list[Stage] = []
    width = hidden_size
    for layer in layers:
        stages.append(dense(checkpoint, layer.name, _asked(fields, layer), width))
        width = widest(stages[-1:], width)
        if layer.norm:
            weight, eps = tensor(checkpoint, f"{layer.norm}.weight"), _norm_eps(fields)
            stages.append(LayerNorm(weight, optional(checkpoint, f"{layer.norm}.bias"), eps))
    named = fields.get("id2label")
    if isinstance(named, dict) and len(named) != width:
        raise CheckpointError(checkpoint.path, [f"the head gives {width} scores, config.json has {len(named)} labels"])
    return Pooler(
        ways=(way,), stages=tuple(stages), width=width, outputs=(CLASSIFY,), activation=activation_of(fields, width)
    )


def _asked(fields: Mapping[str, Any], layer: Layer) -> str:
    named = fields.get(layer.asked, layer.activation) if layer.asked else layer.activation
    found = SPELLINGS.get(named, named) if isinstance(named, str) else ""
    if found not in ELEMENTWISE:
        raise UnsupportedConfig(f"config.json: {layer.asked}={str(named)[:64]!r} is not supported")
    return found


def _norm_eps(fields: Mapping[str, Any]) -> float:
    found = fields.get("norm_eps", 1e-5)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1:
        raise UnsupportedConfig(f"config.json: norm_eps={str(found)[:64]!r} is not a number between 0 and 1")
    return float(found)


def difference(checkpoint: Checkpoint, name: str, yes: int, no: int) -> Pooler:
    """The score of a model that would answer yes or no: the probability of "yes" among the two is a sigmoid of the
    difference of their logits. `name` is the output matrix."""
    weight = tensor(checkpoint, name)
    row = np.ascontiguousarray(weight[yes] - weight[no])[None]
    return Pooler(ways=("last",), stages=(Dense(row),), width=1, outputs=(CLASSIFY,), activation="sigmoid")


def activation_of(fields: Mapping[str, Any], num_labels: int) -> str:
    """The activation of scores. sentence-transformers' setting wins; raises UnsupportedConfig for an unknown one."""
    nested = fields.get("sentence_transformers")
    nested = nested.get("activation_fn") if isinstance(nested, dict) else None
    named = nested or fields.get("sbert_ce_default_activation_function")
    if named is not None:
        known = {"identity": "identity", "sigmoid": "sigmoid", "softmax": "softmax"}
        short = str(named).rpartition(".")[2].lower()
        if short not in known:
            raise UnsupportedConfig(f"config.json: the score activation {str(named)[:64]!r} is not supported")
        return known[short]
    kind = fields.get("problem_type")
    if kind == "regression":
        return "identity"
    return "sigmoid" if num_labels == 1 or kind == "multi_label_classification" else "softmax"
