"""POST /v1/messages against a scripted engine, as bodies and bytes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import few
from tests.gateway.fakes_engine import MODEL, Gateway, breaking, call_app, failing, make_gateway, play
from tests.gateway.fakes_engine import saying_all as saying
from tests.gateway.model_dir import MAX_MODEL_LEN

from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import FinishReason

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hello"}
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": [USER]}
TOOL = {"name": "add", "description": "sums", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def post(gateway: Gateway, path: str = PATH, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(path, json=ASK | fields)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(stream: str) -> list[dict[str, Any]]:
    """The events in a stream's text; checks that each is named by its type."""
    events = []
    for block in stream.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def stream(gateway: Gateway, **fields: Any) -> list[dict[str, Any]]:
    response = await gateway.client.post(PATH, json=ASK | fields | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


async def refusal(gateway: Gateway, status: int = 400, path: str = PATH, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(path, json=ASK | fields)
    assert response.status_code == status, response.text
    answer = response.json()
    assert set(answer) == {"type", "error", "request_id"}
    assert answer["type"] == "error"
    assert set(answer["error"]) == {"type", "message"}
    return answer["error"]


def shown(gateway: Gateway) -> str:
    """The prompt of the only request, as the model saw it."""
    return gateway.text.decode(gateway.engine.record.prompt_token_ids, skip_special_tokens=False)


async def test_a_message_has_anthropics_shape(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello 🙂")
    answer = await post(gateway)
    record = gateway.engine.record
    assert answer == {
        "id": "msg_" + record.request_id,
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "hello 🙂"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(record.prompt_token_ids) - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": len(gateway.ids("hello 🙂")),
        },
    }


async def test_the_stream_of_a_message_has_anthropics_events(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello world")
    start, block, *deltas, stop, delta, last = await stream(gateway)
    assert start["message"]["id"] == "msg_" + gateway.engine.record.request_id
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    assert start["message"]["usage"] == {
        "input_tokens": len(gateway.engine.record.prompt_token_ids) - 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 1,
    }
    assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert "".join(event["delta"]["text"] for event in deltas) == "hello world"
    assert {(event["type"], event["index"], event["delta"]["type"]) for event in deltas} == {
        ("content_block_delta", 0, "text_delta")
    }
    assert stop == {"type": "content_block_stop", "index": 0}
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"] == {
        "input_tokens": len(gateway.engine.record.prompt_token_ids) - 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": len(gateway.ids("hello world")),
    }
    assert (start["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client assembles from a stream; checks the order of its events."""
    start, *middle, delta, stop = events
    assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message, texts, is_open = start["message"], list[str](), False
    for event in middle:
        assert is_open == (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            assert event["index"] == len(texts)
            message["content"].append(event["content_block"])
            texts.append("")
            is_open = True
            continue
        assert event["index"] == len(texts) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        (text,) = (value for name, value in event["delta"].items() if name != "type")
        texts[-1] += text
    assert not is_open
    for block, text in zip(message["content"], texts, strict=True):
        block |= {"text": text} if block["type"] == "text" else {"input": json.loads(text)}
    return message | delta["delta"] | {"usage": delta["usage"]}


@settings(max_examples=few(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.sampled_from(["a", " b", "\n", "é🙂", "<tool", CALL, CALL + CALL, "<tool_call>{"]), max_size=5),
    batch=st.integers(1, 7),
    stop=st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=3), max_size=2),
    with_tools=st.booleans(),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_a_stream_adds_up_to_the_whole_message(
    tmp_path: Path, pieces: list[str], batch: int, stop: list[str], with_tools: bool, reason: FinishReason
) -> None:
    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        gateway = saying(tmp_path, "".join(pieces), batch=batch, reason=reason)
        extra: dict[str, Any] = {"stop_sequences": stop} | ({"tools": [TOOL]} if with_tools else {})
        whole, streamed = await post(gateway, **extra), added_up(await stream(gateway, **extra))
        first, second = (generation.record.request_id for generation in gateway.engine.generations)
        for message, request_id in ((whole, first), (streamed, second)):
            message["id"] = message["id"].replace(request_id, "")
            for block in message["content"]:
                if block["type"] == "tool_use":
                    assert block["id"].startswith(f"toolu_{request_id[:20]}")
                    block["id"] = block["id"].replace(request_id[:20], "")
        return whole, streamed

    whole, streamed = asyncio.run(both())
    assert whole == streamed
    ids = [block["id"] for block in whole["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)
    cut_off = reason is FinishReason.LENGTH and whole["stop_sequence"] is None
    assert (whole["stop_reason"] == "tool_use") == (bool(ids) and not cut_off)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("text", "reason", "fields", "stop_reason", "stop_sequence"),
    [
        ("abc", FinishReason.STOP, {}, "end_turn", None),
        ("abc", FinishReason.LENGTH, {}, "max_tokens", None),
        ("abc", FinishReason.LENGTH, {"max_tokens": 10 * MAX_MODEL_LEN}, "model_context_window_exceeded", None),
        ("abc", FinishReason.LENGTH, {"stop_sequences": ["x", "b"]}, "stop_sequence", "b"),
        (CALL, FinishReason.STOP, {"tools": [TOOL]}, "tool_use", None),
        (f"{CALL} b", FinishReason.STOP, {"tools": [TOOL], "stop_sequences": ["b"]}, "tool_use", "b"),
        (CALL, FinishReason.LENGTH, {"tools": [TOOL], "max_tokens": 10}, "max_tokens", None),
        (f"{CALL} bc", FinishReason.LENGTH, {"tools": [TOOL], "stop_sequences": ["b"]}, "tool_use", "b"),
    ],
)
async def test_why_a_message_ended(
    tmp_path: Path,
    text: str,
    reason: FinishReason,
    fields: dict[str, Any],
    stop_reason: str,
    stop_sequence: str | None,
    streamed: bool,
) -> None:
    gateway = saying(tmp_path, text, reason=reason)
    message = added_up(await stream(gateway, **fields)) if streamed else await post(gateway, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)


async def test_a_stop_sequence_aborts_what_still_runs(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "one two three")
    message = await post(gateway, stop_sequences=["e t"])
    assert message["content"] == [{"type": "text", "text": "on"}]
    assert gateway.engine.generations[0].aborted == [0]


async def test_a_stream_does_not_wait_for_an_aborted_engine(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "a stop b")
    scripted, never = gateway.engine.script, asyncio.Event()
    gateway.engine.script = lambda record: [*scripted(record)[:-2], never]
    async with asyncio.timeout(60):
        message = added_up(await stream(gateway, stop_sequences=["stop"]))
    assert (message["content"][0]["text"], message["stop_sequence"]) == ("a ", "stop")
    assert message["usage"]["cache_read_input_tokens"] == 2
    assert gateway.engine.generations[0].closed.is_set()


async def test_nothing_said_is_no_block(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "")
    assert (await post(gateway))["content"] == []
    assert [event["type"] for event in await stream(gateway)] == ["message_start", "message_delta", "message_stop"]


async def test_tools_are_shown_and_their_calls_are_blocks(tmp_path: Path) -> None:
    gateway = saying(tmp_path, f"Let me add.\n{CALL}\nand again\n{CALL}")
    answer = await post(gateway, tools=[TOOL], tool_choice={"type": "auto"})
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["text", "tool_use", "text", "tool_use"]
    assert answer["content"][0] == {"type": "text", "text": "Let me add."}
    assert (answer["content"][1]["name"], answer["content"][1]["input"]) == ("add", {"a": 1})
    function = {"name": "add", "description": "sums", "parameters": TOOL["input_schema"]}
    assert json.dumps({"type": "function", "function": function}) in shown(gateway)


async def test_tools_are_neither_shown_nor_read_with_choice_none(tmp_path: Path) -> None:
    gateway = saying(tmp_path, CALL)
    answer = await post(gateway, tools=[TOOL], tool_choice={"type": "none"})
    assert answer["content"] == [{"type": "text", "text": CALL}]
    assert answer["stop_reason"] == "end_turn"
    assert "<tools>" not in shown(gateway)


async def test_parameters_reach_the_record(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    await post(gateway, max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["END", "B"])
    p = gateway.engine.record.task.params
    assert (p.max_tokens, p.temperature, p.top_p, p.top_k, p.stop) == (7, 0.5, 0.9, 3, ("END", "B"))
    assert (p.n, p.logprobs) == (1, None)


async def test_max_tokens_may_be_more_than_there_is_room_for(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    await post(gateway, max_tokens=MAX_MODEL_LEN)
    assert gateway.engine.record.task.params.max_tokens is None
    error = await refusal(gateway, messages=[{"role": "user", "content": "ab " * MAX_MODEL_LEN}])
    assert error["message"].startswith("messages: This model's maximum context length is")


async def test_fields_that_change_nothing_are_taken(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    cached = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    await post(
        gateway, messages=[{"role": "user", "content": [cached | {"citations": None}]}], metadata={"user_id": "u"},
        service_tier="standard_only", thinking={"type": "disabled"}, stream=False, stop_sequences=[], container=None,
        cache_control={"type": "ephemeral"}, tools=[TOOL | {"cache_control": {"type": "ephemeral"}, "type": "custom"}],
        tool_choice={"type": "none", "disable_parallel_tool_use": False}, speed="standard", mcp_servers=[],
    )  # fmt: skip
    assert shown(gateway) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [TOOL | fields]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "user", "content": "x", "name": "n"}]}, "messages[1].name"),
    (user({"type": "image", "source": {"type": "url", "url": "x"}}), "messages[0].content[0]"),
    (user({"type": "text", "text": "a"}, {"type": "document", "source": {}}), "messages[0].content[1]"),
    (user({"type": "search_result", "content": []}), "messages[0].content[0]"),
    (user({"type": "container_upload", "file_id": "f"}), "messages[0].content[0]"),
    (user({"type": "text", "text": 1}), "messages[0].content[0].text"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"text": "x"}), "messages[0].content[0].type"),
    (user("x"), "messages[0].content[0]"),
    (
        user({"type": "text", "text": "x", "cache_control": {"type": "for ever"}}),
        "messages[0].content[0].cache_control",
    ),
    (user({"type": "text", "text": "x", "citations": [{}]}), "messages[0].content[0].citations"),
    (user({"type": "thinking", "thinking": "x", "signature": ""}), "messages[0]"),
    (user({"type": "tool_use", "id": "i", "name": "add", "input": {}}), "messages[0]"),
    (user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
    (
        user({"type": "tool_result", "tool_use_id": "i", "content": [{"type": "image"}]}),
        "messages[0].content[0].content",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
        "messages[1]",
    ),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "messages[1].content[0]"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "i"}]}]}, "messages[0]"),
    (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "f", "input": {}}]},
            ]
        },
        "messages",
    ),
    ({"system": 1}, "system"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"temperature": -0.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stream": 1}, "stream"),
    ({"metadata": {"user": "x"}}, "metadata.user"),
    ({"metadata": {"user_id": "x" * 600}}, "metadata.user_id"),
    ({"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled"}}, "thinking"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking"),
    ({"thinking": {"type": "off"}}, "thinking"),
    (tool(name="a b"), "tools[0].name"),
    (tool(input_schema=None), "tools[0].input_schema"),
    (tool(eager_input_streaming=1), "tools[0].eager_input_streaming"),
    (tool(defer_loading=True), "tools[0].defer_loading"),
    (tool(allowed_callers=["code_execution_20250825"]), "tools[0].allowed_callers[0]"),
    (tool(input_examples=[{}]), "tools[0].input_examples"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tool_choice": {"type": "auto"}}, "tool_choice"),
    (tool() | {"tool_choice": {"type": "some"}}, "tool_choice"),
    (tool() | {"tool_choice": {"type": "tool"}}, "tool_choice"),
    (tool() | {"tool_choice": {"type": "any", "name": "add"}}, "tool_choice"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"cache_control": {"type": "persistent"}}, "cache_control.type"),
    ({"speed": "fast"}, "speed"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"context_management": {}}, "context_management"),
    ({"diagnostics": {}}, "diagnostics"),
    ({"inference_geo": "eu"}, "inference_geo"),
    ({"output_config": {"effort": "low"}}, "output_config"),
    ({"user_profile_id": "u"}, "user_profile_id"),
    ({"workspace_id": "w"}, "workspace_id"),
    ({"n": 2}, "n"),
    ({"request_id": "x"}, "request_id"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[f"{param}-{i}" for i, (_, param) in enumerate(REFUSED)])
