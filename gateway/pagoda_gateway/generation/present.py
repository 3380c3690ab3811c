"""An answer is shown whole or as a stream; either way a choice has news until it ends, and it ends once.

What chat and plain completions share. A `Shape` says what the objects of one endpoint look like.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.responses import Response

from pagoda_gateway.generation.answer import Answer, Update
from pagoda_gateway.generation.respond import Head, StreamUsage, json_response
from pagoda_gateway.http.sse import DONE, event
from pagoda_gateway.text.generation import TextDelta
from pagoda_proto.steps import TopLogprobs


class Shape(Protocol):
    """The objects of one endpoint, for one answer. `object_name` is that of whole answers."""

    object_name: str
    chunk_name: str

    def take(self, update: Update) -> None:
        """Keep what is new, for `fields`."""
        ...

    async def fields(self) -> dict[str, Any]:
        """What a whole answer has besides its head and usage."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """Choices of the chunks that a stream begins with."""
        ...

    async def chunks(self, update: Update) -> list[dict[str, Any]]:
        """Choices of the chunks that tell what is new; the last one has the ending, if the choice ended."""
        ...

    def usage(self) -> dict[str, Any]: ...


@dataclass
class Gathered:
    """What one choice has become so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TopLogprobs] = field(default_factory=list)

    def add(self, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()


class News:
    """Lets through what a choice has to say up to its ending. The engine core may send more: it learns of stop strings
    late."""

    def __init__(self) -> None:
        self._ended: set[int] = set()

    def of(self, updates: Iterable[Update]) -> Iterator[Update]:
        for update in updates:
            if update.index not in self._ended:
                if update.delta.finish_reason is not None:
                    self._ended.add(update.index)
                yield update


class Presented:
    """An answer in one endpoint's shape."""

    def __init__(self, answer: Answer, shape: Shape, head: Head, usage: StreamUsage) -> None:
        self.answer = answer
        self._shape = shape
        self._head = head
        self._usage = usage
        self._news = News()

    async def whole(self) -> Response:
        while updates := await self.answer.next():
            for update in self._news.of(updates):
                self._shape.take(update)
        content = self._head.fields(self._shape.object_name)
        content |= await self._shape.fields()
        content["usage"] = self._shape.usage()
        return json_response(content)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks of all choices that changed, as one piece of bytes per batch."""
        opening = b"".join(map(self._chunk, self._shape.opening()))
        while updates := await self.answer.next():
            data = b""
            for update in self._news.of(updates):
                data += b"".join(map(self._chunk, await self._shape.chunks(update)))
            if data:
                yield opening + data
                opening = b""
        name = self._shape.chunk_name
        closing = self._head.usage_event(name, self._shape.usage()) if self._usage.at_end else b""
        yield opening + closing + DONE

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        content = self._head.fields(self._shape.chunk_name)
        content["choices"] = [choice]
        if self._usage.in_chunks:
            content["usage"] = self._shape.usage()
        elif self._usage.at_end:
            content["usage"] = None
        return event(content)
