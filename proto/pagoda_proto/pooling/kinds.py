"""What a model is for, as its own files tell: text side and tensor side both go by this, and so agree.

generate   it continues a prompt
embed      it makes a vector of a prompt
classify   it gives scores of a prompt, or of a pair of texts
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

GENERATE, EMBED, CLASSIFY = "generate", "embed", "classify"
KINDS = (GENERATE, EMBED, CLASSIFY)
AUTO = "auto"

MODULES = "modules.json"  # of sentence-transformers; a causal model that has them embeds
# Of its transformer, by the names that different releases gave it: how long a text may be, and of what case.
TRANSFORMER_FILES = (
    "sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
    "sentence_mpnet_config.json", "sentence_xlm-roberta_config.json",
)  # fmt: skip
BASES = ("Model", "ForMaskedLM", "ForPreTraining")  # what continues nothing, and has no head of its own
HF_COLBERT = "HF_ColBERT"  # any encoder below a matrix for the vectors of its tokens
HEADED = "LMHeadModel"  # ends like these, and continues
NAMED_PARTS = 4  # of a directory's path: a hub's snapshot lies three below the model's name


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first that config.json names; "" where it names none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def is_yes_no_reranker(config: Mapping[str, Any], model_dir: str) -> bool:
    """Whether its score is how much likelier it says "yes" than "no": Qwen3-Reranker, which only its name tells from
    the model that it was made of."""
    parts = PurePath(model_dir).parts[-NAMED_PARTS:]
    family = architecture_of(config).startswith("Qwen3For")
    return family and any("qwen3-reranker" in part.lower() for part in parts)


def kind_of(config: Mapping[str, Any], model_dir: str, *, has_modules: bool, asked: str = AUTO) -> str:
    """One of KINDS. `has_modules`: whether MODULES is there; `asked`: what the operator says, or AUTO."""
    if asked != AUTO:
        return asked
    name = architecture_of(config)
    if name.endswith("ForSequenceClassification") or is_yes_no_reranker(config, model_dir):
        return CLASSIFY
    is_base = name == HF_COLBERT or (name.endswith(BASES) and not name.endswith(HEADED))
    return EMBED if has_modules or is_base else GENERATE
