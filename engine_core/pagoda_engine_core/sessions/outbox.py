"""What waits for a slow reader grows with the number of choices, not with the number of steps: deltas merge."""

from __future__ import annotations

from pagoda_proto import convert
from pagoda_proto.deltas import WaitingDeltas, count_numbers
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import PagodaError
from pagoda_proto.records import Delta, Load

MAX_WAITING_NUMBERS = 4_000_000
"""Token ids and log-probabilities that may wait; a reader that far behind has lost its session."""
MAX_FRAME_NUMBERS = 1_000_000


class Outbox:
    """What one session has not been sent yet, in the order that makes sense to it. It owns the deltas it is given."""

    def __init__(self) -> None:
        self._answers: list[pb.ServerFrame] = []
        self._deltas = WaitingDeltas()
        self._migrations: list[pb.ServerFrame] = []
        self._load: Load | None = None

    @property
    def overfull(self) -> bool:
        return self._deltas.num_numbers > MAX_WAITING_NUMBERS

    def accepted(self, request_id: str, attempt: int) -> None:
        self._answers.append(pb.ServerFrame(accepted=pb.Accepted(request_id=request_id, attempt=attempt)))

    def rejected(self, request_id: str, attempt: int, error: PagodaError, retry_after_s: float) -> None:
        rejected = pb.Rejected(
            request_id=request_id,
            attempt=attempt,
            code=error.code,
            message=error.message,
            param=error.param or "",
            retry_after_s=retry_after_s,
        )
        self._answers.append(pb.ServerFrame(rejected=rejected))

    def migrate(self, request_id: str, attempt: int) -> None:
        self._migrations.append(pb.ServerFrame(migrate=pb.Migrate(request_id=request_id, attempt=attempt)))

    def load(self, load: Load) -> None:
        """Only the newest is worth sending."""
        self._load = load

    def deltas(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._deltas.add(delta)

    def take_deltas(self) -> list[Delta]:
        return self._deltas.take()

    def take(self) -> list[pb.ServerFrame]:
        """Everything that waits, as frames; the outbox is empty afterwards."""
        frames, self._answers = self._answers, []
        frames += _step_outputs(self.take_deltas())
        frames += self._migrations
        self._migrations = []
        if self._load is not None:
            frames.append(pb.ServerFrame(load=convert.load_to_pb(self._load)))
            self._load = None
        return frames


def _step_outputs(deltas: list[Delta]) -> list[pb.ServerFrame]:
    frames: list[pb.ServerFrame] = []
    room = 0
    for delta in deltas:
        numbers = count_numbers(delta)
        if room < numbers or not frames:
            frames.append(pb.ServerFrame(outputs=pb.StepOutputs()))
            room = MAX_FRAME_NUMBERS
        convert.write_delta(delta, frames[-1].outputs.deltas.add())
        room -= numbers
    return frames
