"""Embeddings, pooling, classify and embed over HTTP: response formats, limits, and refusals by name."""

from __future__ import annotations

import asyncio
import contextlib
import json
from base64 import b64encode
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from tests.gateway.fakes_engine import Gateway, make_gateway, play, reads
from tests.gateway.model_dir import write_reader_dir

from pagoda_gateway.api.pooling_answers import ClassifyAnswer, EmbeddingsAnswer, PoolingAnswer, Vectors
from pagoda_proto.errors import ErrorCode
from pagoda_proto.pooling.params import PoolingParams
from pagoda_proto.records import Pool

X, Y = [1.0, 0.5, -2.0], [0.25, 0.0, 4.0]
CLS, SEP, A, B = 2, 3, 4, 5


def embedder(root: Path, *vectors: list[float], **config: Any) -> Gateway:
    return Gateway(write_reader_dir(root), reads(*(vectors or (X, Y))), **config)


def pooling_of(gateway: Gateway, index: int = 0) -> PoolingParams:
    task = gateway.engine.generations[index].record.task
    assert isinstance(task, Pool)
    return task.pooling


async def post(gateway: Gateway, path: str, **body: Any) -> tuple[int, Any]:
    answer = await gateway.client.post(path, json=body)
    return answer.status_code, answer.json()


async def refused(gateway: Gateway, path: str, **body: Any) -> tuple[str | None, str]:
    status, answer = await post(gateway, path, **body)
    assert status == 400, answer
    assert not gateway.engine.generations or all(one.closed.is_set() for one in gateway.engine.generations)
    return answer["error"]["param"], answer["error"]["message"]


async def test_texts_become_vectors_in_their_order(tmp_path: Path) -> None:
    gateway = embedder(tmp_path)
    status, answer = await post(gateway, "/v1/embeddings", model="tiny", input=["a b", "a"], user="u")
    assert status == 200
    EmbeddingsAnswer.model_validate_json(json.dumps(answer))
    assert [(one["index"], one["embedding"]) for one in answer["data"]] == [(0, X), (1, Y)]
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [one.record.prompt_token_ids for one in gateway.engine.generations] == [[CLS, A, B, SEP], [CLS, A, SEP]]
    assert all(one.closed.is_set() for one in gateway.engine.generations)


async def test_base64_is_of_little_endian_floats(tmp_path: Path) -> None:
    _, answer = await post(embedder(tmp_path), "/v1/embeddings", input="a", encoding_format="base64")
    assert answer["data"][0]["embedding"] == b64encode(pack("<3f", *X)).decode()


@pytest.mark.parametrize(
    ("given", "expected"),
    [([4, 5], [[4, 5]]), ([[4], [5, 6]], [[4], [5, 6]]), ("a", [[CLS, A, SEP]])],
)
async def test_inputs_may_be_token_ids(given: Any, expected: list[list[int]], tmp_path: Path) -> None:
    gateway = embedder(tmp_path)
    assert (await post(gateway, "/v1/embeddings", input=given))[0] == 200
    assert [one.record.prompt_token_ids for one in gateway.engine.generations] == expected


async def test_texts_are_cut_only_where_that_is_asked_for(tmp_path: Path) -> None:
    gateway = embedder(tmp_path)
    gateway.engine.load = gateway.engine.load.__class__(engine_id="fake", num_workers=1, max_model_len=16)
    param, message = await refused(gateway, "/v1/embeddings", input=["a", "b " * 15])
    assert (param, "17 tokens" in message) == ("input[1]", True)
    for keep, length in ((-1, 16), (5, 5)):
        gateway = embedder(tmp_path)
        gateway.engine.load = gateway.engine.load.__class__(engine_id="fake", num_workers=1, max_model_len=16)
        assert (await post(gateway, "/v1/embeddings", input="b " * 40, truncate_prompt_tokens=keep))[0] == 200
        assert len(gateway.engine.record.prompt_token_ids) == length


