"""The times of one streamed answer, as an OpenAI client sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pagoda.tools.http_stream import HttpAnswer


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Event(msgspec.Struct):
    """The parts of a streamed chunk that a client of either endpoint needs."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None

    @property
    def text(self) -> str:
        return "".join(c.text or (c.delta.content if c.delta else None) or "" for c in self.choices)


decode_event = msgspec.json.Decoder(Event).decode


@dataclass
class Timing:
    """The outcome of one request. Times are in seconds of `time.perf_counter`."""

    started: float = 0.0
    first: float | None = None  # first event with text, or with a choice if none ever has text
    last: float | None = None
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    complete: bool = False
    error: str | None = None
    _silent: list[float] = field(default_factory=list)

    def on_event(self, now: float, data: bytes) -> None:
        if data == b"[DONE]":
            self.complete = True
            return
        try:
            event = decode_event(data)
        except msgspec.DecodeError as error:
            self.error = f"event is not a chunk: {error}"
            return
        if event.error is not None:
            self.error = f"error event: {msgspec.json.encode(event.error).decode():.200}"
        if event.usage is not None:
            self.prompt_tokens, self.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        for choice in event.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
        if event.text:
            self._tick(now)
        elif event.choices:
            self._silent.append(now)

    def _tick(self, now: float) -> None:
        if self.last is not None:
            self.gaps.append(now - self.last)
        if self.first is None:
            self.first = now
        self.last = now

    def finish(self, answer: HttpAnswer) -> None:
        if answer.status != 200:
            self.error = f"http {answer.status}: {answer.body[:200].decode(errors='replace')}"
        elif self.error is None and not self.complete:
            self.error = "the stream ended without [DONE]"
        if self.first is None:
            for now in self._silent:
                self._tick(now)
        if self.output_tokens is None:
            self.output_tokens = len(self.gaps) + (self.first is not None)
