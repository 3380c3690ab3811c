"""Formed output over HTTP goes on with the same bytes when the worker under it is killed, and so does its grammar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from tests.e2e.stack import Stack, kill, running_stack
from tests.e2e.test_recovery import run_all

pytestmark = pytest.mark.e2e
MODEL = "demo"
SCHEMA = {
    "type": "array", "minItems": 6, "maxItems": 7,
    "items": {
        "type": "object", "additionalProperties": False, "required": ["id", "tag"],
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 999}, "tag": {"type": "string", "maxLength": 9},
        },
    },
}  # fmt: skip
FORMS: list[dict[str, Any]] = [
    {"guided_json": SCHEMA},
    {"structured_outputs": {"regex": "([a-z]{3} [0-9]{2},){30}"}},
    {"guided_grammar": 'start: ("(" /[a-z]{2}/ ")"){40}'},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("pair"), "--served-model-name", MODEL, workers=2) as running:
        yield running


def requests() -> list[dict[str, Any]]:
    return [
        {
            "model": MODEL, "prompt": [30 + i, 40, 50], "max_tokens": 390, "logprobs": 1, "stream": True, "seed": i,
            "temperature": 0.0 if i % 2 else 1.3, "n": 1 + i % 2, "extra_body": FORMS[i % len(FORMS)],
        }
        for i in range(8)
    ]  # fmt: skip


def test_a_worker_may_be_killed_under_it(stack: Stack) -> None:
    undisturbed = [asyncio.run(run_all(stack, [request]))[0] for request in requests()]
    for request, choices in zip(requests(), undisturbed, strict=True):
        for text, _, reason in choices:
            assert reason == "stop", text
            if not {"guided_json", "response_format"}.isdisjoint(request["extra_body"]):
                jsonschema.validate(json.loads(text), SCHEMA)
    deaths = stack.stats().worker_deaths

    def kill_a_busy_worker() -> None:
        kill(max(stack.ready_workers(), key=lambda worker: worker.num_rows).pid)

    disturbed = asyncio.run(run_all(stack, requests(), kill_a_busy_worker))
    assert disturbed == undisturbed
    assert stack.stats().worker_deaths == deaths + 1
    stack.wait_until(lambda: len(stack.ready_workers()) == 2)


def test_the_engine_core_may_be_killed_under_it(stack: Stack) -> None:
    """Its successor judges no grammar of what has begun."""
    undisturbed = asyncio.run(run_all(stack, requests()))
    victim = stack.children("engine-core")[0]
    assert asyncio.run(run_all(stack, requests(), lambda: kill(victim.pid))) == undisturbed
    assert not victim.is_running()
    stack.wait_until(lambda: len(stack.ready_workers()) == 2)


DATE = {
    "type": "object", "additionalProperties": False, "required": ["city", "days"],
    "properties": {
        "city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["c", "f"]},
    },
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "forecast", "parameters": DATE, "strict": True}},
    {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}},
]
CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "forecast"}}]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named"])
def test_a_model_that_would_not_call_calls_with_valid_arguments(stack: Stack, choice: Any) -> None:
    asked: Any = {
        "model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "tools": TOOLS, "tool_choice": choice,
        "parallel_tool_calls": False, "max_tokens": 200, "temperature": 1.2, "seed": 3,
    }  # fmt: skip
    client = stack.client()
    (whole,) = client.chat.completions.create(**asked).choices
    (call,) = whole.message.tool_calls or ()
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    assert choice == "required" or call.function.name == "forecast"
    jsonschema.validate(json.loads(call.function.arguments), DATE if call.function.name == "forecast" else {})
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert [(each.function.name, each.function.arguments) for each in streamed] == [
        (call.function.name, call.function.arguments)
    ]


def test_what_makes_no_grammar_is_passed_over_unless_it_is_strict(stack: Stack) -> None:
    schema = DATE | {"properties": DATE["properties"] | {"city": {"type": "string", "pattern": "(?=a)b"}}}  # type: ignore[operator]
    hello = [{"role": "user", "content": "Hello!"}]
    asked: Any = {"model": MODEL, "messages": hello, "tool_choice": "required", "temperature": 0, "max_tokens": 300}
    tool = {"name": "forecast", "parameters": schema}
    client = stack.client()
    answer = client.chat.completions.create(**asked, tools=[{"type": "function", "function": tool}])
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(json.loads(call.function.arguments), dict)
    with pytest.raises(openai.BadRequestError, match="this cannot be used"):
        client.chat.completions.create(**asked, tools=[{"type": "function", "function": tool | {"strict": True}}])
