"""/v1/responses against a scripted engine, as bodies and bytes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import few
from tests.gateway.fakes_engine import MODEL, Gateway, breaking, failing, make_gateway, play
from tests.gateway.fakes_engine import saying_all as saying
from tests.gateway.responses import PATH, get, post, refusal, stream

from pagoda_gateway.api.responses_answers import DeletedResponse, InputItems, ResponseAnswer
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import FinishReason

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


def seen(gateway: Gateway) -> str:
    """The prompt of the last request, as the model saw it."""
    return gateway.text.decode(gateway.engine.generations[-1].record.prompt_token_ids, skip_special_tokens=False)


async def test_a_response_has_openais_shape(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello 🙂")
    answer = await post(gateway, metadata={"a": "b"}, max_output_tokens=100)
    name = gateway.engine.record.request_id
    text = {"type": "output_text", "text": "hello 🙂", "annotations": [], "logprobs": []}
    assert answer["id"] == f"resp_{name}"
    assert answer["status"] == "completed"
    (item,) = answer["output"]
    assert item["content"] == [text]
    assert item["id"].startswith("msg_")
    assert answer["metadata"] == {"a": "b"}
    assert answer["usage"]["output_tokens"] == len(gateway.ids("hello 🙂"))
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert answer["max_output_tokens"] == 100
    assert answer["store"] is True


async def test_a_stream_tells_every_step_and_ends_with_the_whole(tmp_path: Path) -> None:
    events = await stream(saying(tmp_path, "hello you"))
    kinds = [one["type"].removeprefix("response.") for one in events]
    deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(deltas) == "hello you" == events[-4]["text"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    ResponseAnswer.model_validate(events[-1]["response"])


@given(batch=st.integers(1, 30), text=st.sampled_from(["hello", "a 🙂 b", f"so {CALL} and {CALL}", CALL]))
@settings(max_examples=few(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_a_stream_adds_up_to_the_whole_response(tmp_path: Path, batch: int, text: str) -> None:
    gateway = saying(tmp_path, text, batch=batch)
    tools = {"tools": [TOOL]} if "tool_call" in text else {}
    whole = (await post(gateway, **tools))["output"]
    events = await stream(gateway, **tools)
    added: dict[int, Any] = {}
    told = ""
    for one in events:
        index = one.get("output_index")
        if one["type"] == "response.output_item.added":
            added[index], told = one["item"], ""
        elif "delta" in one:
            told += one["delta"]
        elif one["type"] == "response.output_item.done":
            item = one["item"]
            assert told == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
            assert item["id"] == added[index]["id"]
    anonymous = [
        [{**item, "id": "", "call_id": ""} for item in output] for output in (whole, events[-1]["response"]["output"])
    ]
    assert anonymous[0] == anonymous[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_sec_15_log_probabilities_multiply_to_no_more_than_one_object_holds(tmp_path: Path, stream: bool) -> None:
    gateway = saying(tmp_path, "hello", max_logprob_values=100)
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "stream": stream}
    error = await refusal(gateway, **asked, max_output_tokens=5)
    assert error["param"] == "top_logprobs"
    assert "105 values; at most 100" in error["message"]
    assert (
        await gateway.client.post(PATH, json={"input": "hello", **asked, "max_output_tokens": 4})
    ).status_code == 200


async def test_what_ended_too_early_is_incomplete(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello", reason=FinishReason.LENGTH)
    answer = await post(gateway, max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert (await stream(gateway))[-1]["type"] == "response.incomplete"


async def test_log_probabilities_of_the_text(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello you", batch=2)
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = (await post(gateway, **asked))["output"]
    entries = item["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == "hello you"
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    told = [entry for one in await stream(gateway, **asked) if "delta" in one for entry in one["logprobs"]]
    assert told == entries


async def test_a_response_goes_on_from_another(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "fine")
    first = await post(gateway, input="how are you", instructions="be brief")
    assert "be brief" in seen(gateway)
    second = await post(gateway, input="why", previous_response_id=first["id"])
    assert "be brief" not in seen(gateway)  # instructions apply only to their own response
    places = [seen(gateway).index(text) for text in ("how are you", "fine", "why")]
    assert places == sorted(places)
    assert second["previous_response_id"] == first["id"]
    listed = await get(gateway, f"{second['id']}/input_items", order="asc")
    InputItems.model_validate(listed)
    assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]


async def test_calls_and_their_results_come_back_as_turns(tmp_path: Path) -> None:
    gateway = saying(tmp_path, CALL)
    first = await post(gateway, tools=[TOOL])
    (call,) = first["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1})
    gateway.engine.script = play(gateway.ids("two"))
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "the sum is 2"}
    by_id = await post(gateway, input=[result], previous_response_id=first["id"], tools=[TOOL])
    shown = seen(gateway)
    by_hand = [{"role": "user", "content": "hello"}, call | {"async": None}, result]
    assert (await post(gateway, input=by_hand, tools=[TOOL]))["output"][0]["content"] == by_id["output"][0]["content"]
    assert seen(gateway) == shown
    assert "the sum is 2" in shown


async def test_a_response_is_looked_up_and_forgotten(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello")
    answer = await post(gateway)
    assert await get(gateway, answer["id"]) == answer
    response = await gateway.client.delete(f"{PATH}/{answer['id']}")
    DeletedResponse.model_validate(response.json())
    for path in (answer["id"], f"{answer['id']}/input_items"):
        assert (await refusal(gateway, 404, "GET", f"/{path}"))["code"] == "not_found"
    error = await refusal(gateway, 404, previous_response_id=answer["id"])
    assert error["param"] == "previous_response_id"


async def test_what_is_not_to_be_kept_is_not(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello")
    answer = await post(gateway, store=False)
    assert answer["store"] is False
    await refusal(gateway, 404, "GET", f"/{answer['id']}")


async def test_what_is_to_be_included_may_be_said_again(tmp_path: Path) -> None:
    """OpenAI's client repeats it when it retrieves a response, as a list of one or several."""
    gateway = saying(tmp_path, "hello")
    answer = await post(gateway, include=["message.output_text.logprobs", "reasoning.encrypted_content"])
    several = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    for query in ({"include": several[0]}, {"include[]": several[0]}, {"include[]": several}):
        assert await get(gateway, answer["id"], **query) == answer
        assert (await get(gateway, f"{answer['id']}/input_items", **query))["data"]
    assert (await refusal(gateway, 400, "GET", f"/{answer['id']}", **{"include[]": ["x"]}))["param"] == "include[][0]"


