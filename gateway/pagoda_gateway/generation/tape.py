"""A tape records a job's tokens as they are generated; a reader that joins later reads them from the first one.

It holds no text: every reader detokenises for itself, with the code that serves live streams. So a reader that joins
late, one that was there from the start, and one that reads a stored tape see the same.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import msgspec

from pagoda_gateway.engine.interface import Generation, Submitting
from pagoda_proto.deltas import WaitingDeltas
from pagoda_proto.errors import PagodaError
from pagoda_proto.records import Begun, Delta, RequestRecord


class Tape:
    """Implements `MadeOf`, and `Submitting` for its readers: it answers their requests. A single run writes it, through
    `recording`.

    Call `start`, then `end` or `fail`; a tape that failed has no further readers. `life` distinguishes its requests
    from those of an earlier gateway, which an engine core may not know to be abandoned yet.
    """

    def __init__(self, job_id: str, life: str = "") -> None:
        self._job_id = job_id
        self._life = life
        self._whole: dict[str, WaitingDeltas] = {}
        self._readings: dict[str, list[_Reading]] = {}
        self._begun: Begun | None = None
        self._tag = self._tag_with(None)
        self._started = asyncio.Event()
        self._ended = False
        self._error: PagodaError | None = None
        self.fingerprint = ""

    @classmethod
    def of(cls, job_id: str, kept: bytes) -> Tape:
        """A tape that has ended, from its `dump`. Raises msgspec.DecodeError, ValidationError."""
        tape = cls(job_id)
        tape.start(tape._fill(kept))
        tape.end()
        return tape

    @classmethod
    def begun(cls, job_id: str, life: str, kept: bytes) -> Tape:
        """A tape to be continued, from its `dump`. Raises msgspec.DecodeError, ValidationError."""
        tape = cls(job_id, life)
        tape._fill(kept)
        return tape

    def _fill(self, kept: bytes) -> str:
        fingerprint, deltas = msgspec.msgpack.decode(kept, type=tuple[str, list[Delta]])
        for delta in deltas:
            self.add(delta)
        return fingerprint

    @property
    def num_numbers(self) -> int:
        """Number of token ids and log-probabilities; in a dump each takes at least one byte."""
        return sum(whole.num_numbers for whole in self._whole.values())

    def dump(self) -> bytes:
        deltas = [delta for whole in self._whole.values() for delta in _copies(whole)]
        return msgspec.msgpack.encode((self.fingerprint, deltas))

    @property
    def ended(self) -> bool:
        """Whether no more deltas will come."""
        return self._ended or self._error is not None

    @property
    def was_started(self) -> bool:
        return self._started.is_set()

    def tag(self) -> str:
        """A digest of what the tape was made from: the job and, once a delta has named them, weights and numerics."""
        return self._tag

    def fits(self, tag: str) -> bool:
        return self._begun is None or tag == self._tag or tag == self._tag_with(None)

    def _tag_with(self, begun: Begun | None) -> str:
        made_of = [self._job_id] + ([] if begun is None else [begun.model_fingerprint, begun.numerics_id])
        return hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:8]

    def start(self, fingerprint: str) -> None:
        """Called when an engine core has accepted the whole job."""
        self.fingerprint = fingerprint
        self._started.set()

    async def started(self) -> None:
        """Wait until the job is accepted. Raises PagodaError if it was refused."""
        await self._started.wait()
        self.check()

    def check(self) -> None:
        """Raises PagodaError if the run has failed."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def recording(self, engine: Submitting) -> Submitting:
        """The engine for the run that writes this tape: whatever that run reads is recorded."""
        return _Recorder(self, engine, self._life)

    def begin(self, request_id: str) -> None:
        """Discard deltas of an earlier attempt, which was refused."""
        self._whole[request_id] = WaitingDeltas()

    def add(self, delta: Delta) -> None:
        """Copies `delta`, which stays the caller's."""
        if self._begun is None and delta.tokens.begun is not None:
            self._begun = delta.tokens.begun
            self._tag = self._tag_with(self._begun)
        self._whole.setdefault(delta.request_id, WaitingDeltas()).add(_copy(delta))
        for reading in self._readings.get(delta.request_id, ()):
            reading.add(_copy(delta))

    def end(self) -> None:
        self._ended = True
        self._wake()

    def fail(self, error: PagodaError) -> None:
        self._error = error
        self._started.set()
        self._wake()

    def _wake(self) -> None:
        for readings in self._readings.values():
            for reading in readings:
                reading.news.set()

    def so_far(self, request_id: str) -> list[Delta]:
        """Copies, which belong to the caller."""
        return _copies(self._whole.get(request_id, WaitingDeltas()))

    async def submit(self, record: RequestRecord, *, counted: bool = True, prior: Sequence[Delta] = ()) -> Generation:
        reading = _Reading(self)
        for delta in self.so_far(record.request_id):
            reading.add(delta)
        self._readings.setdefault(record.request_id, []).append(reading)
        return reading

    def leave(self, reading: _Reading) -> None:
        for readings in self._readings.values():
            if reading in readings:
                readings.remove(reading)


