"""POST /v1/chat/completions against a scripted engine, raw and through the official client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import few
from tests.gateway.fakes_engine import MODEL, Gateway, breaking, call_app, failing, make_gateway, play, saying

from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import FinishReason

PATH = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def post(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(PATH, json=ASK | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(gateway: Gateway, path: str = PATH, **fields: Any) -> list[Any]:
    """The events of a stream, including "[DONE]"."""
    response = await gateway.client.post(path, json=ASK | fields | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


async def refusal(gateway: Gateway, status: int = 400, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(PATH, json=ASK | fields)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    return response.json()["error"]


async def test_an_answer_has_openais_shape(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello 🙂")
    answer = await post(gateway)
    assert answer["id"] == "chatcmpl-" + gateway.engine.record.request_id
    assert (answer["object"], answer["model"], answer["system_fingerprint"]) == ("chat.completion", MODEL, "fp-tiny")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello 🙂", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    num_prompt = len(gateway.engine.record.prompt_token_ids)
    num_output = len(gateway.ids("hello 🙂"))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_the_model_sees_the_rendered_template(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    await post(
        gateway,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "hello"},
        ],
        chat_template_kwargs={"mood": "happy"},
    )
    shown = gateway.text.decode(gateway.engine.record.prompt_token_ids, skip_special_tokens=False)
    assert shown == (
        "<|im_start|>system\nbe\nbrief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n(happy)"
    )


async def test_a_final_message_can_be_continued(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    messages = [*ASK["messages"], {"role": "assistant", "content": "well"}]
    await post(gateway, messages=messages, add_generation_prompt=False, continue_final_message=True)
    shown = gateway.text.decode(gateway.engine.record.prompt_token_ids, skip_special_tokens=False)
    assert shown.endswith("<|im_start|>assistant\nwell")


async def test_parameters_reach_the_record(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x", min_priority=-4)
    await post(
        gateway, temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.5,
        frequency_penalty=-0.5, seed=-1, max_completion_tokens=7, min_tokens=2, stop_token_ids=[3], ignore_eos=True,
        logit_bias={"5": -100}, allowed_token_ids=[5, 6], bad_words=["hello"], logprobs=True, top_logprobs=2,
        priority=-4, cache_salt="tenant_1", n=2, stop="END",
    )  # fmt: skip
    record = gateway.engine.record
    p = record.task.params
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty) == (0.5, 0, 0.9, 0.1, 1.2)
    assert (p.presence_penalty, p.frequency_penalty, p.max_tokens, p.min_tokens) == (0.5, -0.5, 7, 2)
    assert (p.stop_token_ids, p.ignore_eos, p.logit_bias, p.allowed_token_ids) == ((3,), True, {5: -100}, (5, 6))
    assert (p.logprobs, p.n, p.stop, p.seed) == (2, 2, ("END",), 2**64 - 1)
    assert (record.task.seed, record.priority, record.cache_salt) == (2**64 - 1, -4, "tenant_1")
    assert p.bad_words_token_ids == (tuple(gateway.ids("hello")), tuple(gateway.ids(" hello")))
    assert record.task.eos_token_ids == gateway.text.eos_token_ids


async def test_defaults_are_openais_and_the_seed_is_drawn(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    await post(gateway)
    await post(gateway)
    first, second = (generation.record for generation in gateway.engine.generations)
    p = first.task.params
    assert (p.temperature, p.max_tokens, p.n, p.seed) == (1, None, 1, None)
    assert first.task.seed != second.task.seed
    assert first.request_id != second.request_id
    assert len(first.request_id) == 32


async def test_a_stream_has_openais_shape(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello 🙂")
    *events, usage, done = await chunks(gateway, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "hello 🙂"
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert {event["id"] for event in [*events, usage]} == {"chatcmpl-" + gateway.engine.record.request_id}
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert all(event["usage"] is None for event in events)
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["usage"]["completion_tokens"] == len(gateway.ids("hello 🙂"))


async def test_usage_in_every_chunk_on_request(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "abc")
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, _usage, _done = await chunks(gateway, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3, 3]


@settings(max_examples=few(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(alphabet="ab <é🙂\n", max_size=12).map(lambda t: t + CALL * (len(t) % 3)),
    batch=st.integers(1, 5),
    stop=st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=3), max_size=2),
    with_tools=st.booleans(),
)
def test_a_stream_adds_up_to_the_whole_answer(
    tmp_path: Path, text: str, batch: int, stop: list[str], with_tools: bool
) -> None:
    async def both() -> tuple[dict[str, Any], list[Any]]:
        gateway = saying(tmp_path, text, text[::-1], batch=batch, reason=FinishReason.STOP)
        extra: dict[str, Any] = {"n": 2, "stop": stop} | ({"tools": [TOOL]} if with_tools else {})
        return await post(gateway, **extra), await chunks(gateway, **extra)

    whole, events = asyncio.run(both())
    for choice in whole["choices"]:
        mine = [c for event in events[:-1] for c in event["choices"] if c["index"] == choice["index"]]
        content = "".join(c["delta"].get("content") or "" for c in mine)
        calls: list[dict[str, Any]] = []
        for delta in (call for c in mine for call in c["delta"].get("tool_calls", ())):
            if "id" in delta:
                calls.append({"name": delta["function"]["name"], "arguments": ""})
            calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
        assert content == (choice["message"]["content"] or "")
        assert calls == [
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            for call in choice["message"].get("tool_calls", ())
        ]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]


async def test_a_stop_string_ends_its_choice_and_aborts_it(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "one two three", "one four")
    answer = await post(gateway, n=2, stop=["xyz"])
    first, second = answer["choices"]
    assert (first["message"]["content"], first["finish_reason"], first["stop_reason"]) == (
        "one two three",
        "length",
        None,
    )
    assert gateway.engine.generations[0].aborted == []
    gateway = saying(tmp_path, "one two three", "one four")
    answer = await post(gateway, n=2, stop=["e t"])
    first, second = answer["choices"]
    assert (first["message"]["content"], first["finish_reason"], first["stop_reason"]) == ("on", "stop", "e t")
    assert (second["message"]["content"], second["finish_reason"], second["stop_reason"]) == (
        "one four",
        "length",
        None,
    )
    assert gateway.engine.generations[0].aborted == [0]
    assert answer["usage"]["completion_tokens"] == len(gateway.ids("one t")) + len(gateway.ids("one four"))


async def test_a_stream_does_not_wait_for_an_aborted_engine(tmp_path: Path) -> None:
    gateway = saying(tmp_path)
    never = asyncio.Event()
    scripted = play(gateway.ids("a stop b"))
    gateway.engine.script = lambda record: [*scripted(record)[:-2], never]
    async with asyncio.timeout(10):
        events = await chunks(gateway, stop="stop")
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert gateway.engine.generations[0].closed.is_set()


async def test_the_end_token_is_no_text_and_no_stop_reason(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    (eos,) = gateway.text.eos_token_ids
    tokens = [*gateway.ids("hello"), eos]
    gateway.engine.script = play(tokens, reason=FinishReason.STOP, stop_token_id=eos)
    answer = await post(gateway, skip_special_tokens=False)
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", None)
    assert answer["usage"]["completion_tokens"] == len(tokens)


async def test_logprobs_carry_bytes_and_alternatives(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "a🙂")
    answer = await post(gateway, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "\\xf0", "\\x9f", "\\x99", "\\x82"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "a🙂"
    (token_id,) = gateway.ids("a")
    assert content[0]["logprob"] == -token_id / 1000
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-token_id / 1000, -(token_id + 1) / 1000]
    events = await chunks(gateway, logprobs=True, top_logprobs=2)
    streamed = [e for c in events[:-1] for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


async def test_token_ids_and_prompt_logprobs_on_request(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "abc")
    answer = await post(gateway, return_token_ids=True, prompt_logprobs=1)
    prompt = gateway.engine.record.prompt_token_ids
    assert answer["choices"][0]["token_ids"] == gateway.ids("abc")
    assert answer["prompt_token_ids"] == prompt
    events = await chunks(gateway, return_token_ids=True)
    assert events[0]["choices"][0]["prompt_token_ids"] == prompt
    assert [i for e in events[:-1] for i in e["choices"][0].get("token_ids", ())] == gateway.ids("abc")
    first, second, *_rest = answer["prompt_logprobs"]
    assert first is None
    assert second[str(prompt[1])]["rank"] == 1
    assert len(answer["prompt_logprobs"]) == len(prompt)


async def test_tool_calls(tmp_path: Path) -> None:
    gateway = saying(tmp_path, f"Let me add.\n{CALL}", reason=FinishReason.STOP)
    answer = await post(gateway, tools=[TOOL])
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me add."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    shown = gateway.text.decode(gateway.engine.record.prompt_token_ids, skip_special_tokens=False)
    assert json.dumps(TOOL) in shown


async def test_tools_are_neither_shown_nor_read_with_tool_choice_none(tmp_path: Path) -> None:
    gateway = saying(tmp_path, CALL, reason=FinishReason.STOP)
    answer = await post(gateway, tools=[TOOL], tool_choice="none")
    assert answer["choices"][0]["message"]["content"] == CALL
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "<tools>" not in gateway.text.decode(gateway.engine.record.prompt_token_ids)


async def test_a_cut_off_call_is_text_with_its_own_reason(tmp_path: Path) -> None:
    gateway = saying(tmp_path, CALL[:30], reason=FinishReason.LENGTH)
    answer = await post(gateway, tools=[TOOL])
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == (CALL[:30], "length")


async def test_a_tool_conversation_is_rendered(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "3")
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": "é"}'}}
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    await post(gateway, messages=messages, tools=[TOOL])
    shown = gateway.text.decode(gateway.engine.record.prompt_token_ids, skip_special_tokens=False)
    assert '{"name": "add", "arguments": {"b": 2, "a": "é"}}' in shown
    call["function"]["arguments"] = "[1"  # type: ignore[index]
    error = await refusal(gateway, messages=messages)
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


async def test_an_engine_that_refuses_gives_a_status_also_to_a_stream(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, failing(ErrorCode.OVERLOADED, retry_after_s=2.5))
    for stream in (False, True):
        response = await gateway.client.post(PATH, json=ASK | {"stream": stream})
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "overloaded_error"
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2500")
        assert response.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_has_its_status(tmp_path: Path, stream: bool) -> None:
    gateway = make_gateway(tmp_path, breaking(code=ErrorCode.NUMERICAL_ERROR))
    response = await gateway.client.post(PATH, json=ASK | {"stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "numerical_error")
    assert gateway.engine.generations[0].closed.is_set()


async def test_a_failure_in_mid_stream_is_an_event_and_no_done(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    gateway.engine.script = breaking(*gateway.ids("ab"))
    events = await chunks(gateway)
    assert events[-1] == {
        "error": {
            "message": "worker lost",
            "type": "service_unavailable_error",
            "param": None,
            "code": "stream_interrupted",
        }
    }
    assert "[DONE]" not in events


async def test_a_generation_that_just_stops_is_an_error(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, lambda record: [])
    assert (await refusal(gateway, 503))["code"] == "stream_interrupted"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_shows_an_id_and_nothing_else(
    tmp_path: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = make_gateway(tmp_path, lambda record: [RuntimeError("secret /path")])
    error = await refusal(gateway, 500, stream=stream)
    assert error == {
        "message": "the request failed inside the server",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert "secret /path" in caplog.text
    assert gateway.engine.generations[0].closed.is_set()


async def test_silence_is_pinged(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, ping_interval_s=0.1)
    released = asyncio.Event()
    scripted = play(gateway.ids("a"))
    gateway.engine.script = lambda record: [released, *scripted(record)]
    received = b""

    async def send(message: dict[str, Any]) -> None:
        nonlocal received
        received += message.get("body", b"")
        if received.count(b": ping\n\n") == 3:
            released.set()

    await call_app(gateway, PATH, ASK | {"stream": True}, send)
    assert received.startswith(b": ping\n\n" * 3)
    assert received.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_client_that_leaves_ends_its_generation(tmp_path: Path, stream: bool, num_tokens: int) -> None:
    gateway = make_gateway(tmp_path)
    waiting, left = asyncio.Event(), asyncio.Event()
    scripted = play(gateway.ids("abc"))

    def script(record: Any) -> list[Any]:
        return [*scripted(record)[:num_tokens], waiting]

    gateway.engine.script = script

    async def send(message: dict[str, Any]) -> None:
        pass

    serving = asyncio.create_task(call_app(gateway, PATH, ASK | {"stream": stream}, send, left))
    await gateway.engine.submitted.wait()
    await gateway.engine.generations[0].waiting.wait()
    left.set()
    await serving
    assert gateway.engine.generations[0].closed.is_set()


async def test_many_ready_tokens_are_written_at_once(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "abcdefgh", batch=8)
    writes: list[bytes] = []

    async def send(message: dict[str, Any]) -> None:
        writes.append(message.get("body", b""))

    await call_app(gateway, PATH, ASK | {"stream": True}, send)
    assert len([data for data in writes if data]) == 2  # role, text and ending; [DONE]


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [IMAGE]}, "messages[0].content[0]"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 1.0}, "n"),
    ({"n": True}, "n"),
    ({"n": 10**9}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": ""}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [100_000]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"cache_salt": "a b"}, "cache_salt"),
    ({"cache_salt": "x" * 65}, "cache_salt"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"verbosity": "low"}, "verbosity"),
    ({"tools": []}, "tools"),
    ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages[0]"),
    ({"priority": -1}, "priority"),
    ({"priority": -(10**9)}, "priority"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"audio": {"voice": "x", "format": "mp3"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"store": True}, "store"),
    ({"functions": []}, "functions"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "add"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}},
     "tool_choice.allowed_tools.mode"),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"thinking_budget": -1}, "thinking_budget"),
    ({"thinking_budget": 5}, "thinking_budget"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"mood": ["x"]}}, "chat_template_kwargs.mood"),
    ({"chat_template_kwargs": {"moood": "x"}}, "chat_template_kwargs.moood"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"block_ids": [1]}, "block_ids"),
    ({"verbosity": "loud"}, "verbosity"),
    ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[f"{param}-{i}" for i, (_, param) in enumerate(REFUSED)])
async def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    gateway = saying(tmp_path, "x")
    error = await refusal(gateway, **fields)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert gateway.engine.generations == []


@pytest.mark.parametrize(
    "fields",
    [
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"stream": True, "prompt_logprobs": 1},
        {"top_logprobs": 2},
        {"max_tokens": 3, "max_completion_tokens": 4},
        {"continue_final_message": True},
        {"tool_choice": "auto"},
        {"messages": [{"role": "user", "content": "x", "tool_calls": []}, {"role": "tool", "content": "x"}]},
    ],
)
async def test_fields_that_contradict_each_other_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    error = await refusal(saying(tmp_path, "x"), **fields)
    assert error["code"] == "invalid_argument"


async def test_fields_that_change_nothing_are_taken(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    await post(
        gateway, user="u", metadata={"k": "v"}, store=False, service_tier="auto", modalities=["text"],
        response_format={"type": "text"}, parallel_tool_calls=True, logprobs=False, reasoning_effort=None,
        safety_identifier="s", prompt_cache_key="p", stream=False, stop=None, verbosity="medium",
    )  # fmt: skip


async def test_limits_of_the_configuration(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x", max_messages=2, max_tools=1)
    assert (await refusal(gateway, messages=ASK["messages"] * 3))["param"] == "messages"
    error = await refusal(gateway, tools=[TOOL, TOOL])
    assert (error["param"], error["message"]) == ("tools", "tools: at most 1 are allowed, got 2")


async def test_an_unknown_model_is_404(tmp_path: Path) -> None:
    error = await refusal(saying(tmp_path, "x"), 404, model="gpt-4")
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_a_prompt_that_does_not_fit_is_refused_even_when_huge(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    for content in ("a" * 300, "a" * 1_000_000):
        error = await refusal(gateway, messages=[{"role": "user", "content": content}])
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert gateway.engine.generations == []


async def test_without_any_known_context_length_it_is_unavailable(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    gateway.engine.load = gateway.engine.load.__class__(engine_id="")
    object.__setattr__(gateway.text, "max_model_len", 0)
    assert (await refusal(gateway, 503))["code"] == "unavailable"


# The official client


def sdk(gateway: Gateway) -> openai.AsyncOpenAI:
    transport = openai.DefaultAsyncHttpxClient.__mro__  # tells which httpx the client is built on
    module = next(c.__module__.split(".")[0] for c in transport if c.__module__.startswith("httpx"))
    library = __import__(module)
    client = library.AsyncClient(transport=library.ASGITransport(gateway.app), base_url="http://gateway")
    return openai.AsyncOpenAI(api_key="x", base_url="http://gateway/v1", http_client=client, max_retries=0)


async def test_official_client_whole_answer(tmp_path: Path) -> None:
    client = sdk(saying(tmp_path, "hello world"))
    answer = await client.chat.completions.create(**ASK, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == "hello world"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.choices[0].logprobs is not None


async def test_official_client_stream_with_tools(tmp_path: Path) -> None:
    client = sdk(saying(tmp_path, f"ok {CALL}{CALL}", reason=FinishReason.STOP))
    async with client.chat.completions.stream(**ASK, tools=[TOOL]) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "ok"
    assert [call.function.arguments for call in message.tool_calls or ()] == ['{"a": 1}'] * 2
    assert final.choices[0].finish_reason == "tool_calls"


async def test_official_client_sees_errors_as_its_own(tmp_path: Path) -> None:
    with pytest.raises(openai.NotFoundError):
        await sdk(saying(tmp_path, "x")).chat.completions.create(**ASK | {"model": "nope"})
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk(saying(tmp_path, "x")).chat.completions.create(**ASK, n=99)
    assert caught.value.param == "n"
    with pytest.raises(openai.InternalServerError) as late:
        await sdk(make_gateway(tmp_path, failing())).chat.completions.create(**ASK)
    assert late.value.status_code == 503
    gateway = make_gateway(tmp_path)
    gateway.engine.script = breaking(*gateway.ids("ab"))
    stream = await sdk(gateway).chat.completions.create(**ASK, stream=True)
    with pytest.raises(openai.APIError, match="worker lost"):
        async for _chunk in stream:
            pass