@pytest.mark.parametrize(("keep", "kept"), [(2, [A, B]), (-1, [A, B, A] * 5 + [A]), (None, [A, B, A])])
async def test_token_ids_are_cut_as_texts_are(keep: int | None, kept: list[int], tmp_path: Path) -> None:
    gateway = embedder(tmp_path)
    gateway.engine.load = gateway.engine.load.__class__(engine_id="fake", num_workers=1, max_model_len=16)
    ids = [A, B, A] if keep is None else [A, B, A] * 9
    assert (await post(gateway, "/v1/embeddings", input=ids, truncate_prompt_tokens=keep))[0] == 200
    assert gateway.engine.record.prompt_token_ids == kept


async def test_what_a_request_changes_reaches_the_record(tmp_path: Path) -> None:
    gateway = Gateway(write_reader_dir(tmp_path, matryoshka_dimensions=[2]), reads([1.0, 2.0]))
    body = {"input": "a", "dimensions": 2, "normalize": False, "cache_salt": "s", "add_special_tokens": False}
    assert (await post(gateway, "/v1/embeddings", **body))[0] == 200
    assert pooling_of(gateway) == PoolingParams(dimensions=2, normalize=False)
    assert (gateway.engine.record.cache_salt, gateway.engine.record.prompt_token_ids) == ("s", [A])


