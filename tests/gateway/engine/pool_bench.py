"""A request pool whose clock and engine cores the test controls."""

from __future__ import annotations

from typing import Any

from tests.gateway.streams import record, waits

from pagoda_gateway.engine.cores import Core
from pagoda_gateway.engine.model_view import ModelView
from pagoda_gateway.engine.pooled_generation import PooledGeneration
from pagoda_gateway.engine.request_meter import RequestMeter
from pagoda_gateway.engine.request_pool import RequestPool
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.convert import begun_to_pb
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import Begun, Load
from pagoda_proto.times import LivedClock

HERE = ModelView(fingerprint="m1", numerics_id="n1", vocab_size=512)
BEGUN = Begun(model_fingerprint="m1", numerics_id="n1", cached_prompt_tokens=2)


class Bench:
    """A pool whose clock and engine cores this test controls."""

    def __init__(self, meter: type[RequestMeter] = RequestMeter, num_cores: int = 1, **times: float) -> None:
        self.now = 100.0
        self.place: dict[tuple[str, int], Core] = {}  # (request id, attempt) -> the engine core it was sent to
        self.metrics = GatewayMetrics("m")
        self.sent: list[pb.ClientFrame] = []
        self.meter = meter(self.metrics, log_requests=True)
        clock = LivedClock(1e9, lambda: self.now)
        self.waits = waits(**times)
        self.pool = RequestPool(clock, self.waits, self.metrics, self.meter, lambda now: 7.0)
        self.cores = [Core(name=str(number)) for number in range(num_cores)]
        self.core = self.cores[0]
        for core in self.cores:
            self.pool.add(core)
            self.meet(core=core)

    def meet(
        self, view: ModelView = HERE, *, usable: bool = True, num_workers: int = 1, core: Core | None = None
    ) -> None:
        core = core or self.core

        def send(frame: pb.ClientFrame) -> None:
            self.sent.append(frame)
            if frame.HasField("submit"):
                self.place[frame.submit.record.request_id, frame.submit.attempt] = core

        core.send, core.usable, core.sent, core.heard_at = send, usable, 0, self.now
        core.load = Load(engine_id=core.name, num_workers=num_workers, draining=not usable)
        self.pool.meet(core, view)

    def lose(self, core: Core | None = None) -> None:
        core = core or self.core
        core.send, core.usable, core.load = None, False, Load(engine_id=core.name)
        self.pool.lose(core)

    def core_and_other(self, generation: PooledGeneration) -> tuple[Core, Core]:
        """The request's engine core, and the other of the two."""
        first = self.core_of(generation)
        (second,) = [core for core in self.cores if core is not first]
        return first, second

    def core_of(self, generation: PooledGeneration) -> Core:
        """The engine core of its last attempt, or, while it is parked, of the one before."""
        request = generation.request
        name = request.record.request_id
        return self.place.get((name, request.attempt)) or self.place[name, request.attempt - 1]

    def open(self, **params: Any) -> PooledGeneration:
        return self.pool.open(record(**params), counted=True)

    def submits(self, generation: PooledGeneration) -> list[pb.Submit]:
        name = generation.request.record.request_id
        return [f.submit for f in self.sent if f.HasField("submit") and f.submit.record.request_id == name]

    def tokens(self, generation: PooledGeneration, *tokens: int, at: int = 0, begun: Begun | None = BEGUN) -> None:
        delta = pb.Delta(
            request_id=generation.request.record.request_id,
            attempt=generation.request.attempt,
            tokens=pb.Tokens(first_index=at, token_ids=tokens),
        )
        if begun is not None and not at:
            delta.tokens.begun.CopyFrom(begun_to_pb(begun))
        self.pool.on_outputs(self.core_of(generation), pb.StepOutputs(deltas=[delta]))

    def last(self, generation: PooledGeneration, token: int) -> None:
        delta = pb.Delta(
            request_id=generation.request.record.request_id,
            tokens=pb.Tokens(token_ids=[token]),
            finish_reason=pb.FINISH_REASON_STOP,
            usage=pb.Usage(),
        )
        self.pool.on_outputs(self.core_of(generation), pb.StepOutputs(deltas=[delta]))

    def reject(self, generation: PooledGeneration, code: str, message: str = "no", **said: Any) -> None:
        about = {"request_id": generation.request.record.request_id, "attempt": generation.request.attempt}
        self.pool.on_rejected(self.core_of(generation), pb.Rejected(code=code, message=message, **said, **about))

    def accept(self, generation: PooledGeneration, stream: int = 0) -> None:
        about = {"request_id": generation.request.record.request_id, "attempt": generation.request.attempt}
        self.pool.on_accepted(self.core_of(generation), pb.Accepted(stream=stream, **about))

    def column(self, *entries: tuple[int, int, int]) -> None:
        """Send one column of tokens; each entry is (stream number, index, token)."""
        streams, indexes, tokens = zip(*entries, strict=True)
        columns = pb.NextTokens(streams=streams, first_indexes=indexes, token_ids=tokens)
        self.pool.on_outputs(self.core, pb.StepOutputs(tokens=columns))

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.pool.tend()


def ending(generation: PooledGeneration) -> tuple[ErrorCode | None, str]:
    assert generation.request.ended
    assert generation.request.error is not None
    return generation.request.error.code, generation.request.error.message


def tokens_of(generation: PooledGeneration) -> list[list[int]]:
    return [list(output.token_ids) for output in generation.request.resume().prior_outputs]
