"""Compare what a client received of a stream with the same request on an undisturbed stack.

Requests carry seeds, so the undisturbed run is the oracle: text, token ids, log-probabilities, finish reasons and usage
must be bit-equal, whatever happened underneath. A stream may also be refused before it begins, with a Retry-After;
anything else is a failure.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.e2e.stack import NO_TLS

STREAM_TIMEOUT_S = 300.0  # without any data; pings count as data
READING_S = 1.5  # a client reads an answer for this long before its next request
MAX_TRIES = 100
NO_ENDING = "closed without an ending"
UNLIMITED = httpx.Limits(max_connections=None)

Request = dict[str, Any]


def make_requests(
    seed: int, count: int, *, max_tokens: int = 200, choices: Sequence[int] = (1, 1, 1, 2)
) -> list[Request]:
    """Random requests: about half greedy, half sampled; some with penalties, some with several choices."""
    rng = random.Random(seed)
    return [
        {
            "model": "demo",
            "prompt": [rng.randrange(30, 120) for _ in range(rng.randrange(5, 120))],
            "max_tokens": rng.randrange(max_tokens // 2, max_tokens + 1),
            "n": rng.choice(choices),
            "logprobs": 1,
            "seed": rng.randrange(2**32),
            "temperature": rng.choice((0.0, 0.9)),
            "frequency_penalty": rng.choice((0.0, 0.0, 0.3)),
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(count)
    ]


@dataclass
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Outcome:
    """What a client received of one stream. It ended properly with `status` 200 and no `error` or `problems`."""

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    error: str = ""
    retry_after: str | None = None
    problems: list[str] = field(default_factory=list)

    def add(self, event: dict[str, Any]) -> None:
        if event.get("error"):
            self.error = str(event["error"]["code"])
            return
        for entry in event["choices"]:
            choice = self.choices.setdefault(entry["index"], Choice())
            if choice.finish_reason is not None:
                self.problems.append(f"choice {entry['index']} goes on after its end")
            choice.text += entry["text"]
            choice.token_ids += entry.get("token_ids") or []
            choice.logprobs += (entry.get("logprobs") or {}).get("token_logprobs", [])
            choice.finish_reason = entry["finish_reason"]
        if event.get("usage"):
            if self.usage is not None:
                self.problems.append("usage is told twice")
            self.usage = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])

    def close(self, done: bool, num_choices: int) -> None:
        """Check the stream when its connection has ended; `done`: after `[DONE]`."""
        ended = sum(choice.finish_reason is not None for choice in self.choices.values())
        if done and self.error:
            self.problems.append("[DONE] follows an error")
        elif done and (ended != num_choices or self.usage is None):
            self.problems.append(f"[DONE] after {ended} of {num_choices} endings, usage {self.usage}")
        elif not done and not self.error:
            self.error = NO_ENDING
        if done and self.usage and self.usage[1] != sum(len(choice.token_ids) for choice in self.choices.values()):
            self.problems.append(f"usage {self.usage} is not the number of tokens")

    def kind(self, undisturbed: Outcome) -> str:
        if self.problems:
            return "wrong"
        if self.status == 503 and self.retry_after is not None:
            return "refused"
        if self.status != 200 or self.error:
            return "broken"
        return "identical" if (self.choices, self.usage) == (undisturbed.choices, undisturbed.usage) else "different"

    def describe(self) -> str:
        return f"status {self.status} {self.error} {'; '.join(self.problems)}".strip()


Seen = tuple[int, Outcome]  # the request's index and its outcome


@dataclass
class Report:
    """Counts of a scenario. `problems` has one line per failure; `misses` counts tokens lost, duplicated or
    different."""

    name: str
    kinds: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    note: str = ""

    def add(self, kind: str, problem: str = "") -> None:
        """Count a stream, and note its problem if it has one."""
        self.kinds[kind] += 1
        self.problems += [problem] if problem else []

    def judge(self, seen: Sequence[Seen], undisturbed: Sequence[Outcome], may_fail: bool = False) -> None:
        """Count the outcomes. With `may_fail` a stream may also end in an error event."""
        for index, outcome in seen:
            kind = outcome.kind(undisturbed[index])
            self.kinds[kind] += 1
            told = may_fail and kind == "broken" and outcome.error != NO_ENDING
            if kind not in ("identical", "refused") and not told:
                self.problems.append(f"stream {index} is {kind}: {outcome.describe()}")

    def line(self) -> str:
        names = ("identical", "different", "broken", "wrong", "refused")
        counts = ", ".join(f"{self.kinds[name]} {name}" for name in names)
        return f"{self.name:36} {self.kinds.total():5} streams: {counts}{'; ' + self.note if self.note else ''}"


async def stream(client: httpx.AsyncClient, request: Request, flowing: Callable[[], None] = lambda: None) -> Outcome:
    """Run one request to its end. `flowing` is called for every chunk."""
    outcome = Outcome()
    done = False
    try:
        async with client.stream("POST", "/v1/completions", json=request) as response:
            outcome.status = response.status_code
            if response.status_code != 200:
                await response.aread()
                outcome.error = str(response.json()["error"]["code"])
                outcome.retry_after = response.headers.get("retry-after")
                return outcome
            async for line in response.aiter_lines():
                if done and line:
                    outcome.problems.append("something follows [DONE]")
                elif line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    outcome.add(json.loads(line.removeprefix("data: ")))
                    flowing()
    except httpx.HTTPError as error:
        outcome.problems.append(f"the connection broke: {type(error).__name__}")
    outcome.close(done, request["n"])
    return outcome


class Flow:
    """Counts the chunks that all streams have received; a disturbance can wait for more."""

    def __init__(self) -> None:
        self.chunks = 0
        self.longest_wait_s = 0.0  # longest gap between two chunks of any streams
        self.ended = False
        self._last = math.inf
        self._changed = asyncio.Event()

    def __call__(self) -> None:
        now = time.monotonic()
        self.longest_wait_s, self._last = max(self.longest_wait_s, now - self._last), now
        self.chunks += 1
        self._changed.set()

    def end(self) -> None:
        self.ended = True
        self._changed.set()

    async def more(self, chunks: int) -> bool:
        """Wait for this many more chunks; False if the streams ended first."""
        goal = self.chunks + chunks
        while self.chunks < goal and not self.ended:
            self._changed.clear()
            await self._changed.wait()
        return not self.ended


Disturbance = Callable[[Flow], Awaitable[None]]


async def run_streams(
    url: str,
    requests: Sequence[Request],
    *,
    clients: int = 8,
    disturb: Disturbance | None = None,
    again: bool = False,
) -> list[Seen]:
    """Run the requests in order, `clients` at a time; return the outcome of each try with the request's index.

    `disturb` runs concurrently and can follow the progress. With `again` the requests repeat until it is done, and each
    client pauses after an answer as if to read it; otherwise each request runs once.
    """
    flow, seen = Flow(), list[Seen]()
    waiting = itertools.cycle(enumerate(requests)) if again else iter(enumerate(requests))
    working = True

    async def one_client(client: httpx.AsyncClient) -> None:
        while working and (entry := next(waiting, None)) is not None:
            for _ in range(MAX_TRIES):  # like real clients, retry after a Retry-After
                seen.append((entry[0], await stream(client, entry[1], flow)))
                if (retry_after := seen[-1][1].retry_after) is None:
                    break
                await asyncio.sleep(float(retry_after))
            if again:
                await asyncio.sleep(READING_S)

    async with httpx.AsyncClient(base_url=url, timeout=STREAM_TIMEOUT_S, limits=UNLIMITED, verify=NO_TLS) as client:
        running = [asyncio.create_task(one_client(client)) for _ in range(clients)]
        everything = asyncio.gather(*running)
        everything.add_done_callback(lambda _: flow.end())
        try:
            if disturb is not None:
                await disturb(flow)
        finally:
            working = not again
            await everything
    return seen


_undisturbed: dict[tuple[str, str], Outcome] = {}  # by URL and request


def undisturbed(url: str, requests: Sequence[Request]) -> list[Outcome]:
    """The oracle: the outcome of each request on an undisturbed stack, computed once per stack.

    Raises:
        RuntimeError: a request failed although nothing disturbed it.
    """
    known = [(url, json.dumps(request)) for request in requests]
    new = [index for index, one in enumerate(known) if one not in _undisturbed]
    seen = asyncio.run(run_streams(url, [requests[index] for index in new], clients=4))
    outcomes = dict(seen)  # the last try, if a request was refused at first
    bad = [outcome.describe() for outcome in outcomes.values() if outcome.kind(outcome) != "identical"]
    if bad:
        raise RuntimeError(f"{len(bad)} undisturbed streams did not end well, the first: {bad[0]}")
    _undisturbed.update({known[new[index]]: outcome for index, outcome in outcomes.items()})
    return [_undisturbed[one] for one in known]
