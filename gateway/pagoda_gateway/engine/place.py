"""An engine core as requests see it, and which of several one of them goes to: where it can go on, and has least before
it; among such, where others with the same beginning went, whose blocks it then finds.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagoda_gateway.engine.model_view import ModelView, Obstacle
from pagoda_gateway.engine.open_request import OpenRequest
from pagoda_proto import times
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.records import Load

BEGINNING = 64  # tokens by which requests are found alike
ALONE_S = times.WORKER_DEAD_S - times.WORKER_SUSPECT_S
SLACK = 4  # so many requests more for each worker are worth a prefix that is there already

Send = Callable[[pb.ClientFrame], None]


@dataclass(eq=False)
class Place:
    """One engine core, through all sessions with it; the pool writes it. `send` is None while there is no session,
    `streams` are choices by their numbers on it, `num_open` counts this gateway's requests there, `num_others` those of
    others when it last told.
    """

    send: Send | None = None
    view: ModelView = field(default_factory=ModelView)
    usable: bool = False
    num_workers: int = 0
    num_open: int = 0
    num_others: int = 0
    idle_since: float | None = None  # without a worker that takes work
    streams: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def told(self, load: Load, now: float) -> None:
        """`now` is any monotonic clock."""
        self.idle_since = None if load.num_workers else now if self.idle_since is None else self.idle_since
        self.view = ModelView.of(load)
        self.num_workers = load.num_workers
        self.num_others = max(0, load.num_running + load.num_waiting - self.num_open)

    def forsaken(self, now: float) -> bool:
        """Whether its requests had better be elsewhere: it is to leave, or its workers are gone and not only late."""
        return not self.usable or (self.idle_since is not None and now - self.idle_since >= ALONE_S)

    @property
    def work(self) -> float:
        """Requests before a new one, for each worker."""
        return (self.num_open + self.num_others) / max(1, self.num_workers)


def choose(places: Sequence[Place], request: OpenRequest, vocab_size: int) -> Place | Obstacle | None:
    """Where it goes on; what is in its way where none will do; None while no engine core takes requests."""
    usable = [place for place in places if place.usable]
    obstacles = [place.view.obstacle(request.begun, vocab_size) for place in usable]
    able = [place for place, obstacle in zip(usable, obstacles, strict=True) if obstacle is None]
    if able:
        return _best(able, request)
    found = [obstacle for obstacle in obstacles if obstacle is not None]
    passing = next((obstacle for obstacle in found if not obstacle.final), None)
    if passing is None and found and len(usable) < len(places):
        return Obstacle(found[0].why, final=False)  # another one may come
    return passing or next(iter(found), None)


def _best(able: Sequence[Place], request: OpenRequest) -> Place:
    with_workers = [place for place in able if place.num_workers] or able
    least = min(with_workers, key=lambda place: place.work)
    if len(with_workers) == 1:
        return least
    beginning = array("q", request.record.prompt_token_ids[:BEGINNING]).tobytes()
    named = zlib.crc32(beginning, zlib.crc32(request.record.cache_salt.encode(errors="replace")))
    usual = with_workers[named % len(with_workers)]
    return usual if usual.work <= least.work + SLACK else least