async def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    gateway = saying(tmp_path, "x")
    error = await refusal(gateway, **fields)
    assert error["type"] == "invalid_request_error"
    assert param in error["message"].partition(" ")[0] or f" {param} " in f" {error['message']}"
    assert gateway.engine.generations == []


@pytest.mark.parametrize("missing", list(ASK))
async def test_what_is_required(tmp_path: Path, missing: str) -> None:
    gateway = saying(tmp_path, "x")
    response = await gateway.client.post(PATH, json={name: value for name, value in ASK.items() if name != missing})
    assert (response.status_code, response.json()["error"]["message"]) == (400, f"{missing}: is required")


async def test_limits_of_the_configuration(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x", max_messages=2, max_tools=1)
    assert (await refusal(gateway, messages=[USER] * 3))["message"] == "messages: at most 2 are allowed, got 3"
    assert (await refusal(gateway, tools=[TOOL, TOOL]))["message"] == "tools: at most 1 are allowed, got 2"


async def test_a_model_without_tool_calls_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    gateway = saying(tmp_path, "x")
    plain = gateway.text.load(tmp_path / "model", (tmp_path / "plain").read_text())
    object.__setattr__(gateway.text, "templates", plain.templates)
    assert (await refusal(gateway, tools=[TOOL]))["message"].startswith("tools: ")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (ErrorCode.OVERLOADED, 529, "overloaded_error"),
        (ErrorCode.UNAVAILABLE, 503, "api_error"),
        (ErrorCode.INTERNAL, 500, "api_error"),
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, 400, "invalid_request_error"),
    ],
)
async def test_an_engine_that_refuses_gives_a_status_also_to_a_stream(
    tmp_path: Path, code: ErrorCode, status: int, kind: str, streamed: bool
) -> None:
    gateway = make_gateway(tmp_path, failing(code, retry_after_s=2.5))
    assert (await refusal(gateway, status, stream=streamed))["type"] == kind


