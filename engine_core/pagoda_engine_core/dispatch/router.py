"""All that waits, waits here, in one order; a worker gets a request only when it can begin it in its next step.

So a worker that joins has work from its next step, and nobody waits behind strangers on a slow one. Who cannot begin
anywhere yet is not overtaken on the workers that could take him.

What has begun goes on where weights and numerics are those of its first token, and before all new requests. One that
was running at two losses in a row, without a token in between, is a suspect: each worker has at most one suspect that
has yet to prove itself by a token, so when that worker is lost it is known who did it.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.dispatch.group import Group
from pagoda_engine_core.dispatch.waiting import Rank, Waiting, WaitingQueue
from pagoda_engine_core.scheduling.counters import Totals
from pagoda_engine_core.scheduling.ledger import Cause
from pagoda_engine_core.scheduling.policy import load_policy
from pagoda_engine_core.scheduling.request import SUSPECT_DEATHS, Request
from pagoda_engine_core.scheduling.room import Room
from pagoda_engine_core.scheduling.scheduler import Scheduler
from pagoda_engine_core.workers.executor import WorkerLeft
from pagoda_engine_core.workers.pace import Pace
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Delta
from pagoda_proto.steps import Hello
from pagoda_proto.times import NO_WORKER_WAIT_S

log = logging.getLogger(__name__)

MAX_LOST_LIVES = 20
"""Whoever is to blame: a request that has had a row in so many lost lives, and made no token, ends."""


class Router:
    """All live requests: those in groups and those that wait for one. Times are the engine's `now`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._policy = load_policy(config.policy)
        self._row_ids: Iterator[int] = itertools.count(1)
        self._queue = WaitingQueue(self._policy.key)
        self._gone = Totals()  # of all groups that have left
        self._replays = 0
        self._fleet = Pace()
        self.groups: dict[int, Group] = {}
        self.refused_numerics = ""  # of the last worker that was turned away for those that requests here need

    # --- workers -----------------------------------------------------------------------------------------------------

    def join(self, epoch: int, hello: Hello) -> Group:
        if self._config.preemption == "swap" and not hello.num_swap_blocks:
            log.warning("preemption=swap, but worker %s has no swap space: it recomputes", hello.worker_id)
        scheduler = Scheduler(self._config, hello, self._policy, self._row_ids)
        group = self.groups[epoch] = Group(epoch, hello, scheduler, self._config.max_steps_in_flight)
        return group

    def leave(self, left: WorkerLeft, now: float) -> list[Delta]:
        """Take back what the group held. Requests that are convicted of killing workers end here."""
        group = self.groups.pop(left.epoch, None)
        if group is None:
            return []
        self._gone.add(group.scheduler.counters.totals)
        had_rows = {request.request_id for request in group.requests.values() if request.num_rows}
        blamed = (group.scheduler.requests_in(left.step) or had_rows) if left.cause.blames else set()
        deltas = []
        for request in group.scheduler.take_back(now):
            name = request.request_id
            self._replays += request.started
            request.lost_lives += name in had_rows
            if name in blamed:
                unproven = name == group.suspect
                request.deaths = request.deaths + 1 if unproven else min(request.deaths + 1, SUSPECT_DEATHS)
            deltas += self._give_up_or_queue(request, name == group.suspect, now)
        return deltas

    def _give_up_or_queue(self, request: Request, unproven: bool, now: float) -> list[Delta]:
        if unproven and request.deaths >= self._config.max_attempts:
            message = f"{request.deaths} workers were lost while they computed this request, and it made no token"
            return request.fail(ErrorCode.REQUEST_FAILED_REPEATEDLY, message, now)
        if request.lost_lives >= MAX_LOST_LIVES:
            message = f"{request.lost_lives} workers have begun this request, and none made a token of it"
            return request.fail(ErrorCode.INTERNAL, message, now)
        self.add(request, now)
        return []

    def stepped(self, group: Group, now: float) -> int:
        """The result of the group's oldest step is in; how many tokens of requests that has brought."""
        return group.stepped(now, self._fleet)

    @property
    def needed_numerics(self) -> str:
        """Without a worker: what the first one to come must be like, for a request that has begun waits for it."""
        waiting = (waiting.request.begun for waiting in self._queue)
        return next((begun.numerics_id for begun in waiting if begun is not None), "")

    # --- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request that is new or was taken back."""
        if self.groups and request.ledger.cause is Cause.QUEUED_NO_WORKER:
            request.ledger.enter(Cause.QUEUED_BEHIND, now)
        self._queue.add(request, Rank.of(request), now)

    def is_waiting(self, request_id: str) -> bool:
        return self._queue.get(request_id) is not None

    def abort(self, request_id: str, choices: tuple[int, ...], now: float) -> list[Delta]:
        """End some choices, or all; unknown ids do nothing."""
        for group in self.groups.values():
            if request_id in group.requests:
                return self.ended(group, group.scheduler.abort(request_id, choices, now))
        request = self._queue.get(request_id)
        if request is None:
            return []
        deltas = request.abort(choices, now)
        if request.ended:
            self._queue.remove(request_id)
        return deltas

    def ended(self, group: Group, deltas: list[Delta]) -> list[Delta]:
        """Note which of a group's requests the deltas end, or acquit, and pass them on."""
        for delta in deltas:
            if delta.ends_request:
                group.requests.pop(delta.request_id, None)
            if delta.request_id == group.suspect and (delta.result.token_ids or delta.ends_request):
                group.suspect = ""
        return deltas

    def take_all(self, now: float) -> list[Request]:
        """Every live request, for good: neither they nor the groups are here afterwards."""
        requests = self._queue.take_all()
        for group in self.groups.values():
            self._gone.add(group.scheduler.counters.totals)
            requests += group.scheduler.take_back(now)
        self.groups.clear()
        return requests

    def forgive(self, seconds: float) -> None:
        """So much time has passed in which we did not run: nobody's patience is spent by it."""
        self._queue.forgive(seconds)

    def expire(self, now: float) -> list[Delta]:
        """End what could not begin in time, and what has begun and found nobody in time who could go on with it."""
        return [delta for waiting in self._queue for delta in self._expire(waiting, now)]

    def _expire(self, waiting: Waiting, now: float) -> list[Delta]:
        request = waiting.request
        if request.resumes:
            if any(group.scheduler.serves(request) for group in self.groups.values()):
                waiting.since = now
            patience_s = NO_WORKER_WAIT_S
        else:
            patience_s = request.record.queue_timeout_s or self._config.queue_timeout_s
        if now - waiting.since < patience_s:
            return []
        self._queue.remove(request.request_id)
        code, why = self._why_not(request)
        return request.fail(code, f"{why} within {patience_s:g} s", now)

    def _why_not(self, request: Request) -> tuple[ErrorCode, str]:
        if not request.resumes:
            if self.groups:
                return ErrorCode.OVERLOADED, "could not begin, for every worker was busy,"
            return ErrorCode.UNAVAILABLE, "could not begin, for no worker came"
        if request.begun is None:
            return ErrorCode.UNAVAILABLE, "could not go on, for no worker came"
        others = {group.hello.numerics_id for group in self.groups.values()} | {self.refused_numerics}
        there = ", ".join(repr(name) for name in sorted(others - {"", request.begun.numerics_id}))
        why = f"could not go on, for no worker came that computes as {request.begun.numerics_id!r}"
        return ErrorCode.STREAM_INTERRUPTED, why + (f" (there was {there})" if there else "")

    # --- the choice of a group ---------------------------------------------------------------------------------------

    def dispatch(self, now: float) -> list[Delta]:
        """Give waiting requests, in order, to groups that can begin them in the step that is planned next."""
        deltas: list[Delta] = []
        if not len(self._queue):
            return deltas
        rooms = {group.epoch: group.scheduler.room() for group in self.groups.values() if group.plannable}
        rooms = {epoch: room for epoch, room in rooms.items() if not room.full}
        for waiting in self._queue:
            if not rooms:
                break
            try:
                deltas += self._try(waiting.request, rooms, now)
            except Exception:  # about this request; the others go on
                log.exception("request %r cannot be placed", waiting.request.request_id)
                deltas += self._drop(waiting.request, now)
        return deltas

    def _try(self, request: Request, rooms: dict[int, Room], now: float) -> list[Delta]:
        takers = [group for group in self.groups.values() if group.takes(request)]
        causes = {group.epoch: self._lacks(group, request, rooms.get(group.epoch)) for group in takers}
        able = [group for group in takers if causes[group.epoch] is None]
        if not able:
            for epoch, cause in causes.items():  # whoever is behind does not overtake it there
                rooms.pop(epoch, None)
                request.note_blocked(cause or Cause.QUEUED_BEHIND, now)
            return []
        group = min(able, key=lambda group: group.cost(request))
        self._queue.remove(request.request_id)
        rooms[group.epoch].take(group.scheduler.need(request, rooms[group.epoch]))
        return self._place(request, group, now)

    def _lacks(self, group: Group, request: Request, room: Room | None) -> Cause | None:
        if room is None or room.full:
            return Cause.QUEUED_BEHIND
        return room.lacks(group.scheduler.need(request, room))

    def _place(self, request: Request, group: Group, now: float) -> list[Delta]:
        group.requests[request.request_id] = request
        if request.suspect:
            group.suspect = request.request_id
        return self.ended(group, group.scheduler.add(request, now))

    def _drop(self, request: Request, now: float) -> list[Delta]:
        """End a request that broke something, wherever it is by now."""
        if self.is_waiting(request.request_id):
            self._queue.remove(request.request_id)
        for group in self.groups.values():
            group.requests.pop(request.request_id, None)
            if group.suspect == request.request_id:
                group.suspect = ""
        return request.fail(ErrorCode.INTERNAL, "the engine core cannot place this request", now)

    # --- numbers -----------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + sum(group.scheduler.num_waiting for group in self.groups.values())

    @property
    def num_running(self) -> int:
        return sum(group.scheduler.num_running for group in self.groups.values())

    @property
    def queued_tokens(self) -> int:
        return self._queue.num_tokens + sum(group.scheduler.queued_tokens for group in self.groups.values())

    @property
    def kv_usage(self) -> float:
        """Part of all blocks that is in use."""
        total = sum(group.hello.num_blocks for group in self.groups.values())
        used = sum(group.scheduler.kv_usage * group.hello.num_blocks for group in self.groups.values())
        return used / total if total else 0.0

    def totals(self) -> Counter[str]:
        """What all groups have done since the start, those included that are gone."""
        totals = Totals()
        for one in (self._gone, *(group.scheduler.counters.totals for group in self.groups.values())):
            totals.add(one)
        return Counter(asdict(totals)) + Counter(replays=self._replays)

    def check_fits(self, request: Request) -> None:
        """Raises PagodaError when workers are here and none is large enough."""
        if not self.groups or any(group.scheduler.fits(request) for group in self.groups.values()):
            return
        num_tokens = request.num_prompt_tokens + request.max_output_tokens
        message = f"prompt and output of up to {num_tokens} tokens do not fit into any worker's KV cache"
        raise PagodaError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, "max_tokens")

    def plannable(self) -> list[Group]:
        return [group for group in self.groups.values() if group.plannable]
