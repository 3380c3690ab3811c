"""An engine core on a scripted executor."""

from __future__ import annotations

from collections.abc import Sequence

from tests.engine_core.fakes_sink import RecordingSink, ScriptedExecutor
from tests.fakes import ManualClock

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.engine import EngineCore
from pagoda_engine_core.grammars.checker import Checker
from pagoda_proto.records import Begun, PriorOutput, RequestRecord, Resume


class Bench:
    """An engine core on a scripted executor and a clock of its own; `settle` runs it until nothing moves."""

    def __init__(self, checker: Checker | None = None, **config: object) -> None:
        self.clock = ManualClock(1000.0)
        self.executor = ScriptedExecutor()
        self.engine = EngineCore(EngineConfig(**config), self.executor, self.clock, checker=checker)
        self.sink = RecordingSink()

    def submit(
        self, record: RequestRecord, attempt: int = 0, prior: Sequence[PriorOutput] = (), begun: Begun | None = None
    ) -> str:
        self.engine.submit(record, self.sink, attempt, Resume(prior_outputs=tuple(prior), begun=begun))
        return record.request_id

    def settle(self) -> None:
        while self.executor.answer_all() or self.engine.step(0):
            self.clock.advance(0.01)

    def pass_time(self, seconds: float) -> None:
        """Let time pass while the engine core runs; a single leap of the clock would count as its own stall."""
        for _ in range(round(seconds / 0.25)):
            self.clock.advance(0.25)
            self.engine.step(0)

    def deltas(self, request_id: str) -> list[list[int]]:
        return self.sink.choices(request_id)
