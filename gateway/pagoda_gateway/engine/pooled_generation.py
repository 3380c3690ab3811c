"""One open request: its consumer's handle, its latencies, and the pool's state about it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagoda_gateway import request_ids
from pagoda_gateway.engine.cores import Core
from pagoda_gateway.engine.model_view import Obstacle
from pagoda_gateway.engine.open_request import OpenRequest
from pagoda_gateway.engine.refusals import Kind
from pagoda_proto.records import Delta


class Pool(Protocol):
    """What a request needs from the pool that carries it."""

    def abort(self, generation: PooledGeneration, choices: tuple[int, ...]) -> None: ...

    def release(self, generation: PooledGeneration) -> None: ...


class TokenTimes:
    """When tokens arrived, in seconds of any monotonic clock: latencies as the client saw them, stalls included."""

    def __init__(self, now: float) -> None:
        self.submitted_at = now
        self._first_at: float | None = None
        self._last_at: dict[int, float] = {}  # by choice

    @property
    def ttft_s(self) -> float | None:
        return None if self._first_at is None else self._first_at - self.submitted_at

    def tpot_s(self, num_tokens: int) -> float | None:
        """Mean time between two tokens of a choice; None if no choice has two, or all arrived at once."""
        num_gaps = num_tokens - len(self._last_at)
        if self._first_at is None or num_gaps < 1:
            return None
        return sum(at - self._first_at for at in self._last_at.values()) / num_gaps or None

    def on_tokens(self, choice: int, now: float) -> float | None:
        """Record the arrival; return seconds since the choice's previous tokens, None for its first."""
        last_at = self._last_at.get(choice)
        self._last_at[choice] = now
        if self._first_at is None:
            self._first_at = now
        return None if last_at is None else now - last_at


class PooledGeneration:
    """Implements `Generation`, for one consumer. Losses and waits are in the pool's `PooledRequest`, not here.

    A request that is not `counted` appears in no metric and no log.
    """

    def __init__(self, request: OpenRequest, pool: Pool, *, counted: bool, now: float) -> None:
        self.request = request
        self.request_id = request_ids.current()  # of the HTTP request, as its client knows it
        self.counted = counted
        self.times = TokenTimes(now)
        self.admitted = asyncio.Event()
        self._reader: asyncio.Future[None] | None = None  # waits for deltas
        self._pool = pool

    async def next(self) -> list[Delta]:
        """Wait for output: at most one delta per choice, merged since the last call; [] once all was delivered."""
        while True:
            deltas = self.request.drain()
            if deltas or self.request.ended:
                return deltas
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    async def abort(self, choices: Sequence[int] = ()) -> None:
        """Ask the engine core to end these choices, or all of them; the ending still arrives through `next`."""
        self._pool.abort(self, tuple(choices))

    async def aclose(self) -> None:
        """Release the request. Safe at any time and more than once."""
        self._pool.release(self)

    def wake(self) -> None:
        """Wake the reader: there is output, or the ending."""
        self.admitted.set()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass
class PooledRequest:
    """The pool's state about one open request.

    `core` has had it since `sent_at`, None while it is parked; `streams` are the numbers of its choices there.
    `give_up_at` is set from a loss until it is accepted again; `why` says what it waits for, "" for an engine core;
    `losing_since` is when it was first lost since its last token. `refused_by` are the engine cores that refused it
    since one last accepted it; `none_taken`: all of them refuse every request of its kind.
    """

    generation: PooledGeneration
    vocab_size: int
    core: Core | None = None
    sent_at: float = 0.0
    parked_at: float | None = None
    retry_at: float = 0.0
    give_up_at: float | None = None
    losing_since: float | None = None
    why: str = ""
    gaps: int = 0
    streams: range = range(0)
    refused_by: set[Core | None] = field(default_factory=set)
    none_taken: bool = True

    @property
    def request(self) -> OpenRequest:
        return self.generation.request

    @property
    def parked(self) -> bool:
        return self.core is None

    def obstacle(self, core: Core) -> Obstacle | None:
        return core.view.obstacle(self.request.begun, self.vocab_size or core.view.vocab_size)

    @property
    def kind_refused(self) -> Kind | None:
        """The kind that the present engine core and all before it refuse; None if they may refuse this request alone,
        or if their policies differ."""
        policies = {core.load.policy for core in {self.core, *self.refused_by} if core}
        return Kind.of(policies.pop(), self.request.record) if len(policies) == 1 and self.none_taken else None

    def fits(self, core: Core) -> bool:
        return core.usable and self.obstacle(core) is None

    def fits_any(self, others: Sequence[Core]) -> bool:
        """Whether one of them can continue it; if none can, moving it would only cost an attempt."""
        return any(self.fits(other) for other in others)

    def settled(self) -> None:
        """An engine core accepted it: no wait is running."""
        self.give_up_at = None
        self.why = ""
        self.refused_by.clear()
        self.none_taken = True
