"""Requests whose answers depend only on the request, and everything that a client sees of an answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import openai
from tests.e2e.stack import Stack

MODEL = "demo"
PLAIN_TOKENS = 390
FORMED_TOKENS = 320
FLOWING = 10  # tokens after which a stream is under way
LETTERS = "abcdefghij"

Request = dict[str, Any]


def plain(index: int) -> Request:
    """Half of the requests greedy, half sampled; some with penalties, some with two choices."""
    rng = random.Random(index)
    request: Request = {
        "model": MODEL,
        "prompt": [rng.randrange(30, 120) for _ in range(rng.randrange(5, 120))],
        "max_tokens": PLAIN_TOKENS,
        "logprobs": 2,
        "stream": True,
        "seed": index,
        "temperature": 0.0 if index % 2 else 0.9,
        "extra_body": {"ignore_eos": True},
    }
    if index % 4 == 0:
        request |= {"top_p": 0.95, "frequency_penalty": 0.3, "n": 2}
    return request


def listed(count: int) -> dict[str, Any]:
    """A schema for an array of `count` or `count + 1` objects."""
    return {
        "type": "array", "minItems": count, "maxItems": count + 1,
        "items": {
            "type": "object", "additionalProperties": False, "required": ["id", "tag"],
            "properties": {
                "id": {"type": "integer", "minimum": 0, "maximum": 999}, "tag": {"type": "string", "maxLength": 9},
            },
        },
    }  # fmt: skip


def _tools(*, required: bool) -> Callable[[int], dict[str, Any]]:
    """Fields that force a tool call: of any tool if `required`, otherwise of a named one."""

    def fields(size: int) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"l": listed(size - 3)}, "required": ["l"]}
        tools = [
            {"type": "function", "function": {"name": name, "parameters": parameters | {"additionalProperties": False}}}
            for name in ("put", "get")
        ]
        named = {"type": "function", "function": {"name": "get"}}
        return {"tools": tools, "tool_choice": "required" if required else named, "parallel_tool_calls": size % 2 == 1}

    return fields


def _response_format(size: int) -> dict[str, Any]:
    form = {"name": "x", "schema": listed(size), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def _guided(name: str, form: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    return lambda size: {"extra_body": {name: form(size)}}


def _words(size: int) -> list[str]:
    """Long texts, any two of which begin alike."""
    return [" ".join(LETTERS[: 1 + (i + k) % 10] for k in range(4 * size)) for i in range(8)]


# Whether the request is a chat, and the fields that give its answer a form of a given size.
FORMS: list[tuple[bool, Callable[[int], dict[str, Any]]]] = [
    (False, _guided("guided_json", listed)),
    (False, _guided("structured_outputs", lambda size: {"regex": f"([a-z]{{3}} [0-9]{{2}},){{{5 * size}}}"})),
    (False, _guided("guided_choice", _words)),
    (False, _guided("guided_grammar", lambda size: f'start: ("(" /[a-z]{{2}}/ ")"){{{6 * size}}}')),
    (True, _response_format),
    (True, _tools(required=True)),
    (True, _tools(required=False)),
    (True, _guided("guided_regex", lambda size: f"([A-Z][a-z]{{2,6}}[ .]){{{5 * size}}}")),
]


def formed(index: int) -> Request:
    """Every form in turn; half of each greedy, half sampled, some with two choices."""
    turn, kind = divmod(index, len(FORMS))
    is_chat, form = FORMS[kind]
    request: Request = {
        "model": MODEL, "max_tokens": FORMED_TOKENS, "stream": True, "seed": index,
        "temperature": 0.0 if (turn + kind) % 2 else 1.3, "n": 1 + ((turn + kind) % 3 == 0),
    }  # fmt: skip
    if is_chat:
        request |= {"messages": [{"role": "user", "content": f"List {index}."}], "logprobs": True, "top_logprobs": 2}
    else:
        request |= {"prompt": [30 + index, 40, 50], "logprobs": 2}
    return request | form(6 + turn % 3)


@dataclass
class Seen:
    """What a client saw of one choice. `calls` are names and arguments, `tokens` texts and log-probabilities."""

    text: str = ""
    calls: dict[int, tuple[str, str]] = field(default_factory=dict)
    tokens: list[Any] = field(default_factory=list)
    finish: str | None = None

    def add(self, choice: Any) -> None:
        """Add a choice from an event of either API."""
        self.finish = choice.finish_reason or self.finish
        if (delta := getattr(choice, "delta", None)) is None:
            self.text += choice.text
            if (told := choice.logprobs) is not None:
                self.tokens += zip(told.tokens, told.token_logprobs, strict=True)
            return
        self.text += delta.content or ""
        for part in delta.tool_calls or ():
            name, arguments = self.calls.get(part.index, ("", ""))
            self.calls[part.index] = name + (part.function.name or ""), arguments + (part.function.arguments or "")
        if choice.logprobs is not None:
            self.tokens += [(one.token, one.logprob) for one in choice.logprobs.content or ()]


async def collect(client: openai.AsyncOpenAI, request: Request, started: asyncio.Semaphore) -> list[Seen]:
    """Run a request; return what was seen of each choice. `started` is released once the stream is under way."""
    choices: dict[int, Seen] = {}
    announced = False
    api = client.chat.completions if "messages" in request else client.completions
    async for chunk in await api.create(**request):
        for choice in chunk.choices:
            seen = choices.setdefault(choice.index, Seen())
            seen.add(choice)
            if not announced and len(seen.tokens) > FLOWING:
                started.release()
                announced = True
    return [choices[index] for index in sorted(choices)]


async def run_all(stack: Stack, requests: list[Request], when_flowing: Any = None) -> list[list[Seen]]:
    """Run all requests at once; `when_flowing` is called in a thread when the first stream is under way."""
    started = asyncio.Semaphore(0)
    async with stack.async_client() as client:
        streams = [asyncio.create_task(collect(client, request, started)) for request in requests]
        if when_flowing is not None:
            await started.acquire()  # the others follow at once, and the engine core is ahead of clients
            await asyncio.to_thread(when_flowing)
        return await asyncio.gather(*streams)
