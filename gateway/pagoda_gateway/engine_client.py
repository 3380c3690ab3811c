"""A request outlives the session that carries it: when the session breaks, its record goes out again with its tokens.

`SessionClient` keeps one `Engine.Session` stream to one engine core and multiplexes all requests on it. The registry
`_open` holds every request without an ending and nothing else. Only the event loop's thread touches it.

A lost or moved request is *parked* until an engine core that is not draining is connected; then it is submitted with a
higher attempt. Parked for longer than `resume_wait_s` it ends: `stream_interrupted` when tokens had been received,
`unavailable` otherwise. A new request waits up to `SUBMIT_WAIT_S` for a connection before it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time

import grpc
import msgspec

from pagoda_gateway.engine_session import EngineAddress, session_frames
from pagoda_gateway.live import LiveRequest
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_gateway.open_request import OpenRequest, Taken
from pagoda_proto.convert import delta_from_pb, error_code_from, load_from_pb, prior_to_pb, record_to_pb
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Load, RequestRecord

SUBMIT_WAIT_S = 2.0
PARKED_CHECK_S = 0.1
BACKOFF_FIRST_S = 0.05
BACKOFF_MOST_S = 1.0
MAX_GAPS = 3
MAX_FRUITLESS_LOSSES = 5
_NO_ENGINE = Load(engine_id="")

logger = logging.getLogger(__name__)


class SessionClient:
    """Implements `EngineClient`. Call `start` once inside the loop, and `aclose` at the end."""

    def __init__(self, address: EngineAddress, resume_wait_s: float, metrics: GatewayMetrics) -> None:
        self._address = address
        self._resume_wait_s = resume_wait_s
        self._metrics = metrics
        self._open: dict[str, LiveRequest] = {}
        self._parked: dict[str, LiveRequest] = {}
        self._outbox: asyncio.Queue[pb.ClientFrame] = asyncio.Queue()
        self._load = _NO_ENGINE
        self._connected = False
        self._usable = asyncio.Event()  # connected, and the engine core takes new requests
        self._task: asyncio.Task[None] | None = None
        self.last_progress_at = -float("inf")  # monotonic; when a token last came
        metrics.watch_engine(lambda: self._load, lambda: self._connected, lambda: len(self._open))

    @property
    def load(self) -> Load:
        """The engine core's last word; without a connection no workers, the limits stay."""
        return self._load

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def alive(self) -> bool:
        """Whether the task that keeps the session is running."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_session(), name="engine-session")

    async def aclose(self) -> None:
        """End what is open and leave."""
        self.end_all("the gateway is shutting down")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def end_all(self, why: str) -> None:
        for live in list(self._open.values()):
            self._send_abort(live, ())
            self._fail(live, why)

    # Requests

    async def submit(self, record: RequestRecord, *, canary: bool = False) -> LiveRequest:
        """Send a record and wait until the engine core took it.

        A canary is an ordinary request that the metrics of users' requests do not count.

        Raises:
            PagodaError: UNAVAILABLE without an engine core, or what the engine core refused it with.
        """
        await self._wait_usable()
        live = LiveRequest(OpenRequest(record), self, counted=not canary, now=time.monotonic())
        if record.request_id in self._open:
            raise PagodaError(ErrorCode.INTERNAL, f"request id {record.request_id} is in use")
        live.fingerprint = self._load.model_fingerprint
        self._open[record.request_id] = live
        self._send_submit(live)
        try:
            await live.admitted.wait()
        except asyncio.CancelledError:
            self.release(live)
            raise
        if live.request.error is not None and not live.request.num_output_tokens:
            raise live.request.error
        return live

    async def _wait_usable(self) -> None:
        try:
            async with asyncio.timeout(SUBMIT_WAIT_S):
                while not self._usable.is_set():
                    await self._usable.wait()
        except TimeoutError:
            why = "is draining" if self._connected else "is not connected"
            self._metrics.refused(ErrorCode.UNAVAILABLE)
            raise PagodaError(ErrorCode.UNAVAILABLE, f"the engine core {why}", retry_after_s=1.0) from None

    def abort(self, live: LiveRequest, choices: tuple[int, ...]) -> None:
        """Ask the engine core to stop choices; without one, a request that wants nothing more ends here."""
        if live.request.ended:
            return
        live.request.close(choices)
        self._send_abort(live, choices)
        if live.request.wants_nothing_more and (live.parked or not self._connected):
            self._end_here(live)

    def release(self, live: LiveRequest) -> None:
        """The consumer is gone. Nothing of the request stays here; the engine core is told."""
        if not live.request.ended:
            self._send_abort(live, ())
            live.request.drop()
            live.observe_ending(self._metrics, time.monotonic())
        self._forget(live)

    def _send_submit(self, live: LiveRequest) -> None:
        request = live.request
        submit = pb.Submit(
            record=record_to_pb(request.record),
            attempt=request.attempt,
            prior_outputs=[prior_to_pb(prior) for prior in request.prior_outputs()],
        )
        self._outbox.put_nowait(pb.ClientFrame(submit=submit))

    def _send_abort(self, live: LiveRequest, choices: tuple[int, ...]) -> None:
        """Best effort: an engine core that is gone, or does not have the request yet, needs none."""
        if self._connected and not live.parked:
            abort = pb.Abort(request_id=live.request.record.request_id, choices=choices)
            self._outbox.put_nowait(pb.ClientFrame(abort=abort))

    def _forget(self, live: LiveRequest) -> None:
        self._open.pop(live.request.record.request_id, None)
        self._unpark(live)
        live.admitted.set()
        live.news.set()

    def _fail(self, live: LiveRequest, why: str, code: ErrorCode | None = None) -> None:
        begun = live.request.num_output_tokens > 0
        code = code or (ErrorCode.STREAM_INTERRUPTED if begun else ErrorCode.UNAVAILABLE)
        self._fail_with(live, PagodaError(code, why, retry_after_s=1.0))

    def _fail_with(self, live: LiveRequest, error: PagodaError) -> None:
        live.request.fail(error)
        live.observe_ending(self._metrics, time.monotonic())
        self._forget(live)

    def _end_here(self, live: LiveRequest) -> None:
        live.request.end_here()
        live.observe_ending(self._metrics, time.monotonic())
        self._forget(live)

    # Loss and return

    def _park(self, live: LiveRequest, now: float, retry_at: float = 0.0) -> None:
        """The attempt is over; the request waits for an engine core. The deadline counts from the loss."""
        if live.request.wants_nothing_more:
            self._end_here(live)
            return
        live.request.attempt += 1
        live.parked = True
        live.retry_at = retry_at
        live.give_up_at = live.give_up_at or now + self._resume_wait_s
        if not self._parked:
            asyncio.get_running_loop().call_later(PARKED_CHECK_S, self._tend_parked)
        self._parked[live.request.record.request_id] = live

    def _unpark(self, live: LiveRequest) -> None:
        live.parked = False
        self._parked.pop(live.request.record.request_id, None)

    def _tend_parked(self) -> None:
        now = time.monotonic()
        for live in list(self._parked.values()):
            if now >= live.give_up_at:
                self._fail(live, f"the engine core was lost and none took over within {self._resume_wait_s:g} s")
            elif self._usable.is_set() and now >= live.retry_at:
                self._resubmit(live)
        if self._parked:
            asyncio.get_running_loop().call_later(PARKED_CHECK_S, self._tend_parked)

    def _resubmit(self, live: LiveRequest) -> None:
        self._unpark(live)
        if self._other_model(live):
            self._fail(live, "the engine core came back with another model")
            return
        self._metrics.resumed.inc()
        self._send_submit(live)

    def _other_model(self, live: LiveRequest) -> bool:
        now = self._load.model_fingerprint
        return bool(now and live.fingerprint) and now != live.fingerprint

    def _lose_session(self) -> None:
        """Every open request goes on with the next engine core, or the same one restarted."""
        now = time.monotonic()
        self._connected = False
        self._usable.clear()
        self._outbox = asyncio.Queue()
        self._load = msgspec.structs.replace(self._load, num_workers=0, num_running=0, num_waiting=0, kv_usage=0.0)
        for live in list(self._open.values()):
            if live.parked:
                continue
            live.fruitless_losses += 1
            live.give_up_at = 0.0
            if live.fruitless_losses > MAX_FRUITLESS_LOSSES:
                self._fail(live, f"the engine core was lost {live.fruitless_losses} times without a new token")
            else:
                self._park(live, now)

    # The session

    async def _keep_session(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        while True:
            try:
                async with contextlib.aclosing(session_frames(self._address, self._outbox)) as frames:
                    async for frame in frames:
                        self._on_frame(frame)
                        backoff_s = BACKOFF_FIRST_S
                reason = "ended by the engine core"
            except (grpc.aio.AioRpcError, TimeoutError, OSError) as exc:
                reason = exc.details() or "lost" if isinstance(exc, grpc.aio.AioRpcError) else type(exc).__name__
            except Exception as exc:  # a frame that cannot be understood costs its session, not us
                reason = f"unreadable: {type(exc).__name__}"
                logger.exception("engine core session: unreadable frame")
            if self._connected:
                self._metrics.sessions_lost.inc()
                logger.warning("engine core session %s; %d requests wait for another", reason, len(self._open))
                self._lose_session()
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_MOST_S)

    def _on_frame(self, frame: pb.ServerFrame) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "outputs":
            self._on_outputs(frame.outputs)
        elif kind == "load":
            self._on_load(load_from_pb(frame.load))
        elif kind == "accepted":
            self._on_accepted(frame.accepted)
        elif kind == "rejected":
            self._on_rejected(frame.rejected)
        elif kind == "migrate":
            self._on_migrate(frame.migrate)

    def _on_load(self, load: Load) -> None:
        if not self._connected:
            logger.info("engine core %s connected; %d requests to resume", load.engine_id, len(self._parked))
        self._connected = True
        self._load = load
        if load.draining:
            self._usable.clear()
            return
        self._usable.set()
        for live in [live for live in self._parked.values() if not live.retry_at]:
            self._resubmit(live)
        if load.model_fingerprint:
            self._check_models()

    def _check_models(self) -> None:
        for live in list(self._open.values()):
            if self._other_model(live):
                self._send_abort(live, ())
                self._fail(live, "the engine core now serves another model")
            live.fingerprint = self._load.model_fingerprint

    def _current(self, request_id: str, attempt: int) -> LiveRequest | None:
        """The open request a frame speaks of, unless it speaks of an earlier attempt."""
        live = self._open.get(request_id)
        return live if live is not None and not live.parked and live.request.attempt == attempt else None

    def _on_accepted(self, accepted: pb.Accepted) -> None:
        live = self._current(accepted.request_id, accepted.attempt)
        if live is not None:
            live.give_up_at = 0.0
            live.admitted.set()

    def _on_rejected(self, rejected: pb.Rejected) -> None:
        live = self._current(rejected.request_id, rejected.attempt)
        if live is None:
            return
        code = error_code_from(rejected.code) or ErrorCode.INTERNAL
        if code is ErrorCode.UNAVAILABLE and live.give_up_at:
            now = time.monotonic()
            self._park(live, now, retry_at=now + 2 * PARKED_CHECK_S)
            return
        if live.counted:
            self._metrics.refused(code)
        error = PagodaError(code, rejected.message, rejected.param or None, retry_after_s=rejected.retry_after_s)
        self._fail_with(live, error)

    def _on_migrate(self, migrate: pb.Migrate) -> None:
        live = self._current(migrate.request_id, migrate.attempt)
        if live is not None:
            now = time.monotonic()
            self._park(live, now)
            if live.parked and self._usable.is_set():
                self._resubmit(live)

    def _on_outputs(self, outputs: pb.StepOutputs) -> None:
        now = time.monotonic()
        for message in outputs.deltas:
            live = self._current(message.request_id, message.attempt)
            if live is None:
                continue
            delta = delta_from_pb(message)
            taken = live.request.take(delta)
            if taken is Taken.NEWS:
                if delta.token_ids:
                    self.last_progress_at = now
                live.on_news(delta, self._metrics, now)
                if live.request.ended:
                    self._forget(live)
            elif taken is Taken.GAP:
                self._on_gap(live)

    def _on_gap(self, live: LiveRequest) -> None:
        """Tokens are missing: this attempt cannot be trusted, the tokens so far can."""
        self._metrics.gaps.inc()
        live.gaps += 1
        if live.gaps > MAX_GAPS:
            self._send_abort(live, ())
            self._fail(live, "the engine core's output had holes", ErrorCode.PROTOCOL_ERROR)
            return
        self._park(live, time.monotonic())
        if live.parked:
            self._resubmit(live)
