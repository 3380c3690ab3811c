"""A request goes to any engine core that can go on with it: to the least busy one, and of nearly equals to the one
that has most likely seen its beginning. One that failed lately is chosen where no other is left.

Pure books, of which one task is the owner; times are `LivedClock`'s.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pagoda_gateway.engine.model_view import ModelView
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.records import Load, RequestRecord

PREFIX_TOKENS = 64  # by which prompts that begin alike are told: a template, a system's words, a first turn
SLACK = 2.0  # requests for each worker, by which the one that knows a prefix may be busier
AVOID_FIRST_S = 0.5
AVOID_MOST_S = 30.0
UNKNOWN = ModelView()
NO_ENGINE = Load(engine_id="")

Send = Callable[[pb.ClientFrame], None]


@dataclass(eq=False, kw_only=True)
class Core:
    """An engine core as the requests of this gateway see it.

    Attributes:
        send: None while no session stands.
        usable: It takes requests.
        sent: Requests that it was sent since `load`.
        heard_at: When anything last came from it.
        got_on_at: When a token last came from it, or a step of its workers advanced.
        losses: How often it was lost since its last token.
    """

    name: str = ""
    send: Send | None = None
    usable: bool = False
    load: Load = NO_ENGINE
    view: ModelView = UNKNOWN
    sent: int = 0
    heard_at: float = -float("inf")
    got_on_at: float = -float("inf")
    losses: int = 0
    avoided_until: float = -float("inf")

    @property
    def works(self) -> bool:
        """It takes requests, and has who computes them."""
        return self.usable and self.load.num_workers > 0

    @property
    def busy(self) -> float:
        """Requests for each worker, of all gateways."""
        num_open = self.load.num_running + self.load.num_waiting + self.sent
        return num_open / self.load.num_workers if self.load.num_workers else float("inf")

    def is_well(self, now: float, suspect_s: float) -> bool:
        """It works, has not failed lately, and was heard in the last `suspect_s`."""
        return self.works and self.avoided_until <= now and now - self.heard_at < suspect_s

    def got_on(self) -> None:
        """A token came."""
        self.losses = 0
        self.avoided_until = -float("inf")

    def failed(self, now: float) -> None:
        """It was lost, or stands still: others go first for a while, that doubles with every failure."""
        self.avoided_until = now + min(AVOID_FIRST_S * 2**self.losses, AVOID_MOST_S)
        self.losses += 1


def choose(cores: Iterable[Core], record: RequestRecord, now: float) -> Core | None:
    """Of engine cores that may take a request, the one to send it to; None of none."""
    known = list(cores)
    best = [core for core in known if core.works and core.avoided_until <= now]
    left = best or [core for core in known if core.works] or known
    if len(left) < 2:
        return left[0] if left else None
    most = min(core.busy for core in left) + SLACK
    prefix = array("q", record.prompt_token_ids[:PREFIX_TOKENS]).tobytes() + record.cache_salt.encode()
    return max((core for core in left if core.busy <= most), key=lambda core: _affinity(core.name, prefix))


def _affinity(name: str, prefix: bytes) -> bytes:
    """The highest of several decides, so what one core's coming or going moves is its own share alone (rendezvous
    hashing, Thaler and Ravishankar 1998)."""
    return hashlib.blake2b(prefix, digest_size=8, key=hashlib.sha256(name.encode()).digest()).digest()


def merged(loads: Sequence[Load]) -> Load:
    """What several engine cores say together; of one, its own word. Where they differ in what a request may be, the
    least counts, and of one by two addresses the word of who is connected."""
    by_id = {load.engine_id: load for load in sorted(loads, key=lambda load: load.num_workers) if load.engine_id}
    known = list(by_id.values())
    if len(known) < 2:
        return known[0] if known else NO_ENGINE
    working = [load for load in known if load.num_workers] or known
    num_workers = sum(load.num_workers for load in known)
    return msgspec.structs.replace(
        working[0],
        engine_id=" ".join(load.engine_id for load in known),
        num_workers=num_workers,
        num_waiting=sum(load.num_waiting for load in known),
        num_running=sum(load.num_running for load in known),
        kv_usage=sum(load.kv_usage * load.num_workers for load in known) / max(1, num_workers),
        draining=all(load.draining for load in known),
        max_model_len=min((load.max_model_len for load in working if load.max_model_len), default=0),
        seconds_since_progress=min(load.seconds_since_progress for load in working),
    )
