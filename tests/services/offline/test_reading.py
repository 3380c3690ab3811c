"""Vectors and scores offline: those of the checkpoint, in the field's usual shapes, with the server's text side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.gateway.model_dir import word_tokenizer
from tests.worker.encoders.checkpoints import save

from pagoda import LLM, PagodaError, PoolingParams

OPTIONS = {"dtype": "float32", "kernels": "torch"}
CLS, SEP, A, B, C = 2, 3, 4, 5, 6
QUERY, COLON = 10, 11


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


def test_a_prompt_is_left_out_of_the_mean_where_the_files_say_so(tmp_path: Path) -> None:
    model = save(tmp_path, "bert", "Model")
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    names = ("Transformer", ""), ("Pooling", "1_Pooling")
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for name, path in names]
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "include_prompt": False}
    prompts = {"prompts": {"q": "query : "}, "default_prompt_name": "q"}
    (tmp_path / "1_Pooling").mkdir()
    for name, content in (
        ("modules.json", modules), ("1_Pooling/config.json", pooling), ("config_sentence_transformers.json", prompts)
    ):  # fmt: skip
        (tmp_path / name).write_text(json.dumps(content))
    llm = LLM(str(tmp_path), **OPTIONS)
    prompted = [CLS, QUERY, COLON, A, B, SEP]
    with torch.inference_mode():
        state = model(input_ids=torch.tensor([prompted])).last_hidden_state[0]
    for found, mean in zip(llm.embed(["a b", {"prompt": "a b"}, prompted]), (state[3:], state[3:], state), strict=True):
        assert found.prompt_token_ids == prompted
        torch.testing.assert_close(torch.tensor(found.outputs.embedding), mean.mean(0), rtol=1e-4, atol=1e-4)
    assert llm.embed("a b", truncate_prompt_tokens=5)[0].prompt_token_ids == [CLS, QUERY, COLON, A, SEP]
    with pytest.raises(PagodaError, match="truncate_prompt_tokens: keeps 4 tokens, but 5 are needed"):
        llm.embed("a b", truncate_prompt_tokens=4)


def test_prompts_are_cut_as_the_server_cuts_them(embedder: tuple[LLM, torch.nn.Module]) -> None:
    llm, _ = embedder
    found = llm.embed([[CLS, A, B, C, SEP], {"prompt_token_ids": [CLS, A]}], truncate_prompt_tokens=2)
    assert [one.prompt_token_ids for one in found] == [[CLS, A], [CLS, A]]
    assert llm.embed({"prompt": "a b c"}, truncate_prompt_tokens=4)[0].prompt_token_ids == [CLS, A, B, SEP]
    for keep, said in (
        (0, "at least 1, got 0"),
        (-5, "at least 1, got -5"),
        (10**9, "at most 300"),
        (1, "3 are needed"),
    ):
        with pytest.raises(PagodaError, match=said) as error:
            llm.embed("a b c", truncate_prompt_tokens=keep)
        assert error.value.param == "truncate_prompt_tokens"


def test_only_learned_dimensions_are_given(embedder: tuple[LLM, torch.nn.Module], tmp_path: Path) -> None:
    with pytest.raises(PagodaError, match="not trained for shorter vectors"):
        embedder[0].embed("a", pooling_params=PoolingParams(dimensions=17))
    llm, _ = loaded(tmp_path, "Model", matryoshka_dimensions=[32, 16])
    with pytest.raises(PagodaError, match="has 32, 16, not 17"):
        llm.embed("a", pooling_params=PoolingParams(dimensions=17))
    assert llm.embed("a", pooling_params=PoolingParams(dimensions=16))[0].outputs.hidden_size == 16


def test_a_task_is_what_is_made(embedder: tuple[LLM, torch.nn.Module], judge: tuple[LLM, torch.nn.Module]) -> None:
    llm, _ = embedder
    wanted = llm.encode("a b", PoolingParams(output="token_embed"))[0].outputs.data
    assert llm.encode("a b", PoolingParams(), pooling_task="token_embed")[0].outputs.data == wanted
    with pytest.raises(PagodaError, match="the output in pooling_params is token_embed") as error:
        llm.encode("a b", PoolingParams(output="token_embed"), pooling_task="embed")
    assert error.value.param == "pooling_task"
    with pytest.raises(PagodaError, match="use encode for token_embed") as error:
        llm.embed("a b", pooling_params=PoolingParams(output="token_embed"))
    assert error.value.param == "pooling_params"


def test_a_model_that_generates_says_so() -> None:
    with LLM("") as llm:
        for call in (llm.encode, llm.embed, llm.classify):
            with pytest.raises(PagodaError, match="this model generates text; it has no embeddings"):
                call("a")


def test_a_score_is_of_one_label(tmp_path: Path) -> None:
    llm, _ = loaded(tmp_path, "ForSequenceClassification", num_labels=3)
    with pytest.raises(PagodaError, match="has 3 labels"):
        llm.score("a", "b")


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
