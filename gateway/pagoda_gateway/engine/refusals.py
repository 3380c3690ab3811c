"""Under overload, requests like one that was just refused are refused without asking the engine core again.

A refusal that holds for all requests of a kind is repeated for `REPEATED_S` after it arrived; then the next request
goes to the engine core again. So a request that would have been accepted meanwhile is refused for that long at most,
and the engine core is asked only as often as it can answer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import BACKGROUND_PRIORITY
from pagoda_proto.records import RequestRecord

REPEATED_S = 0.1
MAX_KINDS = 4096


class Kind(NamedTuple):
    """What new requests have in common if the refusal of one, whatever it asks, means the refusal of all."""

    tenant: str
    priority: int
    queue_timeout_s: float

    @classmethod
    def under(cls, policy: str, tenant: str, priority: int, queue_timeout_s: float) -> Kind:
        """Keep only what the engine core's policy looks at."""
        looked_at = policy == "priority" or priority >= BACKGROUND_PRIORITY
        return cls(tenant if policy == "fair" else "", priority if looked_at else 0, queue_timeout_s)

    @classmethod
    def of(cls, policy: str, record: RequestRecord) -> Kind:
        return cls.under(policy, record.tenant, record.priority, record.queue_timeout_s)


class Refusals:
    """The last refusals. `count` is called for each one repeated."""

    def __init__(self, count: Callable[[ErrorCode], object], now: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._now = now
        self._last: OrderedDict[Kind, tuple[PagodaError, float]] = OrderedDict()  # with arrival times, oldest first

    def came(self, kind: Kind, error: PagodaError) -> None:
        """Record a refusal that holds for all of `kind`. It copies `error`, which holds its request once raised."""
        self._forget()
        told = PagodaError(error.code, error.message, error.param, retry_after_s=error.retry_after_s)
        self._last[kind] = told, self._now()
        self._last.move_to_end(kind)
        if len(self._last) > MAX_KINDS:
            self._last.popitem(last=False)

    def repeated(self, kind: Kind) -> PagodaError | None:
        """The error for a new request of this kind; None if the engine core is to be asked."""
        if not self._last:
            return None
        self._forget()
        error, _ = self._last.get(kind, (None, 0.0))
        if error is not None:
            self._count(error.code)
        return error

    def _forget(self) -> None:
        """Drop refusals too old to repeat."""
        while self._last and self._now() - next(iter(self._last.values()))[1] >= REPEATED_S:
            self._last.popitem(last=False)
