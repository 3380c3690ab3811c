"""A request outlives the session that carries it: when the session breaks, the pool resubmits its record and tokens.

The pool keeps every request that has no ending yet, and nothing else. When an attempt is over (its session broke, the
request was told to move, tokens were missing, or its engine core is stuck and another is well), the request is *parked*
until a usable engine core has the weights and numerics it began under, and goes there with a higher attempt. It waits:

    for an engine core                                 waits.resume_s since it was lost
    for workers of its numerics, on a connected one    waits.no_worker_s since it was lost
    for a new token, while it is lost again and again  waits.losing_s since the first of these losses

It ends with the best reason known: the engine core's own reason before "lost". All times are `LivedClock`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from pagoda_gateway.engine.cores import Core, choose
from pagoda_gateway.engine.model_view import ModelView
from pagoda_gateway.engine.open_request import OpenRequest, Taken
from pagoda_gateway.engine.pooled_generation import PooledGeneration, PooledRequest
from pagoda_gateway.engine.request_meter import RequestMeter
from pagoda_gateway.engine.waits import Waits
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.convert import delta_from_pb, record_to_pb, resume_to_pb
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import ErrorCode, PagodaError, error_code_from
from pagoda_proto.records import Delta, RequestRecord
from pagoda_proto.times import LivedClock

RETRY_LEAST_S = 0.2
RETRY_MOST_S = 2.0
MAX_GAPS = 3
_RETRYABLE = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)

logger = logging.getLogger(__name__)


class RequestPool:
    """Implements `Pool`. One per gateway; only the event loop's thread touches it.

    `retry_after_s` says when an engine core is expected back; requests that fail here carry it.
    """

    def __init__(
        self,
        clock: LivedClock,
        waits: Waits,
        metrics: GatewayMetrics,
        meter: RequestMeter,
        retry_after_s: Callable[[float], float],
    ) -> None:
        self._clock = clock
        self._waits = waits
        self._metrics = metrics
        self._meter = meter
        self._retry_after_s = retry_after_s
        self._open: dict[str, PooledRequest] = {}
        self._parked: dict[str, PooledRequest] = {}  # a subset of `_open`
        self._streams: dict[Core, dict[int, tuple[PooledRequest, int]]] = {}  # by number on its session

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def add(self, core: Core) -> None:
        """Register an engine core; `meet` makes it known as connected."""
        self._streams[core] = {}

    # Called by consumers

    def open(self, record: RequestRecord, *, counted: bool, prior: Sequence[Delta] = ()) -> PooledGeneration:
        """Submit a record to a usable engine core, or park it. `prior` was delivered before and is not repeated.

        Raises:
            PagodaError: INTERNAL, the id is in use.
        """
        if record.request_id in self._open:
            raise PagodaError(ErrorCode.INTERNAL, f"request id {record.request_id} is in use")
        generation = PooledGeneration(OpenRequest(record, prior), self, counted=counted, now=time.monotonic())
        pooled = PooledRequest(generation, next((c.view.vocab_size for c in self._streams if c.view.vocab_size), 0))
        self._open[record.request_id] = pooled
        core = self._choice(pooled)
        if core is None or pooled.request.wants_nothing_more:
            self._park(pooled, self._clock.now())
        else:
            self._submit(pooled, core)
        return generation

    def abort(self, generation: PooledGeneration, choices: tuple[int, ...]) -> None:
        """Ask the engine core to stop choices. A parked request that wants nothing more ends here."""
        pooled = self._pooled(generation)
        if pooled is None or generation.request.ended:
            return
        generation.request.close(choices)
        self._send_abort(pooled, choices)
        if generation.request.wants_nothing_more and pooled.parked:
            self._end_here(pooled)

    def release(self, generation: PooledGeneration) -> None:
        """The consumer is gone: tell the engine core, and forget the request."""
        if (pooled := self._pooled(generation)) is not None:
            self._send_abort(pooled)
            generation.request.drop()
            self._ended(pooled)

    def fail_all(self, why: str) -> None:
        for pooled in list(self._open.values()):
            self._fail(pooled, why)

    def _pooled(self, generation: PooledGeneration) -> PooledRequest | None:
        pooled = self._open.get(generation.request.record.request_id)
        return pooled if pooled is not None and pooled.generation is generation else None

    # Called by the links

    def meet(self, core: Core, view: ModelView) -> None:
        """An engine core has connected, has different workers than before, or takes no more requests."""
        if view != core.view:
            core.view = view
            self._look_again(core)
        working = [each for each in self._streams if each.works]
        for leaving in [each for each in self._streams if each.send is not None and not each.works]:
            for pooled in [each for each in self._of(leaving) if each.fits_any(working)]:
                self._move(pooled)
        if core.usable:
            for pooled in [pooled for pooled in self._parked.values() if not pooled.retry_at]:
                self._go_on(pooled)

    def lose(self, core: Core) -> None:
        """The session is over: each of its requests continues on another engine core, or on this one once restarted."""
        self._metrics.sessions_lost.inc()
        now = self._clock.now()
        core.failed(now)
        nobody_is_there = all(each.send is None for each in self._streams)
        for pooled in [*self._parked.values()] * nobody_is_there + self._of(core):
            pooled.settled()
            self._attempt_over(pooled, now)

    def tend(self) -> None:
        """Retry or give up parked requests, move others off stuck engine cores. Called every `waits.tick_s`."""
        now = self._clock.now()
        for pooled in list(self._parked.values()):
            if pooled.give_up_at is not None and now >= pooled.give_up_at:
                self._give_up(pooled)
            elif now >= pooled.retry_at:
                self._go_on(pooled)
        for core in self._streams:
            well = [each for each in self._streams if each is not core and each.is_well(now, self._waits.suspect_s)]
            failing = bool(well) and self._fails(core, now)
            moving = [each for each in self._of(core) if each.fits_any(well)] if failing else []
            if moving:
                logger.warning("engine core %s makes no progress; its requests move to another", core.load.engine_id)
                core.failed(now)
            for pooled in moving:
                self._move(pooled)

    def _fails(self, core: Core, now: float) -> bool:
        """Whether the engine core has requests, and is silent or makes no progress with any of them."""
        oldest_at = min((pooled.sent_at for pooled in self._of(core)), default=now)
        stuck = now - max(core.got_on_at, oldest_at) >= self._waits.stuck_s
        return oldest_at < now and (stuck or now - core.heard_at >= self._waits.suspect_s)

    def _of(self, core: Core) -> list[PooledRequest]:
        return [pooled for pooled in self._open.values() if pooled.core is core]

    def _look_again(self, core: Core) -> None:
        """Move requests that the workers or the model now on this engine core can never continue."""
        for pooled in self._of(core):
            obstacle = pooled.obstacle(core)
            pooled.vocab_size = pooled.vocab_size or core.view.vocab_size
            if obstacle is not None and obstacle.final:
                self._move(pooled)

    def _move(self, pooled: PooledRequest) -> None:
        self._send_abort(pooled)
        self._attempt_over(pooled, self._clock.now())

    def on_accepted(self, core: Core, accepted: pb.Accepted) -> None:
        if (pooled := self._current(core, accepted.request_id, accepted.attempt)) is not None:
            pooled.settled()
            pooled.generation.admitted.set()
            pooled.streams = range(accepted.stream, accepted.stream + pooled.request.record.task.params.n)
            self._streams[core] |= {number: (pooled, choice) for choice, number in enumerate(pooled.streams)}

    def on_rejected(self, core: Core, rejected: pb.Rejected) -> None:
        """A lost request retries for as long as it may wait; a new one asks the other engine cores, and then fails."""
        pooled = self._current(core, rejected.request_id, rejected.attempt)
        if pooled is None:
            return
        code = error_code_from(rejected.code) or ErrorCode.INTERNAL
        pooled.none_taken &= rejected.of_all
        if code in _RETRYABLE and pooled.give_up_at is not None:
            now, pause_s = self._clock.now(), min(max(RETRY_LEAST_S, rejected.retry_after_s), RETRY_MOST_S)
            return self._park(pooled, now, retry_at=now + pause_s, why=rejected.message)
        if code in _RETRYABLE and not pooled.request.num_output_tokens and self._ask_another(pooled):
            return None
        error = PagodaError(code, rejected.message, rejected.param or None, retry_after_s=rejected.retry_after_s)
        self._meter.refused(pooled.generation, error, pooled.kind_refused)
        if pooled.request.num_output_tokens and code in _RETRYABLE:
            error.code = ErrorCode.STREAM_INTERRUPTED
        self._fail_with(pooled, error)

    def _ask_another(self, pooled: PooledRequest) -> bool:
        """Submit a request without tokens to an engine core that has not refused it yet. False if none is left."""
        pooled.refused_by |= {pooled.core}
        left = [core for core in self._streams if pooled.fits(core) and core.works and core not in pooled.refused_by]
        core = choose(left, pooled.request.record, self._clock.now())
        if core is not None:
            self._forget_streams(pooled)
            self._submit(pooled, core)
        return core is not None

    def on_migrate(self, core: Core, migrate: pb.Migrate) -> None:
        if (pooled := self._current(core, migrate.request_id, migrate.attempt)) is not None:
            self._attempt_over(pooled, self._clock.now())

    def on_outputs(self, core: Core, outputs: pb.StepOutputs) -> bool:
        """Return whether any request got a token."""
        now, with_tokens = time.monotonic(), False
        tokens, streams = outputs.tokens, self._streams[core]
        for number, first_index, token_id in zip(tokens.streams, tokens.first_indexes, tokens.token_ids, strict=True):
            stream = streams.get(number)
            if stream is not None:
                with_tokens |= self._guarded(stream[0], self._on_next, stream[1], first_index, token_id, now)
        for message in outputs.deltas:
            if (pooled := self._current(core, message.request_id, message.attempt)) is not None:
                with_tokens |= self._guarded(pooled, self._on_message, message, now)
        if with_tokens:
            core.got_on()
        return with_tokens

    def _guarded(self, pooled: PooledRequest, work: Callable[..., bool], *given: Any) -> bool:
        try:
            return work(pooled, *given)
        except Exception:  # fails this request only: the session carries others
            logger.exception("request %s cannot continue", pooled.request.record.request_id)
            if self._pooled(pooled.generation) is pooled:
                self._fail(pooled, "an internal error", ErrorCode.INTERNAL)
            return False

    def _on_next(self, pooled: PooledRequest, choice: int, first_index: int, token_id: int, now: float) -> bool:
        request = pooled.generation.request
        if not request.take_next(choice, first_index, token_id):
            return self._on_delta(pooled, request.next_token(choice, first_index, token_id), now)
        pooled.losing_since = None
        self._on_news(pooled, choice, 1, now)
        return True

    def _on_message(self, pooled: PooledRequest, message: pb.Delta, now: float) -> bool:
        return self._on_delta(pooled, delta_from_pb(message), now)

    def _on_delta(self, pooled: PooledRequest, delta: Delta, now: float) -> bool:
        had_output = delta.has_output
        taken = pooled.request.take(delta)
        if taken is Taken.GAP:
            self._on_gap(pooled)
        if taken is not Taken.NEWS:
            return False
        if had_output:
            pooled.losing_since = None
        self._on_news(pooled, delta.choice, len(delta.tokens.token_ids), now)
        if pooled.request.ended:
            self._ended(pooled)
        return had_output

    def _on_news(self, pooled: PooledRequest, choice: int, num_tokens: int, now: float) -> None:
        pooled.settled()
        self._meter.tokens(pooled.generation, choice, num_tokens, now)
        pooled.generation.wake()

    def _on_gap(self, pooled: PooledRequest) -> None:
        """Tokens are missing: the tokens so far can be trusted, the rest of this attempt cannot."""
        self._metrics.gaps.inc()
        pooled.gaps += 1
        if pooled.gaps > MAX_GAPS:
            self._fail(pooled, "the engine core's output had holes", ErrorCode.PROTOCOL_ERROR)
        else:
            self._attempt_over(pooled, self._clock.now())

    def _current(self, core: Core, request_id: str, attempt: int) -> PooledRequest | None:
        """The open request that a frame is about; None if the frame belongs to an earlier attempt."""
        pooled = self._open.get(request_id)
        return pooled if pooled and pooled.core is core and pooled.request.attempt == attempt else None

    # Parking and resubmitting

    def _attempt_over(self, pooled: PooledRequest, now: float) -> None:
        lasted = now - pooled.sent_at > self._waits.losing_s  # an attempt this long breaks a series of losses
        pooled.losing_since = now if pooled.losing_since is None or lasted else pooled.losing_since
        losing_s = now - pooled.losing_since
        if losing_s > self._waits.losing_s:
            self._fail(pooled, f"it was lost again and again, and got no token for {losing_s:.0f} s")
            return
        self._park(pooled, now)
        if not pooled.request.ended:
            self._go_on(pooled)

    def _park(self, pooled: PooledRequest, now: float, retry_at: float = 0.0, why: str = "") -> None:
        """The deadline counts from the loss: it does not move until the request is accepted, or lost again."""
        if pooled.request.wants_nothing_more:
            self._end_here(pooled)
            return
        self._forget_streams(pooled)
        pooled.request.attempt += not pooled.parked
        pooled.core, pooled.parked_at = None, now
        self._parked[pooled.request.record.request_id] = pooled
        pooled.retry_at, pooled.why = retry_at, why or pooled.why
        if pooled.give_up_at is None:
            pooled.give_up_at = now + self._waits.resume_s

    def _go_on(self, pooled: PooledRequest) -> None:
        """Resubmit to an engine core that can continue the request; without one, it stays parked or fails."""
        core = self._choice(pooled)
        if core is None:
            self._held_up(pooled)
            return
        pooled.parked_at, pooled.retry_at = None, 0.0
        del self._parked[pooled.request.record.request_id]
        self._metrics.resumed.inc()
        self._submit(pooled, core)

    def _choice(self, pooled: PooledRequest) -> Core | None:
        """Choose an engine core that can take the request. One that has it already deals with other numerics itself."""
        return choose(filter(pooled.fits, self._streams), pooled.request.record, self._clock.now())

    def _held_up(self, pooled: PooledRequest) -> None:
        """No engine core can continue it now. If none ever will, it ends here."""
        obstacles = [obstacle for core in self._streams if core.usable and (obstacle := pooled.obstacle(core))]
        passing = next((obstacle for obstacle in obstacles if not obstacle.final), None)
        if passing is not None and pooled.parked_at is not None:
            pooled.why = passing.why
            pooled.give_up_at = pooled.parked_at + self._waits.no_worker_s
        elif obstacles and len(obstacles) == len(self._streams):
            self._fail(pooled, f"the request cannot go on: {obstacles[0].why}")
        elif obstacles:
            pooled.why = obstacles[0].why

    def _give_up(self, pooled: PooledRequest) -> None:
        lost = f"the engine core was lost and none took over within {self._waits.resume_s:g} s"
        self._fail(pooled, f"the request could not go on: {pooled.why}" if pooled.why else lost)

    # Endings

    def _fail(self, pooled: PooledRequest, why: str, code: ErrorCode | None = None) -> None:
        lost = ErrorCode.STREAM_INTERRUPTED if pooled.request.num_output_tokens else ErrorCode.UNAVAILABLE
        self._send_abort(pooled)
        self._fail_with(pooled, PagodaError(code or lost, why, retry_after_s=self._retry_after_s(self._clock.now())))

    def _fail_with(self, pooled: PooledRequest, error: PagodaError) -> None:
        pooled.request.fail(error)
        self._ended(pooled)

    def _end_here(self, pooled: PooledRequest) -> None:
        pooled.request.end_here()
        self._ended(pooled)

    def _ended(self, pooled: PooledRequest) -> None:
        """The one way out of the pool."""
        del self._open[pooled.request.record.request_id]
        self._parked.pop(pooled.request.record.request_id, None)
        self._forget_streams(pooled)
        pooled.generation.wake()
        self._meter.ended(pooled.generation, time.monotonic())

    def _forget_streams(self, pooled: PooledRequest) -> None:
        """Drop the stream numbers of an attempt that is over."""
        if pooled.core is not None:
            for number in pooled.streams:
                self._streams[pooled.core].pop(number, None)
        pooled.streams = range(0)

    # Frames

    def _submit(self, pooled: PooledRequest, core: Core) -> None:
        self._guarded(pooled, self._offer, core)

    def _offer(self, pooled: PooledRequest, core: Core) -> bool:
        request = pooled.request
        pooled.vocab_size = pooled.vocab_size or core.view.vocab_size
        pooled.core, pooled.sent_at = core, self._clock.now()
        core.sent += 1
        if core.send is not None:
            resume = resume_to_pb(request.resume()) if request.attempt else None
            submit = pb.Submit(record=record_to_pb(request.record), attempt=request.attempt, resume=resume)
            core.send(pb.ClientFrame(submit=submit))
        return True

    def _send_abort(self, pooled: PooledRequest, choices: tuple[int, ...] = ()) -> None:
        """Best effort: an engine core that is gone, or does not have the request, needs no abort."""
        if pooled.core is not None and pooled.core.send is not None:
            abort = pb.Abort(request_id=pooled.request.record.request_id, choices=choices)
            pooled.core.send(pb.ClientFrame(abort=abort))
