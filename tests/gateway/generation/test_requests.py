"""From bodies to records: ranges depend on the model, errors name fields, long texts are processed in threads."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.gateway.fakes_engine import Gateway, chat_record, make_gateway
from tests.gateway.model_dir import write_model_dir

from pagoda_gateway.api.schemas import ChatRequest, CompletionRequest
from pagoda_gateway.clients import NOBODY
from pagoda_gateway.dialects.completions import completion_records
from pagoda_gateway.http import text_pool
from pagoda_gateway.routes.body import parse_body
from pagoda_gateway.text.conversation import template_messages, turns_of
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError
from pagoda_proto.records import Load

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ChatRequest:
    return parse_body(ChatRequest, {"messages": MESSAGES} | fields)


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(CompletionRequest, {"prompt": "hello"} | fields)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    return make_gateway(tmp_path_factory.mktemp("gateway"))


IDS = st.sampled_from([-1, 0, 5, 200, 10_000, 2**31 - 1, 2**31, 2**63, 2**64])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(["logit_bias", "allowed_token_ids", "stop_token_ids", "prompt"]), token_id=IDS)
async def test_token_ids_are_checked_against_the_width_of_the_logits(
    gateway: Gateway, field: str, token_id: int
) -> None:
    value: Any = {str(token_id): 1.0} if field == "logit_bias" else [token_id]
    width = gateway.text.vocab_size
    if 0 <= token_id < width:
        await completion_records(gateway.context, completion(**{field: value}))
        return
    with pytest.raises(InvalidParams) as caught:
        await completion_records(gateway.context, completion(**{field: value}))
    assert (caught.value.param or "").startswith(field)


async def test_a_workers_report_counts_before_the_models_files(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    gateway.engine.load = Load(engine_id="x", vocab_size=10_000, max_model_len=8)
    ((_, record),) = await completion_records(gateway.context, completion(prompt=[9_999], max_tokens=7))
    assert record.prompt_token_ids == [9_999]
    with pytest.raises(PagodaError) as caught:
        await completion_records(gateway.context, completion(prompt=[1], max_tokens=8))
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


async def test_long_texts_are_tokenised_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = make_gateway(tmp_path)
    threads: list[threading.Thread] = []
    encode = type(gateway.text).encode

    def watched(*args: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(*args)

    monkeypatch.setattr(type(gateway.text), "encode", watched)
    gateway.engine.load = Load(engine_id="x", max_model_len=100_000)
    long = "hello" * text_pool.INLINE_SIZE
    await completion_records(gateway.context, completion(prompt="hello"))
    await completion_records(gateway.context, completion(prompt=["hello", long]))
    await chat_record(gateway.context, chat(messages=[{"role": "user", "content": long}]))
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False, False]


@pytest.mark.parametrize("where", ["tools", "arguments"])
async def test_long_tools_and_arguments_are_rendered_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    gateway = make_gateway(tmp_path)
    threads: list[threading.Thread] = []
    render = type(gateway.text).render_marked

    def watched(*args: Any) -> str:
        threads.append(threading.current_thread())
        return render(*args)

    monkeypatch.setattr(type(gateway.text), "render_marked", watched)
    gateway.engine.load = Load(engine_id="x", max_model_len=100_000)
    user = {"role": "user", "content": "hello"}
    for long in ("hello", "hello" * text_pool.INLINE_SIZE):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"text": long})}}
        tool = {"type": "function", "function": {"name": "f", "description": long, "parameters": {"type": "object"}}}
        turns = [
            user,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ]
        await chat_record(
            gateway.context, chat(messages=[user], tools=[tool]) if where == "tools" else chat(messages=turns)
        )
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_the_authors_defaults_yield_to_the_request(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    text = type(gateway.text).load(write_model_dir(tmp_path / "other", generation_config=defaults))
    object.__setattr__(gateway.context.catalogue.find(None, NOBODY), "text", text)
    params = (await chat_record(gateway.context, chat(temperature=0, top_k=-1))).task.params
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0, 0, 0.9, 1.1)


@pytest.mark.parametrize(("seed", "expected"), [(0, 0), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (-(2**63), 2**63)])
async def test_every_64_bit_seed_is_taken(gateway: Gateway, seed: int, expected: int) -> None:
    record = await chat_record(gateway.context, chat(seed=seed))
    assert record.task.seed == record.task.params.seed == expected


def test_messages_for_templates() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"z": 1, "a": [2]}'}}
    messages = [
        {"role": "developer", "content": "d", "name": "boss"},
        {"role": "assistant", "tool_calls": [call]},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "tool_call_id": "c",
        },
    ]
    function = {"name": "f", "arguments": {"z": 1, "a": [2]}}
    assert template_messages(turns_of(messages), parts=False) == [
        {"role": "system", "content": "d", "name": "boss"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "content": "a\nb", "tool_call_id": "c"},
    ]


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": 1, "a": 2}', '{"a": "\\ud800"}', '{"a": NaN}', "[" * 200])
async def test_arguments_must_be_an_object(gateway: Gateway, arguments: str) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    with pytest.raises(InvalidParams) as caught:
        await chat_record(gateway.context, chat(messages=messages))
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


async def test_problems_of_the_length_name_the_field_that_was_used(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    gateway.engine.load = msgspec.structs.replace(gateway.engine.load, max_model_len=64)
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(PagodaError) as caught:
            await chat_record(gateway.context, chat(**{name: 64}))
        assert caught.value.param == name


async def test_all_problems_at_once(gateway: Gateway) -> None:
    with pytest.raises(InvalidParams) as caught:
        await chat_record(gateway.context, chat(n=0, top_p=2.0, max_tokens=0))
    assert {problem.param for problem in caught.value.problems} == {"n", "top_p", "max_tokens"}


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**63, "width"])
@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids", "prompt"])
async def test_sec_14_ids_are_in_the_models_range(gateway: Gateway, field: str, token_id: Any) -> None:
    number = gateway.text.vocab_size if token_id == "width" else token_id
    value: Any = {str(number): 1.0} if field == "logit_bias" else [number]
    with pytest.raises(InvalidParams) as caught:
        await completion_records(gateway.context, completion(**{field: value}))
    assert (caught.value.param or "").startswith(field)


async def test_sec_08_ids_of_requests_are_ours(gateway: Gateway) -> None:
    """Each has 128 random bits, whatever clients call their requests; a client's name is only appended."""
    for fields, name in (({"user": "same"}, ""), ({"request_id": "same"}, ".same")):
        ids = {(await chat_record(gateway.context, chat(**fields))).request_id for _ in range(20)}
        assert len(ids) == 20
        assert all(len(bytes.fromhex(text[:32])) == 16 and text[32:] == name for text in ids)


