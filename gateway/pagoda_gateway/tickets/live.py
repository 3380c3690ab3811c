"""A request with a ticket that runs here: its output is on a tape, and it runs on for a while without readers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.tape import Tape
from pagoda_gateway.http.memory import Holding
from pagoda_gateway.store.tickets import Found
from pagoda_proto.errors import ErrorCode, PagodaError


def abandoned() -> PagodaError:
    return PagodaError(ErrorCode.CANCELLED, "nobody was reading the stream")


class Live:
    """`life` is as in `Tape`. `grace_s` is how long it runs on without a reader; 0 ends it at once."""

    def __init__(self, found: Found, job: Job, life: str, holding: Holding, grace_s: float) -> None:
        self.found = found
        self.job = job
        self.is_new = not life
        self.holding = holding
        self.tape = Tape(job.id, life)
        self.task: asyncio.Task[None] | None = None
        self.begun = False  # whether the task runs yet; it checks for itself whether it was stopped before that
        self.num_readers = 0
        self.num_resuming = 0  # readers that resume at another gateway when told to
        self.why: PagodaError | None = None  # why it was stopped
        self._grace_s = grace_s
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def reader(self, resumes: bool) -> Iterator[None]:
        self.num_readers += 1
        self.num_resuming += resumes
        self._hold()
        try:
            yield
        finally:
            self.num_readers -= 1
            self.num_resuming -= resumes
            if not self.num_readers:
                self._leave_alone()

    def hurry(self) -> None:
        """From now on it ends with its last reader."""
        self._grace_s = 0.0
        if not self.num_readers:
            self.stop(abandoned())

    def stop(self, why: PagodaError) -> None:
        """End it with this error, unless generation is complete."""
        self._hold()
        if self.task is not None and self.why is None and not self.tape.ended:
            self.why = why
            if self.begun:  # a task cancelled before its first step would never run
                self.task.cancel()

    def _hold(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _leave_alone(self) -> None:
        if self._grace_s and not self.tape.ended:
            self._timer = asyncio.get_running_loop().call_later(self._grace_s, self.stop, abandoned())
        else:
            self.stop(abandoned())
