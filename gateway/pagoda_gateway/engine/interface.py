"""The engine core's interface to the routes, implemented by the gRPC session, the in-process engine and test fakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagoda_gateway.engine.recent import RecentRequests
from pagoda_gateway.engine.refusals import Refusals
from pagoda_gateway.engine.report import EngineReport
from pagoda_proto.records import Delta, Load, RequestRecord


class Generation(Protocol):
    """One submitted request. Its reader owns it, and must call `aclose` in the end."""

    async def next(self) -> list[Delta]:
        """Return one or more new deltas, in order per choice, merged while nobody read; [] after the request's ending.

        Cancelling a pending call loses nothing. A request that fails ends with a delta whose `finish_reason` is ERROR.
        """

    async def abort(self, choices: Sequence[int] = ()) -> None:
        """Stop some choices (all of them if none is named). The request's ending still arrives through `next`."""

    async def aclose(self) -> None:
        """Abort whatever still runs and forget the request. Safe to call twice and after the ending."""


class Submitting(Protocol):
    """Takes requests."""

    async def submit(self, record: RequestRecord, *, counted: bool = True, prior: Sequence[Delta] = ()) -> Generation:
        """Start a request. One that is not `counted` is not a user's, and appears in no metric or log of users'
        requests. `prior` is its output so far, from another gateway; it continues after that.

        Raises:
            PagodaError: it was not admitted (OVERLOADED, UNAVAILABLE, INVALID_ARGUMENT, ..). The exception may carry
                an attribute `retry_after_s`.
        """


class EngineClient(Submitting, Protocol):
    @property
    def load(self) -> Load:
        """The engine core's latest report; its limits are 0 until a worker has registered."""

    @property
    def recent(self) -> RecentRequests:
        """Users' requests that have ended at this gateway."""
        ...

    @property
    def refusals(self) -> Refusals:
        """Recent refusals of users' requests."""
        ...

    async def report(self) -> EngineReport | None:
        """Its workers and counters; None if it does not answer."""
        ...