@pytest.mark.parametrize("salt", ["", "a b", "x" * 65, "é", "a\n", "../x"])
async def test_sec_10_salts_are_plain_names(gateway: Gateway, salt: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        chat(cache_salt=salt)
    assert caught.value.param == "cache_salt"
    assert (await chat_record(gateway.context, chat(cache_salt="x" * 64))).cache_salt == "x" * 64
    assert (await chat_record(gateway.context, chat())).cache_salt == ""


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


CEILINGS: list[tuple[str, int, Any]] = [
    ("max_messages", 2, lambda count: {"messages": MESSAGES * count}),
    (
        "max_tools",
        2,
        lambda count: {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]},
    ),
    ("max_prompts", 2, lambda count: {"prompt": ["x"] * count}),
    ("n", 16, lambda count: {"n": count}),
    ("top_logprobs", 20, lambda count: {"logprobs": True, "top_logprobs": count}),
    ("stop", 16, lambda count: {"stop": ["x"] * min(count, 10_000)}),
]


@pytest.mark.parametrize(("name", "limit", "fields"), CEILINGS, ids=[name for name, _, _ in CEILINGS])
async def test_sec_15_ceilings_name_themselves(tmp_path: Path, name: str, limit: int, fields: Any) -> None:
    config = {name: limit} if name.startswith("max_") else {}
    gateway = make_gateway(tmp_path, **config)
    gateway.engine.load = Load(engine_id="x", max_model_len=100_000)
    for count in (limit, limit + 1, 10**9):
        count = count if count <= limit + 1 or name in ("n", "top_logprobs") else 10_000
        body = fields(count)
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        whole = body if "prompt" in body else {"messages": MESSAGES, "max_tokens": 1} | body
        response = await gateway.client.post(path, json=whole)
        assert response.status_code == (200 if count == limit else 400), response.text
        if count > limit:
            error = response.json()["error"]
            assert error["param"] == name.removeprefix("max_").replace("prompts", "prompt")
            assert str(limit) in error["message"]


async def test_priorities_are_refused_where_they_mean_nothing(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    for policy, priority, taken in (
        ("fcfs", 0, True), ("fcfs", 1, False), ("fair", 1, False), ("priority", 1, True), ("priority", -1, False),
        ("", 1, True), ("", -1, False),
    ):  # fmt: skip
        gateway.engine.load = msgspec.structs.replace(gateway.engine.load, policy=policy)
        if taken:
            assert (await chat_record(gateway.context, chat(priority=priority))).priority == priority
            continue
        with pytest.raises(InvalidParams, match=policy if policy in ("fcfs", "fair") else "at least 0 here") as caught:
            await chat_record(gateway.context, chat(priority=priority))
        assert caught.value.param == "priority"


async def test_options_with_fields_of_their_own_reach_templates_that_read_them(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    template = "{{ messages[0].content }}{{ reasoning_effort }}{{ verbosity }}"
    text = type(gateway.text).load(write_model_dir(tmp_path / "other"), template)
    object.__setattr__(gateway.context.catalogue.find(None, NOBODY), "text", text)
    record = await chat_record(gateway.context, chat(reasoning_effort="low", verbosity="high"))
    assert text.decode(record.prompt_token_ids) == "hellolowhigh"
    with pytest.raises(InvalidParams, match="give it once"):
        await chat_record(gateway.context, chat(verbosity="low", chat_template_kwargs={"verbosity": "high"}))


async def test_an_image_gives_one_sentence() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:..", "detail": "low"}}
    with pytest.raises(InvalidParams) as caught:
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, image]}])
    (problem,) = caught.value.problems
    assert problem.param == "messages[0].content[1]"
    assert "'image_url'" in problem.message


async def test_what_is_wrong_is_shown_short_and_in_ascii() -> None:
    for fields in ({"temperature": "hot"}, {"messages": [{"role": "röbot" * 100, "content": "x"}]}, {"n": "é\n" * 99}):
        with pytest.raises(InvalidParams) as caught:
            chat(**fields)
        assert "got " in caught.value.message
        assert caught.value.message.isascii()
        assert caught.value.message.isprintable()
        assert len(caught.value.message) < 300
