"""Vectors and scores offline: those of the checkpoint, in the field's usual shapes, with the server's text side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gateway.model_dir import word_tokenizer
from tests.worker.encoders.checkpoints import save

from pagoda import LLM, PagodaError, PoolingParams

OPTIONS = {"dtype": "float32", "kernels": "torch"}
CLS, SEP, A, B, C = 2, 3, 4, 5, 6


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, torch.nn.Module]:
    return loaded(tmp_path_factory.mktemp("embed"), "Model")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, torch.nn.Module]:
    return loaded(tmp_path_factory.mktemp("judge"), "ForSequenceClassification", num_labels=1)


def loaded(path: Path, head: str, **more: object) -> tuple[LLM, torch.nn.Module]:
    model = save(path, "bert", head, **more)
    word_tokenizer().save(str(path / "tokenizer.json"))
    return LLM(str(path), **OPTIONS), model


def test_vectors_of_texts_and_of_tokens(embedder: tuple[LLM, torch.nn.Module]) -> None:
    llm, model = embedder
    found = llm.embed(["a b", [CLS, A, B, SEP]])
    with torch.inference_mode():
        state = model(input_ids=torch.tensor([[CLS, A, B, SEP]])).last_hidden_state[0]
    expected = torch.nn.functional.normalize(state[0], dim=0)
    assert found[0].outputs.embedding == found[1].outputs.embedding
    assert found[0].prompt_token_ids == [CLS, A, B, SEP]
    torch.testing.assert_close(torch.tensor(found[0].outputs.embedding), expected, rtol=1e-4, atol=1e-4)
    (whole,) = llm.encode("a b", PoolingParams(output="token_embed", normalize=False))
    torch.testing.assert_close(torch.tensor(whole.outputs.data), state, rtol=1e-4, atol=1e-4)


def test_a_model_that_embeds_scores_by_likeness(embedder: tuple[LLM, torch.nn.Module]) -> None:
    found = embedder[0].score("a b", ["a b", "c"])
    assert found[0].outputs.score == pytest.approx(1.0)
    assert found[1].outputs.score < 0.999


def test_a_head_scores_pairs_and_texts(judge: tuple[LLM, torch.nn.Module]) -> None:
    llm, model = judge
    pair, kinds = [CLS, A, SEP, B, C, SEP], [0, 0, 0, 1, 1, 1]
    with torch.inference_mode():
        raw = model(input_ids=torch.tensor([pair]), token_type_ids=torch.tensor([kinds])).logits[0, 0]
        alone = model(input_ids=torch.tensor([[CLS, A, SEP]])).logits[0, 0]
    assert llm.score("a", "b c")[0].outputs.score == pytest.approx(raw.sigmoid().item(), abs=1e-4)
    assert llm.classify("a")[0].outputs.probs == pytest.approx([alone.sigmoid().item()], abs=1e-4)
    assert llm.reward("a")[0].outputs.probs == pytest.approx([alone.item()], abs=1e-3)


def test_what_does_not_fit_is_told_before_anything_runs(
    embedder: tuple[LLM, torch.nn.Module], judge: tuple[LLM, torch.nn.Module]
) -> None:
    llm, _ = embedder
    with pytest.raises(PagodaError, match=r"prompt 1: .*maximum context length is 300"):
        llm.embed(["a", "a " * 300])
    assert len(llm.embed("a " * 400, truncate_prompt_tokens=-1)[0].prompt_token_ids) == 300
    with pytest.raises(PagodaError, match="not classify"):
        llm.classify("a")
    with pytest.raises(PagodaError, match="not embed"):
        judge[0].embed("a")
    with pytest.raises(PagodaError, match="does not generate text"):
        llm.generate("a")
    with pytest.raises(PagodaError, match="as many as data_2"):
        llm.score(["a", "b"], ["c"])
