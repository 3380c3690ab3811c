"""A request outlives the session that carries it: when the session breaks, its record goes out again with its tokens.

The pool keeps every request without an ending, and nothing else. One whose attempt is over (its session broke, it was
told to move, tokens were missing) is *parked* until there is an engine core that takes requests and has the weights
and numerics it began under; then it is submitted with a higher attempt. What a request waits for decides how long:

    an engine core                                        waits.resume_s since it was lost
    workers of its numerics, where the engine core stands  waits.no_worker_s since it was lost
    a new token, while it is lost again and again          waits.losing_s since the first of these losses

It ends with the best reason known: the engine core's own before "lost". All times are `LivedClock`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pagoda_gateway.engine.endings import Endings
from pagoda_gateway.engine.live import LiveRequest
from pagoda_gateway.engine.model_view import ModelView
from pagoda_gateway.engine.open_request import OpenRequest, Taken
from pagoda_gateway.engine.waits import Waits
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.convert import delta_from_pb, error_code_from, record_to_pb, resume_to_pb
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import RequestRecord
from pagoda_proto.times import LivedClock

RETRY_LEAST_S = 0.2
RETRY_MOST_S = 2.0
MAX_GAPS = 3
_RETRYABLE = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)

Send = Callable[[pb.ClientFrame], None]

logger = logging.getLogger(__name__)


@dataclass
class Carried:
    """The pool's books about one open request. `give_up_at` runs from the loss until it is taken again, None while
    nothing is lost; `why` is what its present wait is said to be for, "" for an engine core; `losing_since` is when it
    was first lost since its last token.
    """

    live: LiveRequest
    vocab_size: int
    parked_at: float | None = None
    retry_at: float = 0.0
    give_up_at: float | None = None
    losing_since: float | None = None
    why: str = ""
    gaps: int = 0

    @property
    def request(self) -> OpenRequest:
        return self.live.request

    @property
    def parked(self) -> bool:
        return self.parked_at is not None

    def settled(self) -> None:
        """An engine core took it: no wait is running."""
        self.give_up_at = None
        self.why = ""


class RequestPool:
    """Implements `Carrier`. One per gateway; only the event loop's thread touches it.

    `retry_after_s` tells those that fail here when an engine core is expected.
    """

    def __init__(
        self,
        clock: LivedClock,
        waits: Waits,
        metrics: GatewayMetrics,
        endings: Endings,
        retry_after_s: Callable[[float], float],
    ) -> None:
        self._clock = clock
        self._waits = waits
        self._metrics = metrics
        self._endings = endings
        self._retry_after_s = retry_after_s
        self._open: dict[str, Carried] = {}
        self._parked: dict[str, Carried] = {}  # a part of `_open`
        self._send: Send | None = None
        self._view = ModelView()
        self._usable = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    # What consumers ask

    def open(self, record: RequestRecord, *, counted: bool) -> LiveRequest:
        """Submit a record to the engine core that is there.

        Raises:
            PagodaError: INTERNAL, the id is in use.
        """
        if record.request_id in self._open:
            raise PagodaError(ErrorCode.INTERNAL, f"request id {record.request_id} is in use")
        live = LiveRequest(OpenRequest(record), self, counted=counted, now=time.monotonic())
        carried = Carried(live, self._view.vocab_size)
        self._open[record.request_id] = carried
        if self._usable:
            self._submit(carried)
        else:
            self._park(carried, self._clock.now())
        return live

    def abort(self, live: LiveRequest, choices: tuple[int, ...]) -> None:
        """Ask the engine core to stop choices; without one, a request that wants nothing more ends here."""
        carried = self._carried(live)
        if carried is None or live.request.ended:
            return
        live.request.close(choices)
        self._send_abort(carried, choices)
        if live.request.wants_nothing_more and (carried.parked or self._send is None):
            self._end_here(carried)

    def release(self, live: LiveRequest) -> None:
        """The consumer is gone. Nothing of the request stays here; the engine core is told."""
        carried = self._carried(live)
        if carried is not None:
            self._send_abort(carried, ())
            live.request.drop()
            self._ended(carried)

    def fail_all(self, why: str) -> None:
        for carried in list(self._open.values()):
            self._fail(carried, why)

    def _carried(self, live: LiveRequest) -> Carried | None:
        carried = self._open.get(live.request.record.request_id)
        return carried if carried is not None and carried.live is live else None

    # What the session tells

    def meet(self, view: ModelView, send: Send, *, usable: bool) -> None:
        """An engine core is there, or has other workers than before, or takes no more requests."""
        same_model = view == self._view
        self._send, self._view, self._usable = send, view, usable
        if not same_model:
            for carried in [carried for carried in self._open.values() if not carried.parked]:
                self._check_running(carried)
        if usable:
            for carried in [carried for carried in self._parked.values() if not carried.retry_at]:
                self._go_on(carried)

    def lose(self) -> None:
        """The session is over: every open request goes on with the next engine core, or the same one restarted."""
        self._send = None
        self._usable = False
        now = self._clock.now()
        for carried in list(self._open.values()):
            carried.settled()
            self._attempt_over(carried, now)

    def tend(self) -> None:
        """Whose wait is over, whose turn to try again it is. Called every `waits.tick_s`."""
        now = self._clock.now()
        for carried in list(self._parked.values()):
            if carried.give_up_at is not None and now >= carried.give_up_at:
                self._give_up(carried)
            elif self._usable and now >= carried.retry_at:
                self._go_on(carried)

    def on_accepted(self, accepted: pb.Accepted) -> None:
        carried = self._current(accepted.request_id, accepted.attempt)
        if carried is not None:
            carried.settled()
            carried.live.admitted.set()

    def on_rejected(self, rejected: pb.Rejected) -> None:
        """A refusal is final for a new request. One that was lost asks again for as long as it may wait."""
        carried = self._current(rejected.request_id, rejected.attempt)
        if carried is None:
            return
        code = error_code_from(rejected.code) or ErrorCode.INTERNAL
        if code in _RETRYABLE and carried.give_up_at is not None:
            now = self._clock.now()
            pause_s = min(max(RETRY_LEAST_S, rejected.retry_after_s), RETRY_MOST_S)
            self._park(carried, now, retry_at=now + pause_s, why=rejected.message)
            return
        if carried.live.counted:
            self._metrics.refused(code)
        if carried.request.num_output_tokens and code in _RETRYABLE:
            code = ErrorCode.STREAM_INTERRUPTED
        error = PagodaError(code, rejected.message, rejected.param or None, retry_after_s=rejected.retry_after_s)
        self._fail_with(carried, error)

    def on_migrate(self, migrate: pb.Migrate) -> None:
        carried = self._current(migrate.request_id, migrate.attempt)
        if carried is not None:
            self._attempt_over(carried, self._clock.now())

    def on_outputs(self, outputs: pb.StepOutputs) -> bool:
        """Whether a token came for anybody."""
        now = time.monotonic()
        with_tokens = False
        for message in outputs.deltas:
            carried = self._current(message.request_id, message.attempt)
            if carried is not None:
                with_tokens |= self._on_delta(carried, message, now)
        return with_tokens

    def _on_delta(self, carried: Carried, message: pb.Delta, now: float) -> bool:
        delta = delta_from_pb(message)
        num_tokens = len(delta.result.token_ids)
        taken = carried.request.take(delta)
        if taken is Taken.GAP:
            self._on_gap(carried)
        if taken is not Taken.NEWS:
            return False
        carried.settled()
        if num_tokens:
            carried.losing_since = None
        self._endings.tokens(carried.live, delta, now)
        carried.live.wake()
        if carried.request.ended:
            self._ended(carried)
        return num_tokens > 0

    def _on_gap(self, carried: Carried) -> None:
        """Tokens are missing: this attempt cannot be trusted, the tokens so far can."""
        self._metrics.gaps.inc()
        carried.gaps += 1
        if carried.gaps > MAX_GAPS:
            self._fail(carried, "the engine core's output had holes", ErrorCode.PROTOCOL_ERROR)
        else:
            self._attempt_over(carried, self._clock.now())

    def _current(self, request_id: str, attempt: int) -> Carried | None:
        """The open request a frame speaks of, unless it speaks of an earlier attempt."""
        carried = self._open.get(request_id)
        is_current = carried is not None and not carried.parked and carried.request.attempt == attempt
        return carried if is_current else None

    # Waiting and going on

    def _attempt_over(self, carried: Carried, now: float) -> None:
        carried.losing_since = now if carried.losing_since is None else carried.losing_since
        losing_s = now - carried.losing_since
        if losing_s > self._waits.losing_s:
            self._fail(carried, f"it was lost again and again, and got no token for {losing_s:.0f} s")
            return
        self._park(carried, now)
        if carried.parked and self._usable:
            self._go_on(carried)

    def _park(self, carried: Carried, now: float, retry_at: float = 0.0, why: str = "") -> None:
        """The deadline counts from the loss: it stays where it is until the request is taken, or lost again."""
        if carried.request.wants_nothing_more:
            self._end_here(carried)
            return
        carried.request.attempt += not carried.parked
        carried.parked_at = now
        self._parked[carried.request.record.request_id] = carried
        carried.retry_at = retry_at
        carried.why = why or carried.why
        if carried.give_up_at is None:
            carried.give_up_at = now + self._waits.resume_s

    def _go_on(self, carried: Carried) -> None:
        """With the engine core that is there, unless its model is another one."""
        carried.vocab_size = carried.vocab_size or self._view.vocab_size
        obstacle = self._view.obstacle(carried.request.begun, carried.vocab_size)
        if obstacle is None:
            carried.parked_at = None
            carried.retry_at = 0.0
            del self._parked[carried.request.record.request_id]
            self._metrics.resumed.inc()
            self._submit(carried)
        elif obstacle.final:
            self._fail(carried, f"the request cannot go on: {obstacle.why}")
        elif carried.parked_at is not None:
            carried.why = obstacle.why
            carried.give_up_at = carried.parked_at + self._waits.no_worker_s

    def _check_running(self, carried: Carried) -> None:
        """Workers of other numerics are the engine core's own business as long as it holds the request."""
        carried.vocab_size = carried.vocab_size or self._view.vocab_size
        obstacle = self._view.obstacle(carried.request.begun, carried.vocab_size)
        if obstacle is not None and obstacle.final:
            self._fail(carried, f"the request cannot go on: {obstacle.why}")

    def _give_up(self, carried: Carried) -> None:
        lost = f"the engine core was lost and none took over within {self._waits.resume_s:g} s"
        self._fail(carried, f"the request could not go on: {carried.why}" if carried.why else lost)

    # Endings

    def _fail(self, carried: Carried, why: str, code: ErrorCode | None = None) -> None:
        begun = carried.request.num_output_tokens > 0
        code = code or (ErrorCode.STREAM_INTERRUPTED if begun else ErrorCode.UNAVAILABLE)
        self._send_abort(carried, ())
        self._fail_with(carried, PagodaError(code, why, retry_after_s=self._retry_after_s(self._clock.now())))

    def _fail_with(self, carried: Carried, error: PagodaError) -> None:
        carried.request.fail(error)
        self._ended(carried)

    def _end_here(self, carried: Carried) -> None:
        carried.request.end_here()
        self._ended(carried)

    def _ended(self, carried: Carried) -> None:
        """The one way out of the pool."""
        del self._open[carried.request.record.request_id]
        self._parked.pop(carried.request.record.request_id, None)
        self._endings.ended(carried.live, time.monotonic())
        carried.live.wake()

    # Frames

    def _submit(self, carried: Carried) -> None:
        request = carried.request
        resume = resume_to_pb(request.resume()) if request.attempt else None
        submit = pb.Submit(record=record_to_pb(request.record), attempt=request.attempt, resume=resume)
        if self._send is not None:
            self._send(pb.ClientFrame(submit=submit))

    def _send_abort(self, carried: Carried, choices: tuple[int, ...]) -> None:
        """Best effort: an engine core that is gone, or does not have the request yet, needs none."""
        if self._send is not None and not carried.parked:
            abort = pb.Abort(request_id=carried.request.record.request_id, choices=choices)
            self._send(pb.ClientFrame(abort=abort))
