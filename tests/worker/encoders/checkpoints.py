"""Tiny encoders of every family, with random weights, saved by transformers as their authors would publish them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

VOCAB = 120
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
BERT = {"vocab_size": VOCAB, "max_position_embeddings": 300, **SIZES}
ROTARY = {**BERT, "max_position_embeddings": 700}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", BERT),
    "roberta": ("Roberta", {**BERT, "max_position_embeddings": 302, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {**BERT, "max_position_embeddings": 302, "type_vocab_size": 1}),
    "mpnet": ("MPNet", {**BERT, "max_position_embeddings": 302}),
    "distilbert": (
        "DistilBert",
        {
            "vocab_size": VOCAB, "max_position_embeddings": 300, "dim": 64, "n_layers": 3, "n_heads": 4,
            "hidden_dim": 96,
        },
    ),
    "nomic": ("NomicBert", ROTARY),
    "gte": ("Gte", {**ROTARY, "type_vocab_size": 1}),
    "modernbert": ("ModernBert", {**ROTARY, "local_attention": 20, "num_hidden_layers": 4, "pad_token_id": 0}),
}  # fmt: skip

SINCE = {"gte": (5, 18)}  # families that only newer versions of transformers know


def save(path: Path, family: str, head: str = "Model", **more: Any) -> Any:
    """Write a model of this family to `path`, and return transformers' model in float32."""
    name, fields = CONFIGS[family]
    if tuple(map(int, transformers.__version__.split(".")[:2])) < SINCE.get(family, ()):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**fields | more)
    kind = getattr(transformers, f"{name}{head}")
    arguments = {"add_pooling_layer": False} if head == "Model" and family in ("bert", "roberta", "xlm-roberta") else {}
    model = kind._from_config(config, **arguments) if not arguments else kind(config, **arguments)
    for parameter in model.parameters():  # biases and norms would otherwise be zeros and ones
        parameter.data.normal_(std=0.15) if parameter.dim() > 1 else parameter.data.add_(
            torch.randn_like(parameter) * 0.1
        )
    model.eval().save_pretrained(path)
    return model


def texts(longest: int = 290) -> list[list[int]]:
    """Token ids of a few texts, from one token to `longest`, without the ids used for padding."""
    generator = torch.Generator().manual_seed(3)
    sizes = [1, 7, 2, 33, 64, 5, 129, longest]
    return [torch.randint(3, VOCAB, (size,), generator=generator).tolist() for size in sizes]
