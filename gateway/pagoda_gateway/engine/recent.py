"""The last requests of each tenant: when, how long, how much, how they ended; no text of prompts or answers."""

from __future__ import annotations

import re
from collections import deque

import msgspec

MOST_PER_TENANT = 64
MOST_TENANTS = 256
OUTSIDE = "outside_engine_core"
ANSWER_PREFIX = re.compile(r"(?:[a-z]+[-_])?")  # of an answer's id, such as chatcmpl-


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ids and numbers of a request that has ended.

    Attributes:
        ended_at: Unix seconds.
        end: A finish reason, or "error:" and the code.
        ttft_s: None if no token arrived; `tpot_s`: None if no choice has two.
        attempts: How often it was submitted to an engine core.
        waits_s: Seconds by cause, of the last attempt; empty if the request left the engine core before it reported.
    """

    id: str
    model: str
    ended_at: float
    end: str
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    total_s: float
    attempts: int
    waits_s: dict[str, float] = {}

    def spent_s(self) -> dict[str, float]:
        """Seconds by cause that sum to `total_s`: the time that the engine core did not report passed on links, in this
        gateway, and in earlier attempts."""
        return {**self.waits_s, OUTSIDE: max(0.0, self.total_s - sum(self.waits_s.values()))}

    def is_called(self, name: str) -> bool:
        """Whether `name` is its id, the client's own id at the end of it, or the id of the answer of which it was the
        first part."""
        own = self.id.partition(".")[2] or self.id
        return name == self.id or (name.endswith(own) and ANSWER_PREFIX.fullmatch(name.removesuffix(own)) is not None)


class RecentRequests:
    """Keeps the last requests of each tenant, for the tenants whose requests ended last."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, deque[EndedRequest]] = {}  # ordered by last request

    def add(self, tenant: str, request: EndedRequest) -> None:
        kept = self._by_tenant.pop(tenant, None) or deque(maxlen=MOST_PER_TENANT)
        kept.append(request)
        self._by_tenant[tenant] = kept
        if len(self._by_tenant) > MOST_TENANTS:
            del self._by_tenant[next(iter(self._by_tenant))]

    def of(self, tenant: str) -> list[EndedRequest]:
        """Newest first."""
        return [*reversed(self._by_tenant.get(tenant, ()))]

    def find(self, tenant: str, name: str) -> EndedRequest | None:
        """The newest of that name."""
        return next((request for request in self.of(tenant) if request.is_called(name)), None)
