"""Every accepted request is owed exactly one ending, to one sink; the output of a pass is sent together.

A delta of a request that is not open, or of an attempt that was replaced, is dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from pagoda_engine_core.scheduling.decoding import News
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Delta, NextTokens, RequestRecord, Resume

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives answers. Called by the loop thread, so it must not block. It owns the deltas it is given."""

    def accepted(self, request_id: str, attempt: int, stream: int) -> None:
        """From now on, choice i is the `Stream` with number `stream` + i."""

    def rejected(self, request_id: str, attempt: int, error: PagodaError, retry_after_s: float) -> None:
        """The request has ended with `error`; a `retry_after_s` of 0 means unknown."""

    def next_tokens(self, tokens: NextTokens) -> None:
        """Output of a step, for choices of this sink with one more token and nothing else."""

    def deltas(self, deltas: list[Delta]) -> None:
        """All other output."""

    def migrate(self, request_id: str, attempt: int, reason: str) -> None:
        """The request no longer runs here; it can continue elsewhere from the tokens so far."""


class Observer(Protocol):
    """Keeps statistics; called by the loop thread."""

    def ended(self, delta: Delta, first_token_s: float | None, latency_s: float) -> None:
        """A request ended with `delta`; times count from its submission."""

    def rejected(self, code: ErrorCode) -> None: ...

    def planned(self, num_tokens: int) -> None: ...

    def stepped(self, elapsed_s: float, forward_s: float) -> None:
        """A worker spent `elapsed_s` on a step, `forward_s` of it in model and sampler."""


class Draining(PagodaError):
    """Nothing is admitted any more. The submission is not at fault and is handed back."""

    def __init__(self, why: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, why)


class Full(PagodaError):
    """No new request of the same tenant, priority and queue timeout is admitted now, however small."""

    def __init__(self, why: str) -> None:
        super().__init__(ErrorCode.OVERLOADED, why)


class NoObserver:
    def ended(self, delta: Delta, first_token_s: float | None, latency_s: float) -> None: ...

    def rejected(self, code: ErrorCode) -> None: ...

    def planned(self, num_tokens: int) -> None: ...

    def stepped(self, elapsed_s: float, forward_s: float) -> None: ...


class Submission(NamedTuple):
    record: RequestRecord
    sink: Sink
    attempt: int
    resume: Resume
    submitted_at: float

    @property
    def request_id(self) -> str:
        return self.record.request_id


@dataclass(slots=True)
class AcceptedSubmission:
    """A request that was accepted and has not ended."""

    submission: Submission
    first_token_at: float | None = None


@dataclass(slots=True)
class _Batch:
    """Output for one sink: tokens, then deltas, possibly of the same choices."""

    sink: Sink
    tokens: NextTokens = field(default_factory=NextTokens)
    deltas: list[Delta] = field(default_factory=list)


