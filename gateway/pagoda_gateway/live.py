"""One open request as its consumer sees it, and the times it is measured by."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from pagoda_gateway.metrics import GatewayMetrics
from pagoda_gateway.open_request import OpenRequest
from pagoda_proto.records import Delta, FinishReason


class Carrier(Protocol):
    """What a request needs from the session that carries it."""

    def abort(self, live: LiveRequest, choices: tuple[int, ...]) -> None: ...

    def release(self, live: LiveRequest) -> None: ...


class LiveRequest:
    """Implements `Generation`, for one consumer.

    `give_up_at`, `retry_at` are monotonic seconds, 0 means not set; they, `parked` and the counters belong to the
    session.
    """

    def __init__(self, request: OpenRequest, carrier: Carrier, *, counted: bool, now: float) -> None:
        self.request = request
        self.counted = counted
        self.admitted = asyncio.Event()
        self.news = asyncio.Event()
        self.fingerprint = ""
        self.parked = False
        self.give_up_at = 0.0
        self.retry_at = 0.0
        self.gaps = 0
        self.fruitless_losses = 0
        self._carrier = carrier
        self._submitted_at = now
        self._last_tokens_at: dict[int, float] = {}

    async def next(self) -> list[Delta]:
        """Wait for news: at most one delta per choice, merged since the last call; [] once all was delivered."""
        while True:
            deltas = self.request.drain()
            if deltas or self.request.ended:
                return deltas
            self.news.clear()
            await self.news.wait()

    async def abort(self, choices: Sequence[int] = ()) -> None:
        """Ask the engine core to end these choices, or all; the ending still comes through `next`."""
        self._carrier.abort(self, tuple(choices))

    async def aclose(self) -> None:
        """No more interest. Safe at any time and more than once."""
        self._carrier.release(self)

    def on_news(self, delta: Delta, metrics: GatewayMetrics, now: float) -> None:
        """Wake the consumer and measure one accepted delta."""
        self.give_up_at = 0.0
        self.admitted.set()
        self.news.set()
        num_tokens = len(delta.token_ids)
        if num_tokens:
            self.fruitless_losses = 0
            if self.counted:
                self._observe_tokens(delta.choice, num_tokens, metrics, now)
        if self.request.ended:
            self.observe_ending(metrics, now, delta)

    def _observe_tokens(self, choice: int, num_tokens: int, metrics: GatewayMetrics, now: float) -> None:
        metrics.output_tokens.inc(num_tokens)
        last_at = self._last_tokens_at.get(choice)
        if last_at is not None:
            metrics.itl.observe((now - last_at) / num_tokens)
        elif not self._last_tokens_at:
            metrics.ttft.observe(now - self._submitted_at)
        self._last_tokens_at[choice] = now

    def observe_ending(self, metrics: GatewayMetrics, now: float, delta: Delta | None = None) -> None:
        """Count how the request ended; without a delta it was dropped by its consumer or failed."""
        if not self.counted:
            return
        if delta is not None:
            reason = delta.finish_reason or FinishReason.ABORT
        else:
            reason = FinishReason.ABORT if self.request.error is None else FinishReason.ERROR
        metrics.ended(reason, delta.usage if delta is not None else None, now - self._submitted_at)
