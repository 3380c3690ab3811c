"""Structured output over HTTP, with its grammar, continues with the same bytes when its worker is killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from tests.e2e.stack import Stack, kill, running_stack
from tests.e2e.streams import FORMS, MODEL, Request, Seen, formed, run_all

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("pair"), "--served-model-name", MODEL, workers=2) as running:
        yield running


def requests() -> list[Request]:
    return [formed(index) for index in range(len(FORMS))]


def check_form(request: Request, choice: Seen) -> None:
    if request.get("tools"):
        assert choice.calls
        for _, arguments in choice.calls.values():
            jsonschema.validate(json.loads(arguments), request["tools"][0]["function"]["parameters"])
    elif "guided_json" in request.get("extra_body", {}):
        jsonschema.validate(json.loads(choice.text), request["extra_body"]["guided_json"])
    elif "response_format" in request:
        jsonschema.validate(json.loads(choice.text), request["response_format"]["json_schema"]["schema"])


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[list[Seen]]:
    """The result of each request, run alone."""
    return [asyncio.run(run_all(stack, [request]))[0] for request in requests()]


def test_a_worker_may_be_killed_under_it(stack: Stack, undisturbed: list[list[Seen]]) -> None:
    for request, choices in zip(requests(), undisturbed, strict=True):
        for choice in choices:
            assert choice.finish in ("stop", "tool_calls"), choice.text
            check_form(request, choice)
    deaths = stack.stats().worker_deaths

    def kill_a_busy_worker() -> None:
        kill(max(stack.ready_workers(), key=lambda worker: worker.num_rows).pid)

    disturbed = asyncio.run(run_all(stack, requests(), kill_a_busy_worker))
    assert disturbed == undisturbed
    assert stack.stats().worker_deaths == deaths + 1
    stack.wait_until(lambda: len(stack.ready_workers()) == 2)


def test_the_engine_core_may_be_killed_under_it(stack: Stack, undisturbed: list[list[Seen]]) -> None:
    """Its successor does not check the grammars of begun requests again."""
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
WORD = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 16}}, "additionalProperties": False}
TOOLS: Any = [  # their arguments are bounded, whatever is sampled
    {"type": "function", "function": {"name": "forecast", "parameters": DATE, "strict": True}},
    {"type": "function", "function": {"name": "other", "parameters": WORD, "strict": True}},
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
    jsonschema.validate(json.loads(call.function.arguments), DATE if call.function.name == "forecast" else WORD)
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
    with pytest.raises(openai.BadRequestError, match="this grammar or schema cannot be used"):
        client.chat.completions.create(**asked, tools=[{"type": "function", "function": tool | {"strict": True}}])
