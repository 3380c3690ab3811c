"""Every way to request a form of output becomes one grammar in the record, or a 400 that names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.gateway.fakes_engine import MODEL, Gateway, make_gateway
from tests.gateway.model_dir import EOS

from pagoda_gateway.api.forms.grammar import structural_tag
from pagoda_gateway.api.forms.tags import StructuralTag
from pagoda_proto import grammars
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import MAX_GRAMMAR_CHARS
from pagoda_proto.records import RequestRecord

PATHS = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"model": MODEL, "prompt": "hello"},
}
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "null"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TAGS = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "!"},
}
ENDLESS = {"type": "structural_tag", "format": {"type": "star", "content": {"type": "any_text"}}}
SPECIAL = {"type": "tag", "begin": "<tool_call>\n", "content": {"type": "any_text"}, "end": "</tool_call>"}
NAMELESS = {"type": "json_schema", "json_schema": {"name": "x"}}


async def post(gateway: Gateway, path: str, **fields: Any) -> Any:
    return await gateway.client.post(path, json=PATHS[path] | fields)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, ""),
        ({"response_format": {"type": "text"}, "structured_outputs": {}, "guided_json": None}, ""),
        ({"response_format": {"type": "json_object"}}, grammars.json_object()),
        ({"response_format": NAMED}, grammars.json_schema(SCHEMA)),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED["json_schema"] | {"strict": True}}},  # type: ignore[operator]
            grammars.json_schema(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, grammars.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, grammars.json_schema(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, grammars.json_object()),
        ({"structured_outputs": {"regex": "a/b"}}, grammars.regex("a/b")),
        ({"structured_outputs": {"choice": ["x", "y"]}}, grammars.choice(["x", "y"])),
        ({"structured_outputs": {"grammar": "start: /x/"}}, grammars.lark("start: /x/")),
        ({"response_format": TAGS}, structural_tag(StructuralTag.model_validate(TAGS), {})),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
            structural_tag(StructuralTag.model_validate(TAGS), {}),
        ),
        ({"guided_json": json.dumps(SCHEMA)}, grammars.json_schema(SCHEMA)),
        ({"guided_regex": "a/b"}, grammars.regex("a/b")),
        ({"guided_choice": ["x", "y"]}, grammars.choice(["x", "y"])),
        ({"guided_grammar": "start: /x/"}, grammars.lark("start: /x/")),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, grammars.regex("a")),
    ],
)
async def test_a_form_becomes_the_grammar_of_the_record(
    tmp_path: Path, path: str, fields: dict[str, Any], grammar: str
) -> None:
    gateway = make_gateway(tmp_path)
    response = await post(gateway, path, **fields)
    assert response.status_code == 200, response.text
    assert gateway.engine.record.task.params.grammar == grammar


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "give either format"),
        ({"response_format": TAGS | {"format": {"type": "token"}}}, "response_format.format", "'token'"),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"response_format": NAMELESS}, "response_format.json_schema.schema", "is required"),
        ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more", "is not a known field"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "give either format"),
        ({"structured_outputs": {"structural_tag": "["}}, "structured_outputs.structural_tag", "the structural tag"),
        ({"response_format": ENDLESS}, None, "free text cannot be repeated"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "the schema must be a JSON object"),
        ({"structured_outputs": {"json": '{"a": 1, "a": 2}'}}, "structured_outputs.json", "occurs twice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "at least 1"),
        ({"guided_json": "{"}, "guided_json", "is not valid JSON"),
        ({"guided_json": '{"a":' * 70 + "1" + "}" * 70}, "guided_json", "nested deeper than 64"),
        ({"guided_regex": "a" * (1 + grammars.MAX_REGEX_CHARS)}, "guided_regex", "at most 4096"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": ["x"] * (1 + grammars.MAX_CHOICES)}, "guided_choice", "at most 1024"),
        ({"guided_choice": [1]}, "guided_choice[0]", "string"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "Lark"),
        ({"guided_json": {"enum": ["x" * MAX_GRAMMAR_CHARS]}}, "guided_json", "at most 131072 characters"),
        ({"response_format": NAMED, "guided_regex": "a"}, None, "only one of response_format, guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, None, "structured_outputs.regex, structured_"),
        ({"guided_json": {}, "guided_grammar": "x"}, None, "guided_json, guided_grammar"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "end of sequence"),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend", "is not a known field"),
        ({"grammar": "start: /a/"}, "grammar", "is not a known field"),
        ({"form": "x"}, "form", "is not a known field"),
    ],
)  # fmt: skip
async def test_what_is_no_form_is_a_400_that_names_the_field(
    tmp_path: Path, path: str, fields: dict[str, Any], param: str | None, says: str
) -> None:
    gateway = make_gateway(tmp_path)
    response = await post(gateway, path, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert gateway.engine.generations == []


async def test_a_form_that_is_no_json_leaves_no_room_for_tools(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    fields = {"guided_regex": "a", "tools": [{"type": "function", "function": {"name": "add"}}]}
    refused = await post(gateway, "/v1/chat/completions", **fields)
    assert refused.status_code == 400
    assert "guided_regex leaves no room for tools" in refused.json()["error"]["message"]
    assert (await post(gateway, "/v1/chat/completions", **fields, tool_choice="none")).status_code == 200


async def test_json_leaves_room_for_tools(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    fields = {"response_format": NAMED, "tools": [{"type": "function", "function": {"name": "add"}}]}
    assert (await post(gateway, "/v1/chat/completions", **fields)).status_code == 200
    parts = grammars.parts_of(gateway.engine.record.task.params.grammar)
    assert any(part.get("json_schema", {}).get("properties") == SCHEMA["properties"] for part in parts)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"), [({"response_format": NAMED}, "response_format"), ({"guided_regex": "a"}, "guided_regex")]
)
async def test_sec_09_what_the_engine_core_refuses_is_a_400_about_the_clients_own_field(
    tmp_path: Path, path: str, stream: bool, fields: dict[str, Any], param: str
) -> None:
    def refuse(record: RequestRecord) -> Any:
        raise PagodaError(ErrorCode.INVALID_ARGUMENT, "this cannot be used: /a/not", "grammar")

    gateway = make_gateway(tmp_path, refuse)
    response = await post(gateway, path, stream=stream, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["message"] == "this cannot be used: /a/not"


async def test_a_tag_that_the_tokenizer_knows_is_a_token(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    response = await post(gateway, "/v1/completions", response_format={"type": "structural_tag", "format": SPECIAL})
    assert response.status_code == 200, response.text
    tokenizer = LLTokenizer((tmp_path / "model" / "tokenizer.json").read_text())
    matcher = LLMatcher(tokenizer, gateway.engine.record.task.params.grammar, log_level=0)
    ids = gateway.ids("<tool_call>\nhello</tool_call>")
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


async def test_the_name_of_an_end_of_sequence_is_a_text_like_others(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    form = {"type": "structural_tag", "format": {"type": "const_string", "value": f"a{EOS}b"}}
    response = await post(gateway, "/v1/completions", response_format=form)
    assert response.status_code == 200, response.text
    tokenizer = LLTokenizer((tmp_path / "model" / "tokenizer.json").read_text())
    matcher = LLMatcher(tokenizer, gateway.engine.record.task.params.grammar, log_level=0)
    ids = [token for char in f"a{EOS}b" for token in gateway.ids(char)]
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
