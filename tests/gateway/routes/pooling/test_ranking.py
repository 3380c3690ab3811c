"""Scores and ranking: pairs for a model with a head, similarity for one that embeds, in each API's own format."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from tests.gateway.fakes_engine import Gateway, reads
from tests.gateway.model_dir import word_tokenizer, write_model_dir, write_reader_dir
from tokenizers import AddedToken

from pagoda_gateway.api.pooling_answers import RankedText, RerankAnswer, ScoreAnswer
from pagoda_gateway.clients import NOBODY
from pagoda_gateway.pooling.asked import Asked
from pagoda_gateway.pooling.scoring import Scoring
from pagoda_proto.errors import InvalidParams
from pagoda_proto.pooling.params import PoolingParams
from pagoda_proto.records import Pool

CLS, SEP, A, B, C = 2, 3, 4, 5, 6


def judge(root: Path, *scores: float, labels: int = 1) -> Gateway:
    """A model with a classification head, whose pairs get these scores."""
    named = {str(i): f"L{i}" for i in range(labels)}
    root = write_reader_dir(root, "BertForSequenceClassification", id2label=named)
    return Gateway(root, reads(*([score] for score in scores or (0.5,))))


async def post(gateway: Gateway, path: str, **body: Any) -> Any:
    answer = await gateway.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def problem(gateway: Gateway, path: str, **body: Any) -> tuple[str, str]:
    answer = await gateway.client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_one_text_is_scored_against_several(path: str, tmp_path: Path) -> None:
    gateway = judge(tmp_path, 0.25, 0.5)
    answer = await post(gateway, path, text_1="a", text_2=["b", "c a"])
    ScoreAnswer.model_validate_json(json.dumps(answer))
    assert [one["score"] for one in answer["data"]] == [0.25, 0.5]
    records = [one.record for one in gateway.engine.generations]
    assert [one.prompt_token_ids for one in records] == [[CLS, A, SEP, B, SEP], [CLS, A, SEP, C, A, SEP]]
    assert all(isinstance(one.task, Pool) and one.task.pooling.second_start == 3 for one in records)


async def test_as_many_are_scored_against_as_many(tmp_path: Path) -> None:
    gateway = judge(tmp_path, 0.25, 0.5)
    await post(gateway, "/score", text_1=["a", "b"], text_2=["b", "c"])
    found = [one.record.prompt_token_ids for one in gateway.engine.generations]
    assert found == [[CLS, A, SEP, B, SEP], [CLS, B, SEP, C, SEP]]
    param, message = await problem(gateway, "/score", text_1=["a", "b"], text_2=["b", "c", "a"])
    assert (param, "as many as text_2 (3), got 2" in message) == ("text_1", True)


async def test_a_model_that_embeds_scores_by_likeness_and_reads_each_text_once(tmp_path: Path) -> None:
    gateway = Gateway(write_reader_dir(tmp_path), reads([1.0, 0.0], [0.0, 1.0], [3.0, 4.0]))
    answer = await post(gateway, "/score", text_1="a", text_2=["a", "b", "c", "b"])
    assert [one["score"] for one in answer["data"]] == pytest.approx([1.0, 0.0, 0.6, 0.0])
    assert len(gateway.engine.generations) == 3


class Compared(str):
    """Counts comparisons of texts."""

    __slots__ = ()
    times = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return str.__eq__(self, other)


async def test_texts_are_not_held_against_all_others(tmp_path: Path) -> None:
    """A quadratic comparison of thousands of texts would block the event loop, before their number is even checked."""
    ctx = Gateway(write_reader_dir(tmp_path), reads()).context
    scoring = Scoring(
        ctx, ctx.catalogue.model, NOBODY, Asked(param="documents", pooling=PoolingParams(output="classify"))
    )
    Compared.times = 0
    documents = [Compared(f"b {i}") for i in range(ctx.config.max_inputs)]
    with pytest.raises(InvalidParams, match="at most"):
        await scoring.records(["a"], documents)
    assert Compared.times < 4 * len(documents)


@pytest.mark.parametrize(
    ("path", "shows", "meta"), [("/rerank", True, False), ("/v1/rerank", True, False), ("/v2/rerank", False, True)]
)
async def test_documents_are_ranked_as_jina_and_cohere_show_it(
    path: str, shows: bool, meta: bool, tmp_path: Path
) -> None:
    gateway = judge(tmp_path, 0.25, 0.75, 0.5)
    answer = await post(gateway, path, query="a", documents=["a", {"text": "b"}, "c"], top_n=2)
    RerankAnswer.model_validate_json(json.dumps(answer))
    results = answer["results"]
    assert [(one["index"], one["relevance_score"]) for one in results] == [(1, 0.75), (2, 0.5)]
    assert ("document" in results[0], "meta" in answer) == (shows, meta)
    if shows:
        assert results[0]["document"] == {"text": "b"}
    assert answer["usage"]["total_tokens"] == 15


async def test_texts_are_ranked_as_text_embeddings_inference_shows_it(tmp_path: Path) -> None:
    gateway = judge(tmp_path, 0.25, 0.75)
    answer = await post(gateway, "/rerank", query="a", texts=["a", "b"], raw_scores=True, return_text=True)
    TypeAdapter(list[RankedText]).validate_json(json.dumps(answer), strict=True)
    assert answer == [{"index": 1, "score": 0.75, "text": "b"}, {"index": 0, "score": 0.25, "text": "a"}]
    task = gateway.engine.generations[0].record.task
    assert isinstance(task, Pool)
    assert task.pooling.activate is False


@pytest.mark.parametrize(
    ("body", "named", "said"),
    [
        ({"query": "a"}, "documents", "either documents or texts"),
        ({"query": "a", "documents": ["b"], "texts": ["c"]}, "documents", "either documents or texts"),
        ({"query": "a", "documents": ["b"], "raw_scores": True}, "raw_scores", "goes with texts"),
        ({"query": "a", "texts": ["b"], "top_n": 1}, "top_n", "goes with documents"),
        ({"query": "a", "documents": []}, "documents", "at least 1"),
        ({"query": "a", "texts": ["b"], "truncate": True, "truncate_prompt_tokens": 9}, "truncate", "is given, too"),
    ],
)
async def test_what_goes_with_nothing_is_refused(body: dict[str, Any], named: str, said: str, tmp_path: Path) -> None:
    param, message = await problem(judge(tmp_path, 0.5), "/rerank", **body)
    assert (param, said in message) == (named, True)


def similar(root: Path) -> Gateway:
    return Gateway(write_reader_dir(root), reads([1.0, 0.0]))


LONG, LONGER = "a " * 300, "b " * 301  # of 256


@pytest.mark.parametrize("make", [judge, similar])
@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/score", {"text_1": "b", "text_2": ["c", LONG]}, "text_2[1]"),
        ("/score", {"text_1": "b", "text_2": LONG}, "text_2"),
        ("/score", {"text_1": LONG, "text_2": ["c", "b"]}, "text_1"),
        ("/score", {"text_1": ["b", LONGER], "text_2": ["c", "b"]}, "text_1[1]"),
        ("/rerank", {"query": "a", "texts": [LONG]}, "texts"),
        ("/rerank", {"query": "a", "documents": ["a", LONG]}, "documents[1]"),
        ("/rerank", {"query": LONG, "documents": ["a", "b"]}, "query"),
        ("/rerank", {"query": LONG * 40, "documents": ["a", "b"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a", LONG * 40]}, "documents[1]"),
    ],
)
async def test_a_text_that_is_too_long_is_named(
    make: Any, path: str, body: dict[str, Any], named: str, tmp_path: Path
) -> None:
    param, message = await problem(make(tmp_path), path, **body)
    assert (param, "maximum context length" in message) == (named, True)


async def test_raw_scores_are_refused_under_the_name_that_the_body_has(tmp_path: Path) -> None:
    gateway = similar(tmp_path)
    assert (await problem(gateway, "/score", text_1="a", text_2="b", activation=False))[0] == "activation"
    assert (await problem(gateway, "/rerank", query="a", texts=["b"], raw_scores=True))[0] == "raw_scores"


@pytest.mark.parametrize("make", [judge, similar, lambda root: Gateway(late(root), reads([1.0]))])
async def test_a_model_without_a_template_takes_no_instruction(make: Any, tmp_path: Path) -> None:
    gateway = make(tmp_path)
    assert (await problem(gateway, "/score", text_1="a", text_2="b", instruction="c"))[0] == "instruction"
    assert (await problem(gateway, "/rerank", query="a", documents=["b"], instruction="c"))[0] == "instruction"


async def tokens(gateway: Gateway, **body: Any) -> list[list[int]]:
    await post(gateway, "/v2/rerank", **body)
    return [one.record.prompt_token_ids for one in gateway.engine.generations]


async def test_documents_are_cut_and_queries_are_not(tmp_path: Path) -> None:
    body = {"query": "a b a", "documents": ["c a b", "a b a"], "max_tokens_per_doc": 2}
    query = [CLS, A, B, A, SEP]
    assert await tokens(judge(tmp_path / "pairs", 0.5), **body) == [[*query, C, A, SEP], [*query, A, B, SEP]]
    assert await tokens(similar(tmp_path / "vectors"), **body) == [query, [CLS, C, A, SEP], [CLS, A, B, SEP]]
    found = await tokens(Gateway(late(tmp_path / "late"), reads([0.5])), **body)
    assert found[0] == [CLS, 15, A, B, A, SEP, CLS, 16, C, A, SEP]
    whole = await tokens(judge(tmp_path / "whole", 0.5), **body | {"max_tokens_per_doc": 4096})
    assert whole == [[*query, C, A, B, SEP], [*query, A, B, A, SEP]]


async def test_a_cut_document_must_still_fit(tmp_path: Path) -> None:
    gateway = judge(tmp_path, 0.5)
    body = {"query": "a", "documents": ["b", LONG], "max_tokens_per_doc": 290}
    assert (await problem(gateway, "/rerank", **body))[0] == "documents[1]"
    assert len((await tokens(gateway, **body, truncate_prompt_tokens=-1))[1]) == 256
    assert (await problem(gateway, "/rerank", query=LONG, documents=["b"], max_tokens_per_doc=2))[0] == "query"


async def test_a_template_and_a_query_are_never_cut(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 1024}
    gateway = Gateway(write_model_dir(tmp_path / "Qwen3-Reranker", config=config), reads([0.5]))
    gateway.engine.load = gateway.engine.load.__class__(engine_id="fake", num_workers=1, max_model_len=1024)
    body = {"query": "dog", "documents": ["a dog", "zebra", "c"]}
    three = await tokens(gateway, **body, max_tokens_per_doc=3)
    assert len({tuple(one) for one in three}) == 3
    assert [len(one) - len(three[2]) for one in three] == [2, 2, 0]
    least = len(three[2])
    for more in ({"query": "dogs"}, {"instruction": "x" * 200}):
        assert (await problem(gateway, "/rerank", **body | more, truncate_prompt_tokens=least))[0] == (
            "truncate_prompt_tokens"
        )
    cut = (await tokens(gateway, **body, truncate_prompt_tokens=least))[3:]
    assert [len(one) for one in cut] == [least] * 3
    texts = {"query": "dog " * 1000, "texts": ["a"], "truncate": True}
    assert (await problem(gateway, "/rerank", **texts))[0] == "truncate"


@pytest.mark.parametrize("keep", [1, 4])
async def test_a_cut_that_leaves_nothing_is_refused(keep: int, tmp_path: Path) -> None:
    body = {"text_1": "a", "text_2": "b c", "truncate_prompt_tokens": keep}
    param, message = await problem(judge(tmp_path, 0.5), "/score", **body)
    assert (param, "5 are needed" in message) == ("truncate_prompt_tokens", True)


async def test_a_score_is_of_one_label(tmp_path: Path) -> None:
    param, message = await problem(judge(tmp_path, 0.5, labels=3), "/score", text_1="a", text_2="b")
    assert (param, "3 labels" in message) == ("model", True)


def late(root: Path) -> Path:
    """A late-interaction model: [MASK], [Q] and [D] are 14, 15 and 16."""
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in ("[MASK]", "[unused0]", "[unused1]")])
    root = write_reader_dir(root, "HF_ColBERT", max_position_embeddings=32)
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "artifact.metadata").write_text(json.dumps({"query_maxlen": 6, "dim": 2}))
    return root


async def test_late_interaction_marks_texts_and_fills_queries(tmp_path: Path) -> None:
    gateway = Gateway(late(tmp_path), reads([0.5], [2.5]))
    answer = await gateway.client.post("/rerank", json={"query": "a", "documents": ["b :", "c"]})
    assert [(one["index"], one["relevance_score"]) for one in answer.json()["results"]] == [(1, 2.5), (0, 0.5)]
    first, second = (one.record for one in gateway.engine.generations)
    query = [2, 15, 4, 3, 14, 14]
    assert first.prompt_token_ids == [*query, 2, 16, 5, 11, 3]
    assert first.task == Pool(pooling=PoolingParams(output="max_sim", second_start=6, unseen=2))
    assert second.prompt_token_ids == [*query, 2, 16, 6, 3]


async def test_late_interaction_has_vectors_of_tokens_without_punctuation(tmp_path: Path) -> None:
    numbers = [float(i) for i in range(10)]
    gateway = Gateway(late(tmp_path), reads(numbers, numbers, [float(i) for i in range(12)]))
    answer = (await gateway.client.post("/pooling", json={"input": "b :"})).json()
    assert answer["data"][0]["data"] == [[0, 1], [2, 3], [4, 5], [8, 9]]
    packed = (await gateway.client.post("/pooling", json={"input": "b :", "encoding_format": "base64"})).json()
    assert len(b64decode(packed["data"][0]["data"])) == 4 * 2 * 4
    asked = await gateway.client.post("/pooling", json={"input": "a", "prompt_name": "query"})
    assert len(asked.json()["data"][0]["data"]) == 6
    assert gateway.engine.generations[-1].record.task == Pool(pooling=PoolingParams(output="token_embed", unseen=2))
    gateway.engine.load = gateway.engine.load.__class__(engine_id="fake", num_workers=1, max_model_len=20)
    for path, body, param in (
        ("/v1/embeddings", {"input": "a"}, "model"), ("/pooling", {"input": "a", "prompt_name": "x"}, "prompt_name"),
        ("/pooling", {"input": [2, 4, 3], "prompt_name": "query"}, "prompt_name"),
        ("/pooling", {"input": "a", "prompt_name": "query", "add_special_tokens": False}, "prompt_name"),
        ("/pooling", {"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/rerank", {"query": "a", "texts": ["b"], "raw_scores": True}, "raw_scores"),
        ("/rerank", {"query": "a", "documents": ["b " * 40]}, "documents"),
    ):  # fmt: skip
        refused = await gateway.client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    asked = {"query": "a " * 40, "documents": ["b"], "truncate_prompt_tokens": -1}
    param, message = await problem(gateway, "/rerank", **asked)
    assert (param, "keeps 20 tokens, but 24 are needed" in message) == ("truncate_prompt_tokens", True)
    kept = {"query": "a", "documents": ["b " * 40], "truncate_prompt_tokens": -1}
    assert (await gateway.client.post("/rerank", json=kept)).status_code == 200
    assert len(gateway.engine.generations[-1].record.prompt_token_ids) == 20