class _Reading:
    """Implements `Generation` for one reader: closing it does not affect the others."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._waiting = WaitingDeltas()
        self.news = asyncio.Event()

    def add(self, delta: Delta) -> None:
        self._waiting.add(delta)
        self.news.set()

    async def next(self) -> list[Delta]:
        while not self._waiting:
            self._tape.check()
            if self._tape.ended:
                return []
            self.news.clear()
            await self.news.wait()
        return self._waiting.take()

    async def abort(self, choices: Sequence[int] = ()) -> None:
        pass

    async def aclose(self) -> None:
        self._tape.leave(self)


class _Recorder:
    """Implements `Submitting`."""

    def __init__(self, tape: Tape, engine: Submitting, life: str) -> None:
        self._tape = tape
        self._engine = engine
        self._life = life

    async def submit(self, record: RequestRecord, *, counted: bool = True, prior: Sequence[Delta] = ()) -> Generation:
        """Tokens do not depend on the request id, so `life` may change it; the client's name for it stays at its end.
        Tokens already on the tape are not generated again."""
        head, dot, name = record.request_id.partition(".")
        request_id = f"{head}-{self._life}{dot}{name}" if self._life else record.request_id
        named, so_far = msgspec.structs.replace(record, request_id=request_id), self._tape.so_far(record.request_id)
        if not so_far:
            generation = await self._engine.submit(named, counted=counted)
            self._tape.begin(record.request_id)
        else:
            generation = await self._engine.submit(named, counted=counted, prior=so_far)
        return _Recorded(self._tape, record.request_id, generation, so_far)


class _Recorded:
    """Implements `Generation` on top of another one; `so_far` is already on the tape, and is returned first."""

    def __init__(self, tape: Tape, request_id: str, generation: Generation, so_far: list[Delta]) -> None:
        self._tape = tape
        self._request_id = request_id
        self._generation = generation
        self._so_far = so_far

    async def next(self) -> list[Delta]:
        if self._so_far:
            so_far, self._so_far = self._so_far, []
            return so_far
        deltas = await self._generation.next()
        for delta in deltas:
            self._tape.add(msgspec.structs.replace(delta, request_id=self._request_id))
        return deltas

    async def abort(self, choices: Sequence[int] = ()) -> None:
        await self._generation.abort(choices)

    async def aclose(self) -> None:
        await self._generation.aclose()


def _copies(whole: WaitingDeltas) -> list[Delta]:
    return [_copy(delta) for delta in whole.all()]


def _copy(delta: Delta) -> Delta:
    """With its own lists, which the receiver may extend."""
    tokens = delta.tokens
    own = msgspec.structs.replace(
        tokens,
        token_ids=list(tokens.token_ids),
        logprobs=None if tokens.logprobs is None else list(tokens.logprobs),
        prompt_logprobs=None if tokens.prompt_logprobs is None else list(tokens.prompt_logprobs),
    )
    return msgspec.structs.replace(delta, result=own)
