"""The purpose of a model, derived from its files. Text side and tensor side both use this, so they agree.

generate   continues a prompt
embed      turns a prompt into a vector
classify   turns a prompt, or a pair of texts, into scores
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

GENERATE, EMBED, CLASSIFY = "generate", "embed", "classify"
KINDS = (GENERATE, EMBED, CLASSIFY)
AUTO = "auto"

MODULES = "modules.json"  # of sentence-transformers; a causal model that has it embeds
# Config of its transformer, under the names used by different releases: maximum length and case of texts.
TRANSFORMER_FILES = (
    "sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
    "sentence_mpnet_config.json", "sentence_xlm-roberta_config.json",
)  # fmt: skip
BASES = ("Model", "ForMaskedLM", "ForPreTraining")  # models that do not generate and have no head
HF_COLBERT = "HF_ColBERT"  # any encoder, followed by a projection of its token vectors
HEADED = "LMHeadModel"  # ends like one of BASES, but generates
NAMED_PARTS = 4  # of a directory's path: a hub's snapshot is three levels below the model's name


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first architecture that config.json names; "" if it names none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def is_yes_no_reranker(config: Mapping[str, Any], model_dir: str) -> bool:
    """Whether its score is how much likelier "yes" is than "no": Qwen3-Reranker, which only its name distinguishes from
    its base model."""
    parts = PurePath(model_dir).parts[-NAMED_PARTS:]
    family = architecture_of(config).startswith("Qwen3For")
    return family and any("qwen3-reranker" in part.lower() for part in parts)


def kind_of(config: Mapping[str, Any], model_dir: str, *, has_modules: bool, asked: str = AUTO) -> str:
    """One of KINDS. `has_modules`: whether MODULES exists; `asked`: the operator's choice, or AUTO."""
    if asked != AUTO:
        return asked
    name = architecture_of(config)
    if name.endswith("ForSequenceClassification") or is_yes_no_reranker(config, model_dir):
        return CLASSIFY
    is_base = name == HF_COLBERT or (name.endswith(BASES) and not name.endswith(HEADED))
    return EMBED if has_modules or is_base else GENERATE