async def test_input_items_come_in_pages(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello")
    turns = [{"role": "user", "content": str(i)} for i in range(5)]
    name = (await post(gateway, input=turns))["id"]
    page = await get(gateway, f"{name}/input_items", limit=2)
    assert [item["content"][0]["text"] for item in page["data"]] == ["4", "3"]
    assert page["has_more"] is True
    rest = await get(gateway, f"{name}/input_items", limit=9, after=page["last_id"])
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]
    assert rest["has_more"] is False
    wrong = ({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after"), ({"before": "x"}, "before")
    for query, param in wrong:
        assert (await refusal(gateway, 400, "GET", f"/{name}/input_items", **query))["param"] == param


async def test_items_that_share_an_id_are_listed_one_after_another(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello")
    turns = [{"type": "message", "role": "user", "content": str(i), "id": "msg_1"} for i in range(3)]
    name, seen, after = (await post(gateway, input=turns))["id"], [], None
    for _ in range(3):
        page = await get(gateway, f"{name}/input_items", limit=1, order="asc", **({"after": after} if after else {}))
        seen, after = [*seen, page["data"][0]["content"][0]["text"]], page["last_id"]
    assert seen == ["0", "1", "2"]
    assert page["has_more"] is False


async def test_a_query_is_held_to_its_fields(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello")
    name = (await post(gateway))["id"]
    assert (await get(gateway, name, stream="false"))["id"] == name
    for query, param in (
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "starting_after": -1}, "starting_after"),
        ({"starting_after": 3}, None),
        ({"include": "x"}, "include[0]"),
        ({"include_obfuscation": "true"}, "include_obfuscation"),
    ):
        assert (await refusal(gateway, 400, "GET", f"/{name}", **query))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, None),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, None),
        ({"top_logprobs": 3}, None),
        ({"unknown": 1}, "unknown"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], param: str | None
) -> None:
    gateway = saying(tmp_path, "hello")
    error = await refusal(gateway, **fields)
    assert error["param"] is None if param is None else error["param"].startswith(param)
    assert not gateway.engine.generations


async def test_a_failure_before_the_beginning_has_its_status_and_one_after_it_is_an_event(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, failing(ErrorCode.OVERLOADED))
    assert (await refusal(gateway, 503))["code"] == "overloaded"
    gateway.engine.script = breaking(*gateway.ids("hello"))
    events = await stream(gateway)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert (await get(gateway, events[-1]["response"]["id"]))["status"] == "failed"


async def test_a_client_that_leaves_ends_its_response(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    never = asyncio.Event()
    gateway.engine.script = lambda record: [never]
    asking = asyncio.create_task(gateway.client.post(PATH, json={"model": MODEL, "input": "hello"}))
    await gateway.engine.submitted.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await gateway.engine.generations[0].closed.wait()
