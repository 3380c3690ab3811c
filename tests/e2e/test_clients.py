"""Official clients on the real stack: Anthropic's messages; OpenAI's responses, which are kept and continue across a
gateway's death; and its batches, of which a gateway that dies loses nothing."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from openai.types import Batch
from tests.e2e.stack import NO_TLS, Stack, kill, running_stack

pytestmark = pytest.mark.e2e
MODEL, URL = "demo", "/v1/chat/completions"
SUM: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
TOOL: Any = {"name": "add", "description": "sums", "input_schema": {"type": "object", "properties": {}}}
LONG: dict[str, Any] = {
    "model": MODEL,
    "input": "Tell me about towers",
    "temperature": 1.0,
    "max_output_tokens": 600,
    "background": True,
    "stream": True,
    "extra_body": {"seed": 11, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    place = tmp_path_factory.mktemp("stack")
    options = ["--served-model-name", MODEL, "--max-batch-requests", "4", "--store", f"sqlite://{place}/store.db"]
    with running_stack(place, *options) as running:
        yield running


@pytest.fixture
def claude(stack: Stack) -> Iterator[anthropic.Anthropic]:
    http = anthropic.DefaultHttpxClient(verify=NO_TLS)
    options: Any = {"api_key": "none", "max_retries": 0, "timeout": 240, "http_client": http}
    with anthropic.Anthropic(base_url=stack.url, **options) as client:
        yield client


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with stack.client(timeout=240) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_it_answers_a_sum_whole_and_as_a_stream_alike(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**SUM, **GREEDY)
    assert "5" in text_of(whole)
    assert whole.stop_reason == "end_turn"
    with claude.messages.stream(**SUM, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_prefill_is_the_other_apis_continued_message(stack: Stack, claude: anthropic.Anthropic) -> None:
    begun: Any = [*SUM["messages"], {"role": "assistant", "content": "2 + 3"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    other = stack.client().chat.completions.create(**SUM | {"messages": begun}, temperature=0, extra_body=options)
    answer = claude.messages.create(**SUM | {"messages": begun}, **GREEDY)
    assert text_of(answer) == other.choices[0].message.content
    assert answer.usage.output_tokens == other.usage.completion_tokens


def test_the_count_is_what_the_message_takes_with_tools_and_a_system(claude: anthropic.Anthropic) -> None:
    more: Any = {"system": "be brief", "tools": [TOOL]}
    counted = claude.messages.count_tokens(model=MODEL, messages=SUM["messages"], **more)
    usage = claude.messages.create(**SUM, **more).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens


def test_a_stop_sequence_and_a_length(claude: anthropic.Anthropic) -> None:
    whole = text_of(claude.messages.create(**SUM, **GREEDY))
    stopped = claude.messages.create(**SUM, stop_sequences=[whole[1:3]], **GREEDY)
    assert (text_of(stopped), stopped.stop_reason, stopped.stop_sequence) == (whole[:1], "stop_sequence", whole[1:3])
    short = claude.messages.create(**SUM | {"max_tokens": 1}, **GREEDY)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 1)


def test_the_prefix_is_cached_without_being_asked(claude: anthropic.Anthropic) -> None:
    ask = SUM | {"messages": [{"role": "user", "content": "Hello! " * 60}], "max_tokens": 2}
    claude.messages.create(**ask)
    usage = claude.messages.create(**ask).usage
    assert (usage.cache_read_input_tokens or 0) > usage.input_tokens
    start, *_ = claude.messages.create(**ask, stream=True)
    assert start.type == "message_start"
    assert start.message.usage.cache_read_input_tokens == usage.cache_read_input_tokens


def test_errors_are_the_clients_own(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**SUM | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="tool_choice") as caught:
        claude.messages.create(**SUM, tools=[TOOL], tool_choice={"type": "tool", "name": "sub"})
    assert caught.value.request_id


def test_a_reader_of_a_message_that_leaves_frees_its_blocks(stack: Stack, claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(**SUM | {"max_tokens": 1500}, extra_body={"temperature": 1}) as stream:
        next(iter(stream.text_stream))
    stack.wait_until(lambda: stack.stats().blocks_used == 0)


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
    with contextlib.suppress(openai.APIError):  # not every break raises
        for event in client.responses.create(**LONG):
            told.append(event)
            name = name or event.response.id
            last = event.sequence_number
            if len(told) == 5:
                kill(gateway.pid)
    assert told[-1].type != "response.incomplete", "the gateway was to be killed before"
    events = told + list(followed(client, name, last))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(map(delta_of, events)) == "".join(map(delta_of, undisturbed))
    assert events[-1].response.output_text == undisturbed[-1].response.output_text
    assert client.responses.retrieve(name).status == "incomplete"


def followed(client: openai.OpenAI, name: str, last: int) -> Iterator[Any]:
    """The remaining events, as soon as a gateway is up again."""
    deadline = time.monotonic() + 240
    while True:
        try:
            yield from client.responses.retrieve(name, stream=True, starting_after=last)
            return
        except openai.APIConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    whole = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": whole}


def submitted(client: openai.OpenAI, lines: list[dict[str, Any]]) -> Batch:
    content = "".join(json.dumps(each) + "\n" for each in lines).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    assert client.files.content(file.id).read() == content
    return client.batches.create(
        input_file_id=file.id, endpoint=URL, completion_window="24h", metadata={"number": str(len(lines))}
    )


def seen(client: openai.OpenAI, batch: Batch, *, until: str = "") -> Batch:
    """The batch once it has ended or has the status `until`, whatever happens to gateways meanwhile."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            batch = client.batches.retrieve(batch.id)
        except (openai.APIConnectionError, openai.InternalServerError):
            pass
        else:
            if batch.status in ("completed", "failed", "expired", "cancelled", until):
                return batch
        time.sleep(0.05)
    raise TimeoutError(batch)


