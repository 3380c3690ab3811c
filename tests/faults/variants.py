"""One request of every kind, and everything that a client sees of its answer.

Plain text, several choices, log-probabilities, penalties, a stop string, a schema, tool calls, a beam search, an
adapter; greedy and sampled, streamed and not.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import openai
from tests.e2e.stack import NO_TLS
from tests.e2e.streams import Request, Seen, formed, plain
from tests.faults.streams import Flow, Report

from pagoda.client.transport import AsyncResumingTransport

Answer = tuple[list[Seen], dict[str, int]]
ADAPTER = "adapted"  # a model name for the LoRA adapter
USAGE = {"prompt_tokens", "completion_tokens", "total_tokens"}
TALK: Request = {
    "model": "demo", "messages": [{"role": "user", "content": "Count."}], "stream": True, "max_tokens": 380,
    "temperature": 1.0, "seed": 5, "extra_body": {"ignore_eos": True},
}  # fmt: skip


SEARCH: Request = {
    "model": "demo", "prompt": [40, 50, 60], "stream": False, "n": 3, "max_tokens": 60, "temperature": 0.0,
    "extra_body": {"use_beam_search": True, "ignore_eos": True},
}  # fmt: skip


def whole(request: Request) -> Request:
    """The same request without streaming."""
    return request | {"stream": False}


def variants() -> list[Request]:
    """Greedy; sampled with two choices; a schema and a tool call; a chat; with an adapter; a beam search."""
    streams = [plain(1), plain(4), formed(4), formed(5), TALK, plain(2) | {"model": ADAPTER}]
    return [*streams, *(whole(request) for request in (plain(3), plain(8), formed(12))), SEARCH]


def with_stop(text: str) -> Request:
    """A chat whose undisturbed text is `text`, with a stop string from the second half of it."""
    places = (i for i in range(len(text) // 2, len(text) - 4) if text.find(text[i : i + 4]) == i)
    at = next(places)
    return TALK | {"stop": [text[at : at + 4], "never said"]}


async def answer(client: openai.AsyncOpenAI, request: Request, flowing: Callable[[], None] = lambda: None) -> Answer:
    """Run a request; return every choice and the usage. `flowing` is called for every event."""
    api: Any = client.chat.completions if "messages" in request else client.completions
    if not request["stream"]:
        told = await api.create(**request)
        return [_of_whole(choice) for choice in told.choices], told.usage.model_dump(include=USAGE)
    choices: dict[int, Seen] = {}
    usage: dict[str, int] = {}
    async for chunk in await api.create(**request, stream_options={"include_usage": True}):
        flowing()
        for choice in chunk.choices:
            choices.setdefault(choice.index, Seen()).add(choice)
        if chunk.usage is not None:
            usage = chunk.usage.model_dump(include=USAGE)
    return [choices[index] for index in sorted(choices)], usage


def _of_whole(choice: Any) -> Seen:
    message = getattr(choice, "message", None)
    seen = Seen(text=(message.content or "") if message else choice.text, finish=choice.finish_reason)
    if message is not None and message.tool_calls:
        seen.calls = {i: (call.function.name, call.function.arguments) for i, call in enumerate(message.tool_calls)}
    if message is None and choice.logprobs is not None:
        seen.tokens = list(zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True))
    elif choice.logprobs is not None:
        seen.tokens = [(one.token, one.logprob) for one in choice.logprobs.content or ()]
    return seen


def misses(got: Answer, expected: Answer) -> Counter[str]:
    """Count tokens (characters, if the answer has no tokens) that are lost, duplicated (surplus) or different."""
    found: Counter[str] = Counter()
    for seen, due in zip(got[0], expected[0], strict=False):
        new, old = (seen.tokens, due.tokens) if due.tokens else (seen.text, due.text)
        found["lost"] += max(0, len(old) - len(new))
        found["duplicated"] += max(0, len(new) - len(old))
        found["different"] += sum(one != other for one, other in zip(new, old, strict=False))
    if got != expected and not found.total():
        found["different"] += 1  # differs in something other than its tokens
    return found


class Client(httpx.AsyncClient):
    """A client over the resuming transport. `counted` counts resumed streams and notes a refused resumption."""

    def __init__(self, urls: Sequence[str], timeout_s: float = 240.0) -> None:
        self.counted = Counted()
        super().__init__(transport=AsyncResumingTransport(urls, self.counted), timeout=timeout_s)

    def openai(self, url: str, max_retries: int = 0) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=max_retries, http_client=self, timeout=self.timeout
        )


class Counted(httpx.AsyncHTTPTransport):
    def __init__(self) -> None:
        super().__init__(limits=httpx.Limits(max_connections=None), verify=NO_TLS)
        self.num_resumed = 0
        self.refused = asyncio.Event()  # a resumption got 503

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.num_resumed += "Last-Event-ID" in request.headers
        response = await super().handle_async_request(request)
        if "Last-Event-ID" in request.headers and response.status_code == 503:
            self.refused.set()
        return response


def shorter(request: Request, max_tokens: int) -> Request:
    """The request with fewer tokens; unchanged if it ends by its schema rather than its length."""
    goes_on = request.get("extra_body", {}).get("ignore_eos")
    return request | {"max_tokens": min(request["max_tokens"], max_tokens)} if goes_on else request


async def undisturbed(urls: Sequence[str], max_tokens: int = 400) -> list[tuple[Request, Answer]]:
    """The requests and their answers on an undisturbed stack."""
    async with Client(urls) as http:
        client = http.openai(urls[0])
        talk, _ = await answer(client, shorter(TALK, max_tokens))
        requests = [shorter(request, max_tokens) for request in (*variants(), with_stop(talk[0].text))]
        answers = await asyncio.gather(*(answer(client, request) for request in requests))
        return list(zip(requests, answers, strict=True))


async def disturbed(
    urls: Sequence[str],
    oracle: Sequence[tuple[Request, Answer]],
    disturb: Callable[[Flow], Awaitable[None]],
    report: Report,
    *,
    again: bool = False,
    rests: bool = False,
    timeout_s: float = 240.0,
    max_retries: int = 0,
) -> int:
    """Run all requests at once while `disturb` runs; with `again`, repeat them until it is done. They go to the first
    gateway; with `rests`, clients alternate between gateways and pause for as long as each answer took. Returns the
    number of resumed streams."""
    flow, over = Flow(), not again

    async def ask(client: openai.AsyncOpenAI, number: int) -> None:
        request, expected = oracle[number]
        while True:
            began = time.monotonic()
            try:
                got = await answer(client, request, flow)
            except Exception as error:  # noqa: BLE001 - whatever a client is told, it broke
                report.add("broken", f"request {number} is broken: {error!r:.300}")
            else:
                told = "" if got == expected else f"request {number} is different: {got!r:.300} not {expected!r:.300}"
                report.add("different" if told else "identical", told)
                report.misses += misses(got, expected)
            if over:
                return
            await asyncio.sleep(time.monotonic() - began if rests else 0.0)

    async with Client(urls, timeout_s) as http:
        clients = [http.openai(url, max_retries) for url in urls] if rests else [http.openai(urls[0], max_retries)]
        asking = asyncio.gather(*(ask(clients[number % len(clients)], number) for number in range(len(oracle))))
        asking.add_done_callback(lambda _: flow.end())
        try:
            await disturb(flow)
        finally:
            over = True
            await asking
    return http.counted.num_resumed
