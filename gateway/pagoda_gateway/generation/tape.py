"""What is generated of a job is kept as it comes, as tokens; whoever comes later reads it from the first one.

Text is no part of it: every reader makes it anew, with the code that would have made it live. So a reader that comes
late, one that was there, and one that is given a tape out of the store see the same.
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
    """Implements `MadeOf`, and `Submitting` for its readers: what they submit is on it. One writes it, by `recording`.

    `start`, then `end` or `fail`; a tape that failed has no more readers. `life` tells its requests from those of an
    earlier gateway, of which an engine core may not know yet that nobody wants them.
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
        """One that has ended, from its `dump`. Raises msgspec.DecodeError, ValidationError."""
        tape = cls(job_id)
        tape.start(tape._fill(kept))
        tape.end()
        return tape

    @classmethod
    def begun(cls, job_id: str, life: str, kept: bytes) -> Tape:
        """One that is to be gone on with, from its `dump`. Raises msgspec.DecodeError, ValidationError."""
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
        """Token ids and log-probabilities: in a dump each takes a byte at least."""
        return sum(whole.num_numbers for whole in self._whole.values())

    def dump(self) -> bytes:
        deltas = [delta for whole in self._whole.values() for delta in _copies(whole)]
        return msgspec.msgpack.encode((self.fingerprint, deltas))

    @property
    def ended(self) -> bool:
        """Nothing comes any more."""
        return self._ended or self._error is not None

    @property
    def was_started(self) -> bool:
        return self._started.is_set()

    def tag(self) -> str:
        """Of what it is made: of weights and numerics, too, from its first tokens on, where these say it."""
        return self._tag

    def fits(self, tag: str) -> bool:
        return self._begun is None or tag == self._tag or tag == self._tag_with(None)

    def _tag_with(self, begun: Begun | None) -> str:
        made_of = [self._job_id] + ([] if begun is None else [begun.model_fingerprint, begun.numerics_id])
        return hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:8]

    def start(self, fingerprint: str) -> None:
        """An engine core has taken all of the job."""
        self.fingerprint = fingerprint
        self._started.set()

    async def started(self) -> None:
        """Raises PagodaError where the job was refused."""
        await self._started.wait()
        self.check()

    def check(self) -> None:
        """Raises PagodaError where it has failed."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def recording(self, engine: Submitting) -> Submitting:
        """The engine, for the one whose reading writes this tape."""
        return _Recorder(self, engine, self._life)

    def begin(self, request_id: str) -> None:
        """What there was of it before was refused."""
        self._whole[request_id] = WaitingDeltas()

    def add(self, delta: Delta) -> None:
        """It stays the giver's."""
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
        """They are the taker's."""
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
    """Implements `Generation`: what others have of it does not end with this one."""

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
        """Its id is no part of what is generated; what a client called it stays at its end. What is on the tape of it
        is not generated again."""
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
    """Implements `Generation` by another one; `so_far` is on the tape, and comes first."""

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
    """With lists of its own: who gets it may extend them."""
    tokens = delta.tokens
    own = msgspec.structs.replace(
        tokens,
        token_ids=list(tokens.token_ids),
        logprobs=None if tokens.logprobs is None else list(tokens.logprobs),
        prompt_logprobs=None if tokens.prompt_logprobs is None else list(tokens.prompt_logprobs),
    )
    return msgspec.structs.replace(delta, result=own)