async def test_an_unknown_model_is_not_found(tmp_path: Path) -> None:
    for path, fields in ((PATH, ASK), (COUNT, {"messages": [USER]})):
        response = await saying(tmp_path, "x").client.post(path, json=fields | {"model": "other"})
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_failure_in_mid_stream_is_an_event_and_the_last_one(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    gateway.engine.script = breaking(*gateway.ids("ab"))
    events = await stream(gateway)
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "error",
    ]  # fmt: skip
    assert events[-1]["error"] == {"type": "api_error", "message": "worker lost"}
    assert gateway.engine.generations[0].closed.is_set()


async def test_silence_is_pinged_by_an_event(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, ping_interval_s=0.1)
    released = asyncio.Event()
    scripted = play(gateway.ids("a"))
    gateway.engine.script = lambda record: [released, *scripted(record)]
    received = b""

    async def send(message: dict[str, Any]) -> None:
        nonlocal received
        received += message.get("body", b"")
        if received.count(b"event: ping\n") == 3:
            released.set()

    await call_app(gateway, PATH, ASK | {"stream": True}, send)
    first, *_, last = events_of(received.decode())
    assert (first, last) == ({"type": "ping"}, {"type": "message_stop"})


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_client_that_leaves_ends_its_generation(tmp_path: Path, streamed: bool, num_tokens: int) -> None:
    gateway = make_gateway(tmp_path)
    waiting, left = asyncio.Event(), asyncio.Event()
    scripted = play(gateway.ids("abc"))
    gateway.engine.script = lambda record: [*scripted(record)[:num_tokens], waiting]

    async def send(message: dict[str, Any]) -> None:
        pass

    serving = asyncio.create_task(call_app(gateway, PATH, ASK | {"stream": streamed}, send, left))
    await gateway.engine.submitted.wait()
    await gateway.engine.generations[0].waiting.wait()
    left.set()
    await serving
    assert gateway.engine.generations[0].closed.is_set()


