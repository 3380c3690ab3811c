"""The requests that no worker holds, sorted by who goes next."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple

from pagoda_engine_core.scheduling.request import Request


class Rank(IntEnum):
    """Whatever the policy: suspects first, so that they are found out soon; then what was interrupted; then new."""

    SUSPECT = 0
    REPLAY = 1
    NEW = 2

    @classmethod
    def of(cls, request: Request) -> Rank:
        if request.suspect:
            return cls.SUSPECT
        return cls.REPLAY if request.resumes else cls.NEW


class _Place(NamedTuple):
    rank: Rank
    order: tuple[float, ...]
    arrival: int


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """`since` is what its patience counts from."""

    place: _Place
    request: Request
    since: float


_place = attrgetter("place")


class WaitingQueue:
    """`key` is the policy's. `num_tokens` counts prompt tokens."""

    def __init__(self, key: Callable[[Request], tuple[float, ...]]) -> None:
        self._key = key
        self._arrivals = itertools.count()
        self._sorted: list[QueuedRequest] = []
        self._by_id: dict[str, QueuedRequest] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """In order; entries may be removed meanwhile."""
        return iter(tuple(self._sorted))

    def add(self, request: Request, rank: Rank, now: float) -> None:
        queued = QueuedRequest(_Place(rank, self._key(request), next(self._arrivals)), request, now)
        bisect.insort(self._sorted, queued, key=_place)
        self._by_id[request.request_id] = queued
        self.num_tokens += request.num_prompt_tokens

    def get(self, request_id: str) -> Request | None:
        queued = self._by_id.get(request_id)
        return queued.request if queued else None

    def remove(self, request_id: str) -> None:
        """Raises KeyError when it is not here."""
        queued = self._by_id.pop(request_id)
        del self._sorted[bisect.bisect_left(self._sorted, queued.place, key=_place)]
        self.num_tokens -= queued.request.num_prompt_tokens

    def forgive(self, seconds: float) -> None:
        """So much time has passed that nobody is to be blamed for."""
        for queued in self._sorted:
            queued.since += seconds

    def take_all(self) -> list[Request]:
        requests = [queued.request for queued in self._sorted]
        self._sorted.clear()
        self._by_id.clear()
        self.num_tokens = 0
        return requests
