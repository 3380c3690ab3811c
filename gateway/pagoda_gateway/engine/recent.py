"""The last requests of each tenant: when, how long, how much, how they ended; no word of what was asked or answered."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import FinishReason, RequestRecord, Usage

MOST_PER_TENANT = 64
MOST_TENANTS = 256


class WholeRequest(NamedTuple):
    """A user's request that was made of others: it ends once, and its tokens come with its end. `code` says why where
    `outcome` is ERROR."""

    record: RequestRecord
    usage: Usage
    outcome: FinishReason
    code: ErrorCode | None
    total_s: float


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ids and numbers of a request that has its ending.

    Attributes:
        ended_at: Unix seconds.
        end: A finish reason, or "error:" and the code.
        ttft_s: None where no token came; `tpot_s`: where no choice has two.
        attempts: How often an engine core was asked.
        waits_s: Seconds by cause, of the last attempt; empty where the engine core was left before it told.
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


class RecentRequests:
    """Of each tenant the last ones, and of the tenants those whose requests ended last."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, deque[EndedRequest]] = {}  # in the order of their last requests

    def add(self, tenant: str, request: EndedRequest) -> None:
        kept = self._by_tenant.pop(tenant, None) or deque(maxlen=MOST_PER_TENANT)
        kept.append(request)
        self._by_tenant[tenant] = kept
        if len(self._by_tenant) > MOST_TENANTS:
            del self._by_tenant[next(iter(self._by_tenant))]

    def of(self, tenant: str) -> list[EndedRequest]:
        """Newest first."""
        return [*reversed(self._by_tenant.get(tenant, ()))]
