"""What an endpoint that generates has to know of its API; nothing else in the gateway knows one API from another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pydantic import BaseModel

from pagoda_gateway.api.encoding import PING, PING_BETWEEN_IDS
from pagoda_gateway.api.error_body import ErrorShape
from pagoda_gateway.clients import Caller
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.positions import Marks
from pagoda_gateway.generation.run import Run


class Asked(Protocol):
    """What every body has."""

    @property
    def stream(self) -> bool | None: ...


Body = TypeVar("Body", bound=Asked)


class Writer(Protocol):
    """Writes the answer of one run: reads it to its end, either way."""

    async def whole(self) -> bytes:
        """One JSON object. Raises PagodaError."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one or more at a time. Raises PagodaError."""
        ...


@dataclass(frozen=True, kw_only=True)
class Dialect(Generic[Body]):
    """`job` makes a job of a body and its caller, or raises PagodaError naming the field.

    `writer` gives events ids where it is given marks, and leaves out what their reader has.
    `error` is how failures are told at `path` and below it, `ping_event` what a silent stream sends, if not a comment.
    """

    name: str
    path: str
    summary: str
    body: type[Body]
    answer: type[BaseModel]
    job: Callable[[GatewayContext, Body, Caller], Awaitable[Job]]
    writer: Callable[[GatewayContext, Run, Marks | None], Writer]
    error: ErrorShape
    ping_event: bytes | None = None

    def ping(self, *, ids: bool) -> bytes:
        """What a silent stream sends whose events have `ids`, or none."""
        return self.ping_event or (PING_BETWEEN_IDS if ids else PING)