class Answers:
    """The open requests, and the deltas on their way to the sinks. A sink that raises loses its requests: `failed`
    collects these sinks until the engine core abandons their requests.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._accepted: dict[str, AcceptedSubmission] = {}
        self._num_streams = 0  # so far
        self._num_open: Counter[int] = Counter()  # by sink; sinks without open requests have no entry
        self._batches: dict[int, _Batch] = {}  # by sink; a batch with deltas only takes further deltas
        self.failed: list[Sink] = []

    def __len__(self) -> int:
        return len(self._accepted)

    def get(self, request_id: str) -> Submission | None:
        accepted = self._accepted.get(request_id)
        return accepted.submission if accepted else None

    def accept(self, submission: Submission) -> int:
        """Open a request, silencing any earlier attempt that it replaces. Returns the number of its first stream."""
        first = self._num_streams
        self._num_streams += submission.record.task.params.n
        self._forget(submission.request_id)
        self._accepted[submission.request_id] = AcceptedSubmission(submission)
        sink = submission.sink
        self._num_open[id(sink)] += 1
        self._tell(sink, partial(sink.accepted, submission.request_id, submission.attempt, first))
        return first

    def reject(self, submission: Submission, error: PagodaError, retry_after_s: float = 0.0) -> None:
        if isinstance(error, Draining):
            self._give_back(submission, error.message)
            return
        self._observer.rejected(error.code)
        sink = submission.sink
        self._tell(sink, partial(sink.rejected, submission.request_id, submission.attempt, error, retry_after_s))

    def emit(self, deltas: list[Delta], now: float) -> None:
        """Queue deltas for the next `publish`."""
        for delta in deltas:
            accepted = self._accepted.get(delta.request_id)
            if accepted is None or accepted.submission.attempt != delta.attempt:
                continue
            if accepted.first_token_at is None and delta.has_output:
                accepted.first_token_at = now
            self._batch(accepted.submission.sink).deltas.append(delta)
            if delta.ends_request:
                self._end(accepted, delta, now)

    def emit_news(self, news: News, now: float) -> None:
        """Queue the output of a step."""
        if any(batch.deltas for batch in self._batches.values()):
            self.publish()  # so that these tokens come after those deltas
        for sink, tokens in self._by_sink(news.tokens):
            self._batch(sink).tokens.extend(tokens)
        self.emit(news.deltas, now)

    def publish(self) -> None:
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            if batch.tokens.streams:
                self._tell(batch.sink, partial(batch.sink.next_tokens, batch.tokens))
            if batch.deltas:
                self._tell(batch.sink, partial(batch.sink.deltas, batch.deltas))

    def _by_sink(self, tokens: NextTokens) -> list[tuple[Sink, NextTokens]]:
        """Split tokens by sink. Only open requests have rows on workers, so if there is one sink, all are its."""
        parts: dict[int, tuple[Sink, NextTokens]] = {}
        if tokens and len(self._num_open) == 1:
            accepted = self._accepted.get(tokens.streams[0].request_id)
            return [(accepted.submission.sink, tokens)] if accepted else []
        for stream, first_index, token_id in zip(tokens.streams, tokens.first_indexes, tokens.token_ids, strict=True):
            accepted = self._accepted.get(stream.request_id)
            if accepted is None or accepted.submission.attempt != stream.attempt:
                continue
            sink = accepted.submission.sink
            part = parts.setdefault(id(sink), (sink, NextTokens()))[1]
            part.streams.append(stream)
            part.first_indexes.append(first_index)
            part.token_ids.append(token_id)
        return list(parts.values())

    def _forget(self, request_id: str) -> None:
        accepted = self._accepted.pop(request_id, None)
        if accepted is not None:
            sink = id(accepted.submission.sink)
            self._num_open[sink] -= 1
            if not self._num_open[sink]:
                del self._num_open[sink]

    def _batch(self, sink: Sink) -> _Batch:
        batch = self._batches.get(id(sink))
        if batch is None:
            batch = self._batches[id(sink)] = _Batch(sink)
        return batch

    def forget(self, sink: Sink) -> list[str]:
        """Forget a sink that nobody reads any more; returns the ids of its open requests."""
        request_ids = [name for name, accepted in self._accepted.items() if accepted.submission.sink is sink]
        for request_id in request_ids:
            self._forget(request_id)
        return request_ids

    def _give_back(self, submission: Submission, reason: str) -> None:
        self._tell(submission.sink, partial(submission.sink.migrate, submission.request_id, submission.attempt, reason))

    def migrate_all(self, reason: str) -> None:
        """Publish what has been emitted, then hand every open request back."""
        self.publish()
        accepted_by_id, self._accepted = self._accepted, {}
        self._num_open.clear()
        for accepted in accepted_by_id.values():
            self._give_back(accepted.submission, reason)

    def _end(self, accepted: AcceptedSubmission, delta: Delta, now: float) -> None:
        self._forget(delta.request_id)
        since = accepted.submission.submitted_at
        first_token_s = None if accepted.first_token_at is None else accepted.first_token_at - since
        self._observer.ended(delta, first_token_s, now - since)

    def _tell(self, sink: Sink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # a sink is foreign code; only its own requests end
            log.exception("a sink failed; its requests are abandoned")
            self.failed.append(sink)
