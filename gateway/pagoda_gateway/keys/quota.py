"""What is left of a key's limits in this gateway: a request counts when it arrives, its prompt when it is known, and
its output as it grows.

Output is read off a key's runs when the key is next examined, so a token costs nothing here. Nothing is reserved for
future output: a key that has used more than it had is refused until the bucket has refilled. So the excess is at most
the output of the requests that were open, whose number is limited too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pagoda_gateway.keys.buckets import Bucket
from pagoda_gateway.keys.grants import NO_LIMITS, Limits
from pagoda_proto.errors import ErrorCode, PagodaError

CONCURRENT_RETRY_S = 1.0  # a guess: when an open request will end is unknown
SWEPT_ABOVE = 1024


REQUESTS, TOKENS = NAMES = ("requests", "tokens")


class Left(NamedTuple):
    """The state of one per-minute limit; `name` is one of NAMES, `reset_s` the time until it is fully available."""

    name: str
    limit: int
    remaining: int
    reset_s: float


class Quota:
    """The quota of one key. `now` is a monotonic clock."""

    def __init__(self, limits: Limits, now: Callable[[], float]) -> None:
        self.limits = limits
        self._now = now
        self._requests = _bucket(limits.requests_per_minute, now())
        self._tokens = _bucket(limits.tokens_per_minute, now())
        self._open = 0
        self._growing: dict[object, tuple[Callable[[], int], int]] = {}

    @contextmanager
    def request(self) -> Iterator[None]:
        """Wraps a request. Raises PagodaError RATE_LIMITED; then nothing is counted."""
        self._check_request()
        if self._requests is not None:
            self._requests.take(1, self._now())
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def _check_request(self) -> None:
        limits, now = self.limits, self._now()
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now)):
            raise _refused(f"{limits.requests_per_minute} requests a minute", wait_s)
        if self._tokens is not None:
            self._take_output()
            if wait_s := self._tokens.wait_s(1, now):
                raise _refused(f"{limits.tokens_per_minute} tokens a minute", wait_s)
        if limits.concurrent_requests and self._open >= limits.concurrent_requests:
            raise _refused(f"{limits.concurrent_requests} requests at once", CONCURRENT_RETRY_S)

    def check_prompt(self, num_prompt_tokens: int) -> None:
        """Raises PagodaError RATE_LIMITED, or REQUEST_TOO_LARGE for a prompt larger than the whole limit."""
        if self._tokens is None:
            return
        self._take_output()
        limit, now = self._tokens.per_minute, self._now()
        if num_prompt_tokens > limit:
            why = f"the prompt has {num_prompt_tokens} tokens; this API key may have {limit} a minute"
            raise PagodaError(ErrorCode.REQUEST_TOO_LARGE, why)
        if wait_s := self._tokens.wait_s(num_prompt_tokens, now):
            raise _refused(f"{limit} tokens a minute, and the prompt has {num_prompt_tokens}", wait_s)

    def begin(self, run: object, num_prompt_tokens: int, num_output: Callable[[], int]) -> None:
        """Count a run's prompt, and from now on its output; the caller must then call `end`."""
        if self._tokens is not None:
            self._tokens.take(num_prompt_tokens, self._now())
            self._growing[run] = num_output, 0

    def end(self, run: object, give_back: int = 0) -> None:
        """`give_back`: tokens of a prompt that was never computed."""
        self._take_output()
        if self._growing.pop(run, None) is not None and self._tokens is not None:
            self._tokens.take(-give_back, self._now())

    def _take_output(self) -> None:
        if self._tokens is None:
            return
        for run, (num_output, taken) in self._growing.items():
            count = num_output()
            self._growing[run] = num_output, count
            self._tokens.take(count - taken, self._now())

    def left(self) -> list[Left]:
        """The state of each per-minute limit that is set."""
        self._take_output()
        now, buckets = self._now(), ((REQUESTS, self._requests), (TOKENS, self._tokens))
        return [
            Left(name, bucket.per_minute, bucket.remaining(now), bucket.reset_s(now))
            for name, bucket in buckets
            if bucket is not None
        ]

    @property
    def as_new(self) -> bool:
        return not self._open and not self._growing and all(left.remaining == left.limit for left in self.left())


class Quotas:
    """The quotas of all keys, by tenant; an unused one may be dropped, since a new one is the same."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.none = Quota(NO_LIMITS, now)  # counts nothing, so all keys without limits share it
        self._by_tenant: dict[str, Quota] = {}
        self._most = SWEPT_ABOVE

    def of(self, tenant: str, limits: Limits) -> Quota:
        if limits == NO_LIMITS:
            return self.none
        found = self._by_tenant.get(tenant)
        if found is None or found.limits != limits:
            found = Quota(limits, self._now)
            self._keep(tenant, found)
        return found

    def known(self, tenant: str) -> Quota:
        """The quota of a tenant whose limits are not at hand; one without limits if it made no request here lately."""
        return self._by_tenant.get(tenant, self.none)

    def _keep(self, tenant: str, quota: Quota) -> None:
        if len(self._by_tenant) >= self._most:
            self._by_tenant = {name: known for name, known in self._by_tenant.items() if not known.as_new}
            self._most = max(SWEPT_ABOVE, 2 * len(self._by_tenant))
        self._by_tenant[tenant] = quota


def _bucket(per_minute: int | None, now: float) -> Bucket | None:
    return Bucket(per_minute, now) if per_minute else None


def _refused(limit: str, retry_after_s: float) -> PagodaError:
    return PagodaError(ErrorCode.RATE_LIMITED, f"this API key may have {limit}", None, retry_after_s)
