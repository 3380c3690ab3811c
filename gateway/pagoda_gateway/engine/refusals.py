"""Where there is no room for one request there is none for the next one like it: that is said without asking again.

What an engine core says of all that are alike is repeated for `REPEATED_S` after it came, and no longer; then somebody
is asked about again. So what it would have taken meanwhile is refused for so long at most, and what it refuses is asked
about as often as it can answer.
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
    """What new requests have in common of which none is taken when one is not, whatever they ask."""

    tenant: str
    priority: int
    queue_timeout_s: float

    @classmethod
    def under(cls, policy: str, tenant: str, priority: int, queue_timeout_s: float) -> Kind:
        """By what the engine core's policy looks at."""
        looked_at = policy == "priority" or priority >= BACKGROUND_PRIORITY
        return cls(tenant if policy == "fair" else "", priority if looked_at else 0, queue_timeout_s)

    @classmethod
    def of(cls, policy: str, record: RequestRecord) -> Kind:
        return cls.under(policy, record.tenant, record.priority, record.queue_timeout_s)


class Refusals:
    """The last ones. `count` hears of each that is repeated."""

    def __init__(self, count: Callable[[ErrorCode], object], now: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._now = now
        self._last: OrderedDict[Kind, tuple[PagodaError, float]] = OrderedDict()  # with when it came, oldest first

    def came(self, kind: Kind, error: PagodaError) -> None:
        """One was refused, and with it all of its kind. `error` is not kept: once raised, it holds its request."""
        self._forget()
        told = PagodaError(error.code, error.message, error.param, retry_after_s=error.retry_after_s)
        self._last[kind] = told, self._now()
        self._last.move_to_end(kind)
        if len(self._last) > MAX_KINDS:
            self._last.popitem(last=False)

    def repeated(self, kind: Kind) -> PagodaError | None:
        """What to tell a new one of this kind; None where it is to be asked about."""
        if not self._last:
            return None
        self._forget()
        error, _ = self._last.get(kind, (None, 0.0))
        if error is not None:
            self._count(error.code)
        return error

    def _forget(self) -> None:
        """What is too old to be repeated."""
        while self._last and self._now() - next(iter(self._last.values()))[1] >= REPEATED_S:
            self._last.popitem(last=False)
