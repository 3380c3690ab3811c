"""Heads of every native family that transformers has a class for: its scores, in float32, of prompts and of pairs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.gateway.model_dir import word_tokenizer
from tests.worker.models.checkpoints import NATIVE, config_of, make_model, prompts, save
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from pagoda import LLM
from pagoda.settings.problems import ConfigError
from pagoda_worker.models import ARCHITECTURES

LABELS = 3
NEAR = 2e-4
PAIR = [2, 4, 3, 5, 6, 3]  # [CLS] a [SEP] b c [SEP]
CLASSES = AutoModelForSequenceClassification._model_mapping
FAMILIES = [name for name, one in NATIVE.items() if type(config_of(*one)) in CLASSES]


def written(model: Any, path: Path) -> LLM:
    save(model, path)
    word_tokenizer().save(str(path / "tokenizer.json"))
    return LLM(str(path), dtype="float32", kernels="torch", chunk_size=64, num_blocks=64, threads=1)


def logits_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt])).logits[0]


def with_one_label(model: Any) -> Any:
    """The same model with a head that has the first label alone."""
    one = copy.deepcopy(model)
    one.config.num_labels = one.num_labels = 1
    one.score = torch.nn.Linear(model.score.in_features, 1, bias=False)
    with torch.no_grad():
        one.score.weight.copy_(model.score.weight[:1])
    return one


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model_type, changes = NATIVE[name]
    model = make_model(model_type, changes | {"num_labels": LABELS}, auto=AutoModelForSequenceClassification)
    with written(model, tmp_path / "classes") as llm:
        raw, shares = llm.reward(prompts()), llm.classify(prompts())
    for prompt, logits, probs in zip(prompts(), raw, shares, strict=True):
        expected = logits_of(model, prompt)
        torch.testing.assert_close(torch.tensor(logits.outputs.probs), expected, rtol=NEAR, atol=NEAR)
        torch.testing.assert_close(torch.tensor(probs.outputs.probs), expected.softmax(-1), rtol=NEAR, atol=NEAR)
    judge = with_one_label(model)
    with written(judge, tmp_path / "judge") as llm:
        found = llm.score("a", ["b c", "b"])
    assert found[0].prompt_token_ids == PAIR
    assert found[0].outputs.score == pytest.approx(logits_of(judge, PAIR).sigmoid().item(), abs=NEAR)
    assert found[0].outputs.score != found[1].outputs.score


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "gpt2", "opt", "falcon"])
def test_a_family_saved_without_a_head_embeds_by_its_last_token(name: str, tmp_path: Path) -> None:
    """These differ in what precedes the names of their tensors."""
    model = make_model(*NATIVE[name])
    base = getattr(model, model.base_model_prefix)
    with written(base, tmp_path) as llm:
        found = llm.embed(prompts())
    for prompt, vector in zip(prompts(), found, strict=True):
        with torch.inference_mode():
            state = base(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(state, dim=0)
        torch.testing.assert_close(torch.tensor(vector.outputs.embedding), expected, rtol=NEAR, atol=NEAR)


@pytest.mark.parametrize("auto", [AutoModelForTokenClassification, AutoModelForQuestionAnswering])
def test_other_heads_are_refused_by_name(auto: Any, tmp_path: Path) -> None:
    """A tied output matrix is always there, but it is not what the model was trained with."""
    model = make_model("llama", {"tie_word_embeddings": True}, auto=auto)
    with pytest.raises(ConfigError, match=f"'{type(model).__name__}' has a head that is not supported"):
        written(model, tmp_path)


def test_no_family_is_left_out() -> None:
    """Images are read by none: `Gemma3ForSequenceClassification` has them, and its text model a name of its own."""
    tested = {CLASSES[type(config_of(*NATIVE[name]))].__name__ for name in FAMILIES}
    stems = {name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") for name in ARCHITECTURES}
    known = {f"{stem}ForSequenceClassification" for stem in stems} - {"Gemma3ForSequenceClassification"}
    assert {name for name in known if hasattr(transformers, name)} <= tested
    assert "Gemma3TextForSequenceClassification" in tested
