"""What the generating routes share: the head of every object and the two ways to answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
from fastapi import Request
from starlette.responses import Response

from pagoda_gateway.api.schemas import Sampling
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.generation.answer import Answer
from pagoda_gateway.http.sse import ClientGone, EventStream, event, until_disconnect
from pagoda_proto.records import RequestRecord

CLIENT_CLOSED_REQUEST = 499


class Conversation(Protocol):
    """An answer being made, in the shapes of one endpoint."""

    answer: Answer

    async def whole(self) -> Response: ...

    def events(self) -> AsyncGenerator[bytes, None]: ...


@dataclass(frozen=True)
class Head:
    """The fields that every object and chunk of one answer carries alike."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None

    @staticmethod
    def new(ctx: GatewayContext, prefix: str, record: RequestRecord) -> Head:
        fingerprint = ctx.engine.load.model_fingerprint or None
        return Head(prefix + record.request_id, int(time.time()), ctx.served_model_name, fingerprint)

    def fields(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }

    def usage_event(self, object_name: str, usage: dict[str, Any]) -> bytes:
        return event({**self.fields(object_name), "choices": [], "usage": usage})


class StreamUsage(NamedTuple):
    """Where a stream tells its usage. `in_chunks` says it in every chunk, and at the end too."""

    at_end: bool
    in_chunks: bool


def stream_usage(body: Sampling) -> StreamUsage:
    options = body.stream_options
    if options is None:
        return StreamUsage(False, False)
    return StreamUsage(options.include_usage, options.continuous_usage_stats)


def json_response(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def respond(
    ctx: GatewayContext, request: Request, open_answer: Callable[[], Awaitable[Conversation]], *, stream: bool
) -> Response:
    """Open the answer and give it whole or as a stream. A client that leaves ends its generations at once.

    Raises:
        PagodaError: the request is wrong, or failed before anything of it was sent.
    """
    if stream:
        return EventStream(_events(open_answer), ctx.config.ping_interval_s)
    try:
        async with until_disconnect(request.receive):
            return await _whole(open_answer)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _events(open_answer: Callable[[], Awaitable[Conversation]]) -> AsyncGenerator[bytes, None]:
    conversation = await open_answer()
    try:
        async for data in conversation.events():
            yield data
    finally:
        await conversation.answer.aclose()


async def _whole(open_answer: Callable[[], Awaitable[Conversation]]) -> Response:
    conversation = await open_answer()
    try:
        return await conversation.whole()
    finally:
        await conversation.answer.aclose()
