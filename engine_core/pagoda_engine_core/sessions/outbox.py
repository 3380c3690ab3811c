"""Output that waits for a slow reader grows with the number of choices, not of steps, because deltas merge.

Deltas too large for one frame are sent in parts, all of them before any newer deltas, so that fast output starves none.
"""

from __future__ import annotations

from pagoda_engine_core.dispatch.answers import Full
from pagoda_proto import convert
from pagoda_proto.deltas import WaitingDeltas
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import PagodaError
from pagoda_proto.records import Delta, Load, NextTokens, Stream

MAX_WAITING_NUMBERS = 4_000_000
"""Most token ids and log-probabilities that may wait; a reader further behind loses its session."""
FRAME_NUMBERS = 50_000
"""Most numbers in a frame's deltas, unless the first has more. Writing them takes some 10 ms, while tokens wait."""
MAX_WAITING_COLUMN = 65_536
"""Most tokens that wait unmerged; if there are more, each choice's are merged into a delta."""


class Outbox:
    """Output that one session has not been sent yet, in a consistent order. It owns the deltas it is given."""

    def __init__(self, max_waiting_column: int = MAX_WAITING_COLUMN, frame_numbers: int = FRAME_NUMBERS) -> None:
        self._max_waiting_column = max_waiting_column
        self._frame_numbers = frame_numbers
        self._answers: list[pb.ServerFrame] = []
        self._tokens = NextTokens()
        self._leaving = WaitingDeltas()  # sent after the tokens, in parts
        self._last: list[pb.ServerFrame] = []  # sent after those
        self._deltas = WaitingDeltas()  # newer ones
        self._migrations: list[pb.ServerFrame] = []
        self._load: Load | None = None

    @property
    def overfull(self) -> bool:
        num_numbers = len(self._tokens) + self._leaving.num_numbers + self._deltas.num_numbers
        return num_numbers > MAX_WAITING_NUMBERS

    def accepted(self, request_id: str, attempt: int, stream: int) -> None:
        accepted = pb.Accepted(request_id=request_id, attempt=attempt, stream=stream)
        self._answers.append(pb.ServerFrame(accepted=accepted))

    def rejected(self, request_id: str, attempt: int, error: PagodaError, retry_after_s: float) -> None:
        rejected = pb.Rejected(
            request_id=request_id,
            attempt=attempt,
            code=error.code,
            message=error.message,
            param=error.param or "",
            retry_after_s=retry_after_s,
            of_all=isinstance(error, Full),
        )
        self._answers.append(pb.ServerFrame(rejected=rejected))

    def migrate(self, request_id: str, attempt: int) -> None:
        self._migrations.append(pb.ServerFrame(migrate=pb.Migrate(request_id=request_id, attempt=attempt)))

    def load(self, load: Load) -> None:
        """Set the load to send; it replaces one not sent yet."""
        self._load = load

    def next_tokens(self, tokens: NextTokens) -> None:
        if self._leaving or self._deltas:
            behind, tokens = tokens.parted(self._waits)
            self.deltas(behind.deltas())
        self._tokens.extend(tokens)
        if len(self._tokens) > self._max_waiting_column:
            self._merge()

    def _waits(self, stream: Stream) -> bool:
        return self._leaving.has_any_of(stream) or self._deltas.has_any_of(stream)

    def deltas(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._deltas.add(delta)

    def take_deltas(self) -> list[Delta]:
        """Remove and return all waiting output of requests, as deltas."""
        self._merge()
        return self._leaving.take() + self._deltas.take()

    def _merge(self) -> None:
        """Turn waiting tokens into deltas."""
        tokens, self._tokens = self._tokens, NextTokens()
        self.deltas(tokens.deltas() + self._deltas.take())

    def take(self) -> list[pb.ServerFrame]:
        """Remove and return the frames to send next; none if nothing waits. Tokens that arrive while a frame is written
        do not wait for all other frames."""
        frames, self._answers = self._answers, []
        if not self._leaving:
            self._leaving, self._deltas = self._deltas, self._leaving
            self._last = self._take_rest()
        if outputs := self._next_outputs():
            frames.append(outputs)
        if not self._leaving:
            frames += self._last
            self._last = []
        return frames

    def _take_rest(self) -> list[pb.ServerFrame]:
        """Frames to send after the outputs that precede them."""
        frames, self._migrations = self._migrations, []
        if self._load is not None:
            frames.append(pb.ServerFrame(load=convert.load_to_pb(self._load)))
            self._load = None
        return frames

    def _next_outputs(self) -> pb.ServerFrame | None:
        """A frame of all waiting tokens and as many of the deltas as fit."""
        tokens, self._tokens = self._tokens, NextTokens()
        deltas = self._leaving.take(self._frame_numbers)
        if not (tokens or deltas):
            return None
        outputs = pb.StepOutputs()
        if tokens:
            convert.write_next_tokens(tokens, outputs.tokens)
        for delta in deltas:
            convert.write_delta(delta, outputs.deltas.add())
        return pb.ServerFrame(outputs=outputs)
