"""From bodies to records: ranges against the model, names of fields, threads for long texts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.gateway.fakes_engine import Gateway, make_gateway
from tests.gateway.model_dir import write_model_dir

from pagoda_gateway import text_pool
from pagoda_gateway.body import parse_body
from pagoda_gateway.requests import chat_record, completion_records
from pagoda_gateway.schemas import ChatRequest, CompletionRequest
from pagoda_gateway.text.conversation import template_messages
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


async def test_the_authors_defaults_yield_to_the_request(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    text = type(gateway.text).load(write_model_dir(tmp_path / "other", generation_config=defaults))
    object.__setattr__(gateway.context, "text", text)
    params = (await chat_record(gateway.context, chat(temperature=0, top_k=-1))).params
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0, 0, 0.9, 1.1)


@pytest.mark.parametrize(("seed", "expected"), [(0, 0), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (-(2**63), 2**63)])
async def test_every_64_bit_seed_is_taken(gateway: Gateway, seed: int, expected: int) -> None:
    record = await chat_record(gateway.context, chat(seed=seed))
    assert record.seed == record.params.seed == expected


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
    assert template_messages(messages, parts=False) == [
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