async def test_prompts_of_the_models_files_go_before_texts(tmp_path: Path) -> None:
    root = write_reader_dir(tmp_path)
    prompts = {"prompts": {"q": "query : ", "d": ""}, "default_prompt_name": "q"}
    (root / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    gateway = Gateway(root, reads(X))
    for name in (None, "d"):
        assert (await post(gateway, "/v1/embeddings", input="a", prompt_name=name))[0] == 200
    first, second = gateway.engine.generations
    assert (first.record.prompt_token_ids, second.record.prompt_token_ids) == ([CLS, 10, 11, A, SEP], [CLS, A, SEP])
    assert (pooling_of(gateway, 0).skip, pooling_of(gateway, 1).skip) == (3, 0)
    param, message = await refused(gateway, "/v1/embeddings", input="a", prompt_name="x")
    assert (param, "d, q" in message) == ("prompt_name", True)
    param, message = await refused(gateway, "/v1/embeddings", input="a b", truncate_prompt_tokens=4)
    assert (param, "5 are needed" in message) == ("truncate_prompt_tokens", True)


async def test_a_prompt_does_not_go_before_token_ids(tmp_path: Path) -> None:
    root = write_reader_dir(tmp_path)
    prompts = {"prompts": {"q": "query : "}, "default_prompt_name": "q"}
    (root / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    gateway = Gateway(root, reads(X))
    assert (await post(gateway, "/v1/embeddings", input=[[CLS, A, B, A, SEP], [CLS, A, SEP]]))[0] == 200
    assert [pooling_of(gateway, i).skip for i in range(2)] == [0, 0]
    for given in ([CLS, A, SEP], [[CLS, A, SEP]]):
        param, message = await refused(gateway, "/v1/embeddings", input=given, prompt_name="q")
        assert (param, "token ids" in message) == ("prompt_name", True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [""], "dimensions": 2}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
        ({"input": ["a", "a b"], "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"input": "a", "priority": -5}, "priority"),
        ({"input": ["a", 3]}, "input[1]"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": ["a"] * 9}, "input"),
        ({"input": "a", "model": "other"}, "model"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(body: dict[str, Any], param: str, tmp_path: Path) -> None:
    gateway = embedder(tmp_path, max_inputs=8, max_messages=8)
    answer = await gateway.client.post("/v1/embeddings", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
    assert not gateway.engine.generations


async def test_a_long_text_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    gateway = embedder(tmp_path)
    status, answer = await post(gateway, "/v1/embeddings", input="a " * 100_000)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "input")


async def test_models_that_read_and_models_that_generate_say_what_they_are_for(tmp_path: Path) -> None:
    reading = embedder(tmp_path / "r")
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "a"})):
        param, message = await refused(reading, path, **body)
        assert (param, "/v1/embeddings" in message) == ("model", True)
    assert (await refused(reading, "/classify", input="a"))[0] == "model"
    generating = make_gateway(tmp_path / "g", play([1]))
    for path, body in (
        ("/v1/embeddings", {"input": "a"}), ("/pooling", {"input": "a"}), ("/classify", {"input": "a"}),
        ("/embed", {"inputs": "a"}), ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):  # fmt: skip
        param, message = await refused(generating, path, **body)
        assert (param, "generates text" in message) == ("model", True)


async def test_one_that_fails_fails_all_and_leaves_nothing_open(tmp_path: Path) -> None:
    gateway = Gateway(write_reader_dir(tmp_path), reads(X, fail_at=3))
    status, answer = await post(gateway, "/v1/embeddings", input=["a"] * 300)
    assert (status, answer["error"]["code"]) == (500, ErrorCode.NUMERICAL_ERROR)
    assert all(one.closed.is_set() for one in gateway.engine.generations)


async def test_many_inputs_are_not_all_open_at_once(tmp_path: Path) -> None:
    hold = asyncio.Event()
    gateway = Gateway(write_reader_dir(tmp_path), reads(X, hold=hold))
    asking = asyncio.create_task(post(gateway, "/v1/embeddings", input=["a"] * 300))
    await gateway.engine.submitted.wait()
    await gateway.engine.generations[0].waiting.wait()
    assert len(gateway.engine.generations) <= 128
    hold.set()
    status, answer = await asking
    assert (status, len(answer["data"]), len(gateway.engine.generations)) == (200, 300, 300)


async def test_who_leaves_takes_all_requests_along(tmp_path: Path) -> None:
    gateway = Gateway(write_reader_dir(tmp_path), reads(X, hold=asyncio.Event()))
    body = json.dumps({"input": ["a", "b", "c"]}).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await gateway.engine.submitted.wait()
        await gateway.engine.generations[0].waiting.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None: ...

    scope = {
        "type": "http", "method": "POST", "path": "/v1/embeddings", "raw_path": b"", "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "state": {},
    }  # fmt: skip
    with contextlib.suppress(Exception):
        await gateway.asgi(scope, receive, send)
    assert len(gateway.engine.generations) == 3
    assert all(one.closed.is_set() for one in gateway.engine.generations)


async def test_pooling_gives_what_the_model_is_for(tmp_path: Path) -> None:
    gateway = embedder(tmp_path, [*X, *Y, *X])
    _, answer = await post(gateway, "/pooling", input="a", task="token_embed")
    PoolingAnswer.model_validate_json(json.dumps(answer))
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": [X, Y, X]}]
    await post(gateway, "/pooling", input="a")
    assert [pooling_of(gateway, i).output for i in range(2)] == ["token_embed", "embed"]
    assert (await refused(gateway, "/pooling", input="a", activation=False))[0] == "activation"


async def test_labels_come_with_their_shares(tmp_path: Path) -> None:
    root = write_reader_dir(tmp_path, "BertForSequenceClassification", id2label={"0": "bad", "1": "good"})
    gateway = Gateway(root, reads([0.25, 0.75]))
    _, answer = await post(gateway, "/classify", input=["a"])
    ClassifyAnswer.model_validate_json(json.dumps(answer))
    assert answer["data"] == [{"index": 0, "label": "good", "probs": [0.25, 0.75], "num_classes": 2}]
    await post(gateway, "/classify", input="a", activation=False)
    assert [pooling_of(gateway, i).activate for i in range(2)] == [None, False]


async def test_embed_gives_bare_vectors(tmp_path: Path) -> None:
    gateway = embedder(tmp_path)
    _, answer = await post(gateway, "/embed", inputs=["a", "b"])
    Vectors.model_validate_json(json.dumps(answer))
    assert answer == [X, Y]
    assert pooling_of(gateway).normalize is True
    await post(gateway, "/embed", inputs="a b " * 200, truncate=True, truncation_direction="Left", normalize=False)
    assert pooling_of(gateway, 2).normalize is False
    assert len(gateway.engine.generations[2].record.prompt_token_ids) == 256
