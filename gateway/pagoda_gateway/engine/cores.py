"""Routing between engine cores: a request goes to the least busy one that can continue it, and among nearly equal ones
to the one most likely to have its prefix cached. One that failed lately is the last resort.

Pure state, owned by one task; times are `LivedClock`'s.
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

PREFIX_TOKENS = 64  # hashed to recognise prompts that begin alike: a template, a system prompt, a first turn
SLACK = 2.0  # requests per worker by which the engine core that has a prefix may be busier
AVOID_FIRST_S = 0.5
AVOID_MOST_S = 30.0
UNKNOWN = ModelView()
NO_ENGINE = Load(engine_id="")

Send = Callable[[pb.ClientFrame], None]


@dataclass(eq=False, kw_only=True)
class Core:
    """An engine core as this gateway's requests see it.

    Attributes:
        send: None while there is no session.
        usable: It takes requests.
        sent: Requests sent to it since `load`.
        heard_at: When anything last arrived from it.
        got_on_at: When a token last arrived from it, or a step of its workers advanced.
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
        """It takes requests and has workers to compute them."""
        return self.usable and self.load.num_workers > 0

    @property
    def busy(self) -> float:
        """Open requests per worker, of all gateways."""
        num_open = self.load.num_running + self.load.num_waiting + self.sent
        return num_open / self.load.num_workers if self.load.num_workers else float("inf")

    def is_well(self, now: float, suspect_s: float) -> bool:
        """It works, has not failed lately, and was heard from in the last `suspect_s`."""
        return self.works and self.avoided_until <= now and now - self.heard_at < suspect_s

    def got_on(self) -> None:
        """A token arrived."""
        self.losses = 0
        self.avoided_until = -float("inf")

    def failed(self, now: float) -> None:
        """It was lost or is stuck: prefer others for a while, which doubles with every failure."""
        self.avoided_until = now + min(AVOID_FIRST_S * 2**self.losses, AVOID_MOST_S)
        self.losses += 1


def choose(cores: Iterable[Core], record: RequestRecord, now: float) -> Core | None:
    """Choose one of the engine cores that may take a request; None if there are none."""
    known = list(cores)
    best = [core for core in known if core.works and core.avoided_until <= now]
    left = best or [core for core in known if core.works] or known
    if len(left) < 2:
        return left[0] if left else None
    most = min(core.busy for core in left) + SLACK
    prefix = array("q", record.prompt_token_ids[:PREFIX_TOKENS]).tobytes() + record.cache_salt.encode()
    return max((core for core in left if core.busy <= most), key=lambda core: _affinity(core.name, prefix))


def _affinity(name: str, prefix: bytes) -> bytes:
    """The core with the highest hash wins, so a core that joins or leaves moves only its own share (rendezvous hashing,
    Thaler and Ravishankar 1998)."""
    return hashlib.blake2b(prefix, digest_size=8, key=hashlib.sha256(name.encode()).digest()).digest()


def merged(loads: Sequence[Load]) -> Load:
    """Merge the loads of several engine cores; one is returned as it is. The smallest limit on requests counts. For an
    engine core with two addresses, the load of the connected one counts."""
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
