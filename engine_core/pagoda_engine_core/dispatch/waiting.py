"""The requests that no worker holds, and which of them goes next.

Each tenant has a queue, sorted by rank and policy. The heads of the queues are compared by rank, by the first component
of the policy's order, by how much their tenants have been served, and by how many of their requests wait. Without fair
scheduling there is one queue.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple

from pagoda_engine_core.dispatch.fairness import Fairness
from pagoda_engine_core.dispatch.suspicion import is_suspect
from pagoda_engine_core.scheduling.request import Request
from pagoda_engine_core.scheduling.rows import Policy


class Rank(IntEnum):
    """Order under every policy: suspects first, to test them soon; then interrupted requests; then new ones."""

    SUSPECT = 0
    REPLAY = 1
    NEW = 2

    @classmethod
    def of(cls, request: Request) -> Rank:
        if is_suspect(request):
            return cls.SUSPECT
        return cls.REPLAY if request.resumes else cls.NEW


class Ahead(NamedTuple):
    """What a request would wait behind; `num_tokens` counts prompt tokens."""

    num_requests: int
    num_tokens: int


class _Place(NamedTuple):
    rank: Rank
    order: tuple[float, ...]
    arrival: int


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """`since` is when its timeout starts."""

    place: _Place
    request: Request
    since: float


_place = attrgetter("place")


class WaitingQueue:
    """`num_tokens` counts prompt tokens."""

    def __init__(self, policy: Policy, fairness: Fairness) -> None:
        self._policy = policy
        self._fairness = fairness
        self._arrivals = itertools.count()
        self._lines: dict[str, list[QueuedRequest]] = {}  # none is empty
        self._by_id: dict[str, QueuedRequest] = {}
        self._begun: dict[str, QueuedRequest] = {}  # those of `_by_id` that are not new
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """In order. While iterating, the caller may remove entries and charge the tenant whose turn it was."""
        heads = [(self._turn(tenant, line[0]), tenant, line[0]) for tenant, line in self._lines.items()]
        heapq.heapify(heads)  # no two turns are equal
        while heads:
            _, tenant, queued = heapq.heappop(heads)
            if queued.request.request_id in self._by_id:
                yield queued
            if (follower := self._after(tenant, queued.place)) is not None:
                heapq.heappush(heads, (self._turn(tenant, follower), tenant, follower))

    def _after(self, tenant: str, place: _Place) -> QueuedRequest | None:
        line = self._lines.get(tenant, [])
        at = bisect.bisect_right(line, place, key=_place)
        return line[at] if at < len(line) else None

    def _turn(self, tenant: str, head: QueuedRequest) -> tuple[Rank, float, float, int, _Place]:
        """The sort key of a tenant's head. Among tenants served equally, the one with fewer waiting requests is first,
        since a newcomer starts level with a tenant that floods the queue."""
        served, num_waiting = self._fairness.served(tenant), len(self._lines.get(tenant, ()))
        return head.place.rank, head.place.order[0], served, num_waiting, head.place

    def add(self, request: Request, rank: Rank, now: float) -> None:
        queued = QueuedRequest(_Place(rank, self._policy(request), next(self._arrivals)), request, now)
        tenant = self._fairness.tenant(request)
        self._fairness.asked(tenant, now)
        if tenant not in self._lines:
            self._fairness.comes(tenant, self._lines.keys())
        bisect.insort(self._lines.setdefault(tenant, []), queued, key=_place)
        self._by_id[request.request_id] = queued
        if rank is not Rank.NEW:
            self._begun[request.request_id] = queued
        self.num_tokens += request.num_prompt_tokens

    def ahead_of(self, request: Request, rank: Rank) -> Ahead:
        """What a request added now would wait behind. With fair scheduling, about as many requests of each other queue
        go first as of its own."""
        line = self._lines.get(tenant := self._fairness.tenant(request), [])
        place = _Place(rank, self._policy(request), sys.maxsize)
        own = bisect.bisect_left(line, place, key=_place)
        num = own + sum(min(len(other), own + 1) for name, other in self._lines.items() if name != tenant)
        return Ahead(num, num * self.num_tokens // max(1, len(self)))

    def get(self, request_id: str) -> Request | None:
        queued = self._by_id.get(request_id)
        return queued.request if queued else None

    def remove(self, request_id: str) -> None:
        """Raises KeyError if the request is not here."""
        queued = self._by_id.pop(request_id)
        self._begun.pop(request_id, None)
        tenant = self._fairness.tenant(queued.request)
        line = self._lines[tenant]
        del line[bisect.bisect_left(line, queued.place, key=_place)]
        if not line:
            del self._lines[tenant]
            self._fairness.goes(tenant)
        self.num_tokens -= queued.request.num_prompt_tokens

    def forgive(self, seconds: float, now: float) -> None:
        """Exclude a time that no request is to blame for from all timeouts."""
        for queued in self._by_id.values():
            queued.since = min(queued.since + seconds, now)

    def entries(self) -> list[QueuedRequest]:
        """Entries in order of arrival, which is cheaper than queue order; they may be removed while iterating."""
        return list(self._by_id.values())

    def begun_entries(self) -> list[QueuedRequest]:
        """`entries` without the new requests, of which there may be many more."""
        return list(self._begun.values())

    def take_all(self) -> list[Request]:
        requests = [queued.request for queued in self.entries()]
        self._lines.clear()
        self._by_id.clear()
        self._begun.clear()
        self.num_tokens = 0
        return requests