def rows(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    content = client.files.content(file_id).text
    found = {row["custom_id"]: row for row in map(json.loads, content.splitlines())}
    assert len(found) == content.count("\n")
    return found


def test_a_file_of_requests_becomes_a_file_of_answers(client: openai.OpenAI) -> None:
    batch = submitted(client, [line("sum"), line("other", n=2), line("bad", top_k="none")])
    ended = seen(client, batch)
    assert (ended.status, ended.metadata, ended.model) == ("completed", {"number": "3"}, MODEL)
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    answers = rows(client, ended.output_file_id)
    live = client.chat.completions.create(**line("sum")["body"])
    told = answers["sum"]["response"]["body"]["choices"][0]["message"]["content"]
    assert told == live.choices[0].message.content
    assert len(answers["other"]["response"]["body"]["choices"]) == 2
    assert rows(client, ended.error_file_id)["bad"]["response"]["body"]["error"]["param"] == "top_k"
    assert batch.id in [each.id for each in client.batches.list(limit=5)]
    for file_id in (ended.output_file_id, ended.error_file_id):
        assert file_id is not None
        assert client.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file_id)


def test_a_gateway_that_dies_is_gone_on_from(stack: Stack, client: openai.OpenAI) -> None:
    names = [f"line {i}" for i in range(24)]
    lines = [line(name, max_tokens=160, ignore_eos=True, seed=i) for i, name in enumerate(names)]
    batch = submitted(client, lines)
    for _ in range(2):
        assert seen(client, batch, until="in_progress").status == "in_progress"
        kill(stack.children("gateway")[0].pid)
        stack.wait_until(stack.ready)
    ended = seen(client, batch)
    assert ended.status == "completed"
    answers = rows(client, ended.output_file_id)
    assert sorted(answers) == sorted(names)
    assert {row["response"]["body"]["usage"]["completion_tokens"] for row in answers.values()} == {160}


def test_a_batch_that_is_cancelled_keeps_what_is_done(client: openai.OpenAI) -> None:
    names = [f"line {i}" for i in range(400)]
    batch = submitted(client, [line(name, max_tokens=64, ignore_eos=True) for name in names])
    assert seen(client, batch, until="in_progress").status == "in_progress"
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = seen(client, batch)
    assert ended.status == "cancelled"
    done = {} if ended.output_file_id is None else rows(client, ended.output_file_id)
    left = rows(client, ended.error_file_id)
    assert sorted([*done, *left]) == sorted(names)
    assert {row["error"]["code"] for row in left.values()} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(batch.id)
