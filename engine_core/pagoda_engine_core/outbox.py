"""What waits for a slow reader grows with the number of choices, not with the number of steps: deltas merge."""

from __future__ import annotations

from pagoda_proto import convert
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import PagodaError
from pagoda_proto.records import Delta, Load
from pagoda_proto.steps import TopLogprobs

MAX_WAITING_NUMBERS = 4_000_000
"""Token ids and log-probabilities that may wait; a reader that far behind has lost its session."""
MAX_FRAME_NUMBERS = 1_000_000


class Outbox:
    """What one session has not been sent yet, in the order that makes sense to it.

    It owns the deltas it is given: they are extended in place.
    """

    def __init__(self) -> None:
        self.num_waiting_numbers = 0
        self._answers: list[pb.ServerFrame] = []
        self._deltas: list[Delta] = []
        self._last: dict[tuple[str, int], Delta] = {}  # the newest waiting delta of each choice
        self._migrations: list[pb.ServerFrame] = []
        self._load: Load | None = None

    @property
    def overfull(self) -> bool:
        return self.num_waiting_numbers > MAX_WAITING_NUMBERS

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

    def migrate(self, request_id: str, attempt: int, reason: str) -> None:
        frame = pb.Migrate(request_id=request_id, attempt=attempt, reason=reason)
        self._migrations.append(pb.ServerFrame(migrate=frame))

    def load(self, load: Load) -> None:
        """Only the newest is worth sending."""
        self._load = load

    def deltas(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.num_waiting_numbers += count_numbers(delta)
            key = (delta.request_id, delta.choice)
            last = self._last.get(key)
            if last is None or not merge(last, delta):
                self._deltas.append(delta)
                self._last[key] = delta

    def take_deltas(self) -> list[Delta]:
        taken, self._deltas = self._deltas, []
        self._last.clear()
        self.num_waiting_numbers = 0
        return taken

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


def merge(last: Delta, new: Delta) -> bool:
    """Let `last` say what both say; False when they are not neighbours in the same attempt of one choice."""
    adjacent = last.first_index + len(last.token_ids) == new.first_index
    if last.attempt != new.attempt or last.finish_reason is not None or not adjacent:
        return False
    last.token_ids.extend(new.token_ids)
    last.logprobs = _joined(last.logprobs, new.logprobs)
    last.prompt_logprobs = _joined(last.prompt_logprobs, new.prompt_logprobs)
    for name in ("finish_reason", "stop_token_id", "error_code", "error_message", "usage", "ledger"):
        setattr(last, name, getattr(new, name))
    return True


def count_numbers(delta: Delta) -> int:
    entries = (*(delta.logprobs or ()), *(delta.prompt_logprobs or ()))
    return 1 + len(delta.token_ids) + sum(2 + 2 * len(entry.top_ids) for entry in entries)


def _joined(first: list[TopLogprobs] | None, second: list[TopLogprobs] | None) -> list[TopLogprobs] | None:
    if first is None or second is None:
        return first if second is None else second
    first.extend(second)
    return first


def _step_outputs(deltas: list[Delta]) -> list[pb.ServerFrame]:
    frames: list[pb.ServerFrame] = []
    room = 0
    for delta in deltas:
        numbers = count_numbers(delta)
        if room < numbers or not frames:
            frames.append(pb.ServerFrame(outputs=pb.StepOutputs()))
            room = MAX_FRAME_NUMBERS
        frames[-1].outputs.deltas.append(convert.delta_to_pb(delta))
        room -= numbers
    return frames
