"""The only place that measures tokens and endings of users' requests; each ending is one line of log.

A line holds ids and numbers, never text of prompts or answers.
"""

from __future__ import annotations

import logging
import time

from pagoda_gateway.clients import tenant_of
from pagoda_gateway.engine.pooled_generation import PooledGeneration
from pagoda_gateway.engine.recent import EndedRequest, RecentRequests
from pagoda_gateway.engine.refusals import Kind, Refusals
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import FinishReason

logger = logging.getLogger("pagoda_gateway.generation.requests")


class RequestMeter:
    """`now` is a monotonic clock that also counts stalls, as the client's own clock does."""

    def __init__(self, metrics: GatewayMetrics, *, log_requests: bool) -> None:
        self.recent = RecentRequests()
        self.refusals = Refusals(self._unread)
        self._metrics = metrics
        self._log_requests = log_requests

    def tokens(self, generation: PooledGeneration, choice: int, num_tokens: int, now: float) -> None:
        if not (generation.counted and num_tokens):
            return
        is_first = generation.times.ttft_s is None
        gap_s = generation.times.on_tokens(choice, now)
        self._metrics.output_tokens.inc(num_tokens)
        if gap_s is not None:
            self._metrics.itl.observe(gap_s / num_tokens)
        elif is_first:
            self._metrics.ttft.observe(now - generation.times.submitted_at)

    def refused(self, generation: PooledGeneration, error: PagodaError, kind: Kind | None) -> None:
        """Every working engine core refused it, and all of its `kind` if there is one. `ended` is still to come."""
        if generation.counted:
            self._metrics.refused(error.code)
            if kind is not None:
                self.refusals.came(kind, error)

    def _unread(self, code: ErrorCode) -> None:
        """Count a refusal for which no request was ever built."""
        self._metrics.refused(code)
        self._metrics.ended(FinishReason.ERROR, None, 0.0)

    def ended(self, generation: PooledGeneration, now: float) -> None:
        """Called once per request. Prompt tokens count if the model saw them, that is, if output came back."""
        if not generation.counted:
            return
        request, times, usage = generation.request, generation.times, generation.request.usage()
        ended = EndedRequest(
            id=request.record.request_id,
            model=self._metrics.model_name,
            ended_at=time.time(),
            end=_end(request.outcome, request.error_code),
            prompt_tokens=usage.prompt_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            output_tokens=usage.output_tokens,
            ttft_s=times.ttft_s,
            tpot_s=times.tpot_s(usage.output_tokens),
            total_s=now - times.submitted_at,
            attempts=request.attempt + 1,
            waits_s={entry.cause: entry.seconds for entry in request.ledger},
        )
        self.recent.add(tenant_of(request.record.cache_salt), ended)
        if self._log_requests:
            logger.info("%s", _line(ended, generation.request_id))
        self._metrics.ended(request.outcome, usage if request.was_read else None, now - times.submitted_at)


def _end(outcome: FinishReason, code: ErrorCode | None) -> str:
    return f"error:{code or ErrorCode.INTERNAL}" if outcome is FinishReason.ERROR else outcome.value


def _line(ended: EndedRequest, request_id: str) -> str:
    fields = {
        "id": ended.id,
        "request_id": request_id,
        "model": f'"{ended.model}"',
        "prompt_tokens": ended.prompt_tokens,
        "cached_tokens": ended.cached_prompt_tokens,
        "output_tokens": ended.output_tokens,
        "ttft_ms": _ms(ended.ttft_s),
        "tpot_ms": _ms(ended.tpot_s),
        "total_ms": _ms(ended.total_s),
        "attempts": ended.attempts,
        "end": ended.end,
    }
    return " ".join(["request", *(f"{name}={value}" for name, value in fields.items())])


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
