"""What a generating endpoint needs to know of its API; nothing else in the gateway distinguishes APIs."""

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
    """What every body has in common."""

    @property
    def stream(self) -> bool | None: ...


Body = TypeVar("Body", bound=Asked)


class Writer(Protocol):
    """Writes the answer of one run. Both methods read the run to its end."""

    async def whole(self) -> bytes:
        """One JSON object. Raises PagodaError."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one or more at a time. Raises PagodaError."""
        ...


@dataclass(frozen=True, kw_only=True)
class Dialect(Generic[Body]):
    """`job` makes a job of a body and its caller, or raises PagodaError naming the field.

    `writer`, given marks, gives events ids and leaves out what the reader already has. `error` is the error format at
    `path` and below it; `ping_event` is what a silent stream sends, if not a comment.
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
        """What a silent stream sends; `ids`: its events have ids."""
        return self.ping_event or (PING_BETWEEN_IDS if ids else PING)
