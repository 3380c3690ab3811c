"""Anthropic's official client on the real stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from tests.e2e.stack import Stack, running_stack

pytestmark = pytest.mark.e2e
MODEL = "demo"
SUM: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
TOOL: Any = {"name": "add", "description": "sums", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), "--served-model-name", MODEL) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=240) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_it_answers_a_sum_whole_and_as_a_stream_alike(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**SUM, **GREEDY)
    assert "5" in text_of(whole)
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**SUM, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_prefill_is_the_other_apis_continued_message(stack: Stack, client: anthropic.Anthropic) -> None:
    begun: Any = [*SUM["messages"], {"role": "assistant", "content": "2 + 3"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    other = stack.client().chat.completions.create(**SUM | {"messages": begun}, temperature=0, extra_body=options)
    answer = client.messages.create(**SUM | {"messages": begun}, **GREEDY)
    assert text_of(answer) == other.choices[0].message.content
    assert answer.usage.output_tokens == other.usage.completion_tokens


def test_the_count_is_what_the_message_takes_with_tools_and_a_system(client: anthropic.Anthropic) -> None:
    more: Any = {"system": "be brief", "tools": [TOOL]}
    counted = client.messages.count_tokens(model=MODEL, messages=SUM["messages"], **more)
    usage = client.messages.create(**SUM, **more).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens


def test_a_stop_sequence_and_a_length(client: anthropic.Anthropic) -> None:
    whole = text_of(client.messages.create(**SUM, **GREEDY))
    stopped = client.messages.create(**SUM, stop_sequences=[whole[1:3]], **GREEDY)
    assert (text_of(stopped), stopped.stop_reason, stopped.stop_sequence) == (whole[:1], "stop_sequence", whole[1:3])
    short = client.messages.create(**SUM | {"max_tokens": 1}, **GREEDY)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 1)


def test_the_prefix_is_cached_without_being_asked(client: anthropic.Anthropic) -> None:
    ask = SUM | {"messages": [{"role": "user", "content": "Hello! " * 60}], "max_tokens": 2}
    client.messages.create(**ask)
    usage = client.messages.create(**ask).usage
    assert (usage.cache_read_input_tokens or 0) > usage.input_tokens
    start, *_ = client.messages.create(**ask, stream=True)
    assert start.type == "message_start"
    assert start.message.usage.cache_read_input_tokens == usage.cache_read_input_tokens


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**SUM | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="tool_choice") as caught:
        client.messages.create(**SUM, tools=[TOOL], tool_choice={"type": "tool", "name": "sub"})
    assert caught.value.request_id


def test_a_client_that_leaves_frees_its_blocks(stack: Stack, client: anthropic.Anthropic) -> None:
    with client.messages.stream(**SUM | {"max_tokens": 1500}, extra_body={"temperature": 1}) as stream:
        next(iter(stream.text_stream))
    stack.wait_until(lambda: stack.stats().blocks_used == 0)
