"""Responses on the real stack, with OpenAI's client: kept across a gateway's death, and gone on with after it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.e2e.stack import Stack, kill, running_stack

pytestmark = pytest.mark.e2e
MODEL = "demo"
LONG: dict[str, Any] = {
    "model": MODEL,
    "input": "Tell me about towers",
    "temperature": 1.0,
    "max_output_tokens": 400,
    "background": True,
    "stream": True,
    "extra_body": {"seed": 11, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), "--served-model-name", MODEL) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with stack.client() as client:
        yield client


def delta_of(event: Any) -> str:
    return str(event.delta) if event.type == "response.output_text.delta" else ""


def test_a_sum_and_what_follows(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="What is 2 + 3?", temperature=0)
    assert "5" in first.output_text
    with client.responses.stream(model=MODEL, input="What is 2 + 3?", temperature=0) as stream:
        assert stream.get_final_response().output_text == first.output_text
    second = client.responses.create(model=MODEL, input="Thanks", previous_response_id=first.id)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens


def test_one_in_the_background_outlives_the_gateway(stack: Stack, client: openai.OpenAI) -> None:
    undisturbed = list(client.responses.create(**LONG))
    (gateway,) = stack.children("gateway")
    name, last = "", -1
    told: list[Any] = []
    with pytest.raises((openai.APIError, AssertionError)):
        for event in client.responses.create(**LONG):
            told.append(event)
            name = name or event.response.id
            last = event.sequence_number
            if len(told) == 20:
                kill(gateway.pid)
        assert told[-1].type == "response.incomplete", "it broke off"
        raise AssertionError("the gateway was to be killed before")
    events = told + list(followed(client, name, last))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(map(delta_of, events)) == "".join(map(delta_of, undisturbed))
    assert events[-1].response.output_text == undisturbed[-1].response.output_text
    assert client.responses.retrieve(name).status == "incomplete"


def followed(client: openai.OpenAI, name: str, last: int) -> Iterator[Any]:
    """The rest, as soon as there is a gateway again."""
    deadline = time.monotonic() + 240
    while True:
        try:
            yield from client.responses.retrieve(name, stream=True, starting_after=last)
            return
        except openai.APIConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
