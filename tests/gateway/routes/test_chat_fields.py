"""Fields of POST /v1/chat/completions known from other servers: echo, request names, truncated prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gateway.routes.test_chat import ASK, chunks, post, refusal, saying

SAID = [*ASK["messages"], {"role": "assistant", "content": "well"}]
GOING_ON = {"messages": SAID, "add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        (GOING_ON | {"echo": True}, "well, yes"),
        (GOING_ON, ", yes"),
        ({"messages": [ASK["messages"][0], {"role": "assistant", "content": [{"type": "text", "text": "well"}]}],
          "echo": True}, "well, yes"),
        ({"echo": True}, ", yes"),
    ],
)  # fmt: skip
async def test_an_answer_may_begin_with_the_message_that_it_continues(
    tmp_path: Path, fields: dict[str, Any], content: str
) -> None:
    gateway = saying(tmp_path, ", yes", ", no")
    answer = await post(gateway, n=2, **fields)
    assert [choice["message"]["content"] for choice in answer["choices"]] == [content, content.replace("yes", "no")]
    texts = ["", ""]
    for event in (await chunks(gateway, n=2, **fields))[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [content, content.replace("yes", "no")]


async def test_a_client_may_name_its_request(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    assert (await post(gateway, request_id="order-7"))["id"] == "chatcmpl-order-7"
    first, name = gateway.engine.record.request_id.split(".")
    assert (len(first), name) == (32, "order-7")  # a random part keeps it distinct from others of the same name
    assert {event["id"] for event in (await chunks(gateway, request_id="a.b"))[:-1]} == {"chatcmpl-a.b"}


@pytest.mark.parametrize(("keep", "num"), [(5, 5), (-1, 246), (256, 256), (None, 0)])
async def test_a_conversation_may_be_cut_to_its_end(tmp_path: Path, keep: int | None, num: int) -> None:
    gateway = saying(tmp_path, "x")
    messages = [{"role": "user", "content": "ab" * 400}]
    fields = {"messages": messages, "truncate_prompt_tokens": keep}
    if num in (0, 256):
        assert (await refusal(gateway, max_tokens=10, **fields))["code"] == "context_length_exceeded"
        return
    await post(gateway, max_tokens=10, **fields)
    assert gateway.engine.record.prompt_token_ids == gateway.text.encode_chat(messages)[-num:]


@pytest.mark.parametrize("keep", [0, -2, 257, 2**64])
async def test_a_prompt_is_cut_to_something_that_fits(tmp_path: Path, keep: int) -> None:
    error = await refusal(saying(tmp_path, "x"), truncate_prompt_tokens=keep)
    assert (error["code"], error["param"]) == ("invalid_argument", "truncate_prompt_tokens")


@pytest.mark.parametrize("name", ["a b", "x" * 65, "x\n", ""])
async def test_a_name_is_plain(tmp_path: Path, name: str) -> None:
    assert (await refusal(saying(tmp_path, "x"), request_id=name))["param"] == "request_id"


async def test_no_log_probabilities_of_no_others_are_no_contradiction(tmp_path: Path) -> None:
    answer = await post(saying(tmp_path, "x"), logprobs=False, top_logprobs=0)
    assert answer["choices"][0]["logprobs"] is None