# The count is that of the prompt that would be generated from


async def count(gateway: Gateway, **fields: Any) -> int:
    body = {"model": MODEL, "messages": [USER]} | fields
    response = await gateway.client.post(COUNT, json=body)
    assert response.status_code == 200, response.text
    assert set(response.json()) == {"input_tokens"}
    return int(response.json()["input_tokens"])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "be brief"},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"messages": [USER, {"role": "assistant", "content": "well"}]},
    ],
)
async def test_the_count_is_that_of_the_message(tmp_path: Path, fields: dict[str, Any]) -> None:
    gateway = saying(tmp_path, "x")
    counted = await count(gateway, **fields)
    assert gateway.engine.generations == []
    await post(gateway, **fields)
    assert counted == len(gateway.engine.record.prompt_token_ids)


async def test_more_than_the_context_is_counted_up_to_a_length(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x", max_tokenize_chars=10_000)
    assert await count(gateway, messages=[{"role": "user", "content": "ab" * 4000}]) > MAX_MODEL_LEN
    error = await refusal_of_count(gateway, messages=[{"role": "user", "content": "ab" * 6000}])
    assert error["message"].startswith("messages: at most 10000 characters are allowed")


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"stream": True}, {"temperature": 0.5}])
async def test_a_count_takes_nothing_that_changes_no_prompt(tmp_path: Path, fields: dict[str, Any]) -> None:
    error = await refusal_of_count(saying(tmp_path, "x"), **fields)
    assert error["message"] == f"{next(iter(fields))}: is not a known field"


async def refusal_of_count(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(COUNT, json={"model": MODEL, "messages": [USER]} | fields)
    assert response.status_code == 400, response.text
    assert response.json()["type"] == "error"
    return response.json()["error"]
