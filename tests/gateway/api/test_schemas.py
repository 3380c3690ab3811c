"""Request bodies: strict JSON, every field of the specification known by name, unsupported values refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from anthropic import types as anthropic_types
from anthropic.types import message_count_tokens_params, message_create_params
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel
from tests.gateway.fakes_engine import MODEL, make_gateway, play

from pagoda_gateway.api.answer_schemas import (
    ChatAnswer,
    CompletionAnswer,
    CountTokensAnswer,
    DetokenizeAnswer,
    ErrorAnswer,
    MessagesAnswer,
    MessagesErrorAnswer,
    Model,
    ModelList,
    TokenizeAnswer,
)
from pagoda_gateway.api.json_body import MAX_DEPTH, check_content_type, outside_strings, parse_object
from pagoda_gateway.api.messages_schemas import (
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    Metadata,
    TextBlock,
    ThinkingBlock,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
)
from pagoda_gateway.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pagoda_gateway.routes.body import parse_body
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError


def test_every_field_of_the_specification_is_known() -> None:
    for params, schema in (
        (chat_create_params.CompletionCreateParamsStreaming, ChatRequest),
        (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
        (message_create_params.MessageCreateParamsStreaming, MessagesRequest),
        (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
        (anthropic_types.TextBlockParam, TextBlock),
        (anthropic_types.ThinkingBlockParam, ThinkingBlock),
        (anthropic_types.ToolUseBlockParam, ToolUseBlock),
        (anthropic_types.ToolResultBlockParam, ToolResultBlock),
        (anthropic_types.ToolParam, ToolDefinition),
        (anthropic_types.MetadataParam, Metadata),
    ):
        assert set(get_type_hints(params)) - set(schema.model_fields) == set()


def test_nothing_internal_is_a_field() -> None:
    internal = {"attempt", "block_ids", "engine_id", "seed_in_force", "eos_token_ids", "prior_outputs"}
    for schema in (ChatRequest, CompletionRequest, MessagesRequest, TokenizeRequest, DetokenizeRequest, MessageParam):
        assert not internal & set(schema.model_fields)


HOSTILE: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"{'a': 1}", "not valid JSON"),
    (b'{"a": 1}}', "not valid JSON"),
    (b'\xef\xbb\xbf{"a": 1}', "byte order mark"),
    ('{"a": 1}'.encode("utf-16"), "byte order mark"),
    ('{"a": 1}'.encode("utf-16-le"), "not valid JSON"),
    (b'{"a": "\xff"}', "UTF-8"),
    (b'{"a": "\\ud800"}', "surrogate"),
    (b'{"\\udfff": 1}', "surrogate"),
    (b'{"a": 1, "a": 2}', "twice"),
    (b'{"a": [' + b"1," * 2**19 + b"1]}", "values"),
    (json.dumps({str(i): 1 for i in range(3000)}).encode(), "keys"),
    (b'{"b": {"a\\u0000": 1, "a\\u0000": 2}}', "twice"),
    (b'{"a": NaN}', "NaN"),
    (b'{"a": -Infinity}', "Infinity"),
    (b'{"a": 1e400}', "too large"),
    (b'{"a": ' + b"1" * 129 + b"}", "too long"),
    (b"[1]", "must be a JSON object"),
    (b"null", "must be a JSON object"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deeper"),
    (b'{"a": ' + b"[" * 1_000_000, "values"),
    (b'{"a": ' * 70 + b"1" + b"}" * 70, "deeper"),
    (b'{"a": "' + b'\\"' * 200_000, "not valid JSON"),
]


@pytest.mark.parametrize(("body", "why"), HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_not_strict_json_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(PagodaError, match=why) as caught:
        parse_object(body)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_depth_counts_brackets_outside_strings_only() -> None:
    assert parse_object(json.dumps({"a": "[" * 1000 + '"{'}).encode()) == {"a": "[" * 1000 + '"{'}
    assert parse_object(json.dumps({"a": [[] for _ in range(1000)]}).encode())["a"][999] == []
    deep: Any = 1
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert parse_object(json.dumps({"a": deep, "b": [[]]}).encode())["a"] == deep
    with pytest.raises(PagodaError, match="deeper"):
        parse_object(json.dumps({"a": [deep]}).encode())


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=60) | st.text(alphabet='{}[]":,\\udeadbf019.-Ee ntrul', max_size=60).map(str.encode))
def test_any_bytes_are_an_object_or_a_refusal(body: bytes) -> None:
    try:
        value = parse_object(body)
    except PagodaError:
        return
    assert value == json.loads(body)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def outside(body: bytes) -> bytes:
    """Computes byte by byte what `outside_strings` finds by searching."""
    found, inside, position = b"", False, 0
    while position < len(body):
        byte, two = body[position : position + 1], body[position : position + 2]
        if two in (b"\\\\", b'\\"'):
            position += 2
            continue
        inside ^= byte == b'"'
        found += byte if not inside and byte != b'"' else b""
        position += 1
    return found


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from([b"\\", b'"', b"[", b",", b"u"]), max_size=24).map(b"".join), st.integers(1, 5))
def test_where_a_body_is_cut_into_chunks_makes_no_difference(body: bytes, chunk_bytes: int) -> None:
    assert outside_strings(body, chunk_bytes) == outside_strings(body) == outside(body)


def test_a_body_full_of_quotes_takes_little_to_be_looked_at() -> None:
    body = b'{"a": "' + b'\\\\"bc' * 400_000  # contains no escaped quotes
    tracemalloc.start()
    try:
        with pytest.raises(PagodaError, match="not valid JSON"):
            parse_object(body)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(body)
    finally:
        tracemalloc.stop()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-9e9, 9e9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.parametrize(
    "schema", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, MessagesRequest, CountTokensRequest]
)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_json_is_a_request_or_a_refusal(schema: type[ChatRequest], data: st.DataObject) -> None:
    names = st.sampled_from(sorted(schema.model_fields))
    valid = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "tokens": [1],
        "max_tokens": 1,
    }
    body = {name: value for name, value in valid.items() if name in schema.model_fields}
    body |= data.draw(st.dictionaries(names, JSON, max_size=4))
    message = ""
    try:
        parse_body(schema, body)
    except InvalidParams as error:
        message = error.message
    assert len(message) < 5000


@pytest.mark.parametrize(
    ("header", "fine"),
    [
        ("application/json", True),
        ("Application/JSON; charset=UTF-8", True),
        ('application/json;charset="utf-8"', True),
        ("application/json; charset=latin-1", False),
        ("text/plain", False),
        ("", False),
        ("application/x-www-form-urlencoded", False),
    ],
)
def test_only_json_in_utf8(header: str, fine: bool) -> None:
    if fine:
        check_content_type(header)
        return
    with pytest.raises(PagodaError) as caught:
        check_content_type(header)
    assert caught.value.code is ErrorCode.UNSUPPORTED_MEDIA_TYPE


PATHS = (
    "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/messages", "/v1/messages/count_tokens"
)  # fmt: skip


async def test_hostile_bodies_over_http(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    for path in PATHS:
        for body, _why in HOSTILE:
            response = await gateway.client.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"
        response = await gateway.client.post(path, content=b"{}", headers={"content-type": "text/plain"})
        assert response.status_code == 415


async def test_the_routes_are_documented_with_resolvable_schemas(tmp_path: Path) -> None:
    document = make_gateway(tmp_path).app.openapi()
    for path in PATHS:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "properties" in body
    for reference in _references(document):
        node: Any = document
        for step in reference.removeprefix("#/").split("/"):
            node = node[step.replace("~1", "/").replace("~0", "~")]
        assert isinstance(node, dict)


async def test_every_route_says_what_it_answers_and_how_it_fails(tmp_path: Path) -> None:
    document = make_gateway(tmp_path).app.openapi()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            assert "200" in responses, path
            error = "MessagesErrorObject" if path.startswith("/v1/messages") else "/ErrorObject"
            assert error in json.dumps(responses["5XX"]), path
            assert ("4XX" not in responses) or error in json.dumps(responses["4XX"]), path


MESSAGE: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
ANSWERED: list[tuple[str, dict[str, Any], type[BaseModel]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, ChatAnswer),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "logprobs": True,
            "top_logprobs": 2,
            "prompt_logprobs": 1,
            "return_token_ids": True,
        },
        ChatAnswer,
    ),
    ("/v1/completions", {"prompt": "x"}, CompletionAnswer),
    (
        "/v1/completions",
        {"prompt": "hello world", "logprobs": 2, "echo": True, "prompt_logprobs": 1, "return_token_ids": True},
        CompletionAnswer,
    ),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}, TokenizeAnswer),
    ("/detokenize", {"tokens": [1]}, DetokenizeAnswer),
    ("/v1/chat/completions", {"messages": []}, ErrorAnswer),
    ("/v1/messages", MESSAGE, MessagesAnswer),
    ("/v1/messages", MESSAGE | {"stream": 1}, MessagesErrorAnswer),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": MESSAGE["messages"]}, CountTokensAnswer),
    ("/v1/messages/count_tokens", {}, MessagesErrorAnswer),
]


@pytest.mark.parametrize(("path", "body", "schema"), ANSWERED)
async def test_answers_are_as_described(
    tmp_path: Path, path: str, body: dict[str, Any], schema: type[BaseModel]
) -> None:
    gateway = make_gateway(tmp_path)
    gateway.engine.script = play(gateway.ids("ab"))
    response = await gateway.client.post(path, json=body)
    schema.model_validate(response.json())
    for route, listed in (("/v1/models", ModelList), (f"/v1/models/{MODEL}", Model)):
        listed.model_validate((await gateway.client.get(route)).json())


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in _references(value)]
    return [found for value in node for found in _references(value)] if isinstance(node, list) else []
