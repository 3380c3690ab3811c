"""A request waits here until a worker can begin it soon, so that a worker that joins has work from the next step.

    Group    one worker's life and the scheduler of its rows and blocks
    Router   the requests that no group holds, in order, and the choice of a group for the next one

A request that lost its worker comes back here and goes before all new ones. One that was running at two deaths is a
suspect: it gets a worker for itself, so that the next death, if it comes, convicts nobody else.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.counters import TOTALS, Totals
from pagoda_engine_core.executor import LeaveCause, WorkerState
from pagoda_engine_core.ledger import Cause
from pagoda_engine_core.policy import load_policy
from pagoda_engine_core.request import Request
from pagoda_engine_core.scheduler import Scheduler
from pagoda_engine_core.waiting import Rank, WaitingQueue
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Delta
from pagoda_proto.steps import Hello

log = logging.getLogger(__name__)

RUNNING_REQUEST_COST_TOKENS = 32
"""How many prompt tokens a running request weighs when groups are compared."""
SUSPECT_DEATHS = 2


@dataclass(eq=False)
class Group:
    """A worker in one life. `requests` are those its scheduler holds, by id."""

    epoch: int
    hello: Hello
    scheduler: Scheduler
    state: WorkerState = WorkerState.READY
    requests: dict[str, Request] = field(default_factory=dict)
    suspect: str = ""  # the request that has this group for itself

    def has_room(self, max_tokens: int) -> bool:
        """Whether what waits here could all begin in the next step."""
        return self.state is WorkerState.READY and not self.suspect and self.scheduler.queued_tokens < max_tokens

    def cost(self, request: Request) -> int:
        """Tokens to be computed before the first one of `request`, about: prefix match and load in one number."""
        missing = request.num_prompt_tokens - self.scheduler.matched_tokens(request)
        return missing + self.scheduler.queued_tokens + RUNNING_REQUEST_COST_TOKENS * self.scheduler.num_running


class Router:
    """All live requests: those in groups and those that wait for one. Times are the engine's `now`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._policy = load_policy(config.policy)
        self._row_ids: Iterator[int] = itertools.count(1)
        self._queue = WaitingQueue(self._policy.key)
        self._gone: list[Totals] = []
        self._replays = 0
        self.groups: dict[int, Group] = {}

    # --- workers -----------------------------------------------------------------------------------------------------

    def join(self, epoch: int, hello: Hello) -> Group:
        if self._config.preemption == "swap" and not hello.num_swap_blocks:
            log.warning("preemption=swap, but worker %s has no swap space: it recomputes", hello.worker_id)
        scheduler = Scheduler(self._config, hello, self._policy, self._row_ids)
        group = self.groups[epoch] = Group(epoch, hello, scheduler)
        return group

    def leave(self, epoch: int, cause: LeaveCause, now: float) -> list[Delta]:
        """Take back what the group held. Requests that were running at too many deaths end here."""
        group = self.groups.pop(epoch, None)
        if group is None:
            return []
        self._gone.append(group.scheduler.counters.totals)
        blamed = cause.blames
        running = {request.request_id for request in group.requests.values() if request.num_rows}
        deltas = []
        for request in group.scheduler.take_back(now):
            self._replays += request.started
            if blamed and request.request_id in running:
                request.deaths += 1
            deltas += self._give_up_or_queue(request, now)
        return deltas

    def _give_up_or_queue(self, request: Request, now: float) -> list[Delta]:
        if request.deaths < self._config.max_attempts:
            self.add(request, now)
            return []
        message = f"{request.deaths} workers were lost while they computed this request"
        return request.fail(ErrorCode.REQUEST_FAILED_REPEATEDLY, message, now)

    # --- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request that is new or was taken back."""
        if self.groups and request.ledger.cause is Cause.QUEUED_NO_WORKER:
            request.ledger.enter(Cause.QUEUED_BEHIND, now)
        suspect = request.deaths >= SUSPECT_DEATHS
        self._queue.add(request, Rank.SUSPECT if suspect else Rank.REPLAY if request.resumes else Rank.NEW, now)

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
        """Note which of a group's requests the deltas end, and pass them on."""
        for delta in deltas:
            if delta.ends_request:
                group.requests.pop(delta.request_id, None)
        if group.suspect and group.suspect not in group.requests:
            group.suspect = ""
        return deltas

    def take_all(self, now: float) -> list[Request]:
        """Every live request, for good: neither they nor the groups are here afterwards."""
        requests = self._queue.take_all()
        for group in self.groups.values():
            self._gone.append(group.scheduler.counters.totals)
            requests += group.scheduler.take_back(now)
        self.groups.clear()
        return requests

    def expire(self, now: float) -> list[Delta]:
        """End what could not begin in time."""
        deltas = [delta for group in self.groups.values() for delta in self.ended(group, group.scheduler.expire(now))]
        for waiting in self._queue:
            timeout_s = waiting.request.record.queue_timeout_s or self._config.queue_timeout_s
            if now - waiting.since >= timeout_s:
                self._queue.remove(waiting.request.request_id)
                why = "every worker is busy" if self.groups else "no worker is there"
                message = f"could not begin within {timeout_s:g} s: {why}"
                code = ErrorCode.OVERLOADED if self.groups else ErrorCode.UNAVAILABLE
                deltas += waiting.request.fail(code, message, now)
        return deltas

    # --- the choice of a group ---------------------------------------------------------------------------------------

    def dispatch(self, now: float) -> list[Delta]:
        """Give waiting requests, in order, to groups that can begin them soon."""
        deltas: list[Delta] = []
        reserved: set[int] = set()
        for waiting in self._queue:
            if not any(self._open(reserved)):
                break
            try:
                deltas += self._try(waiting.request, reserved, now)
            except Exception:  # about this request; the others go on
                log.exception("request %r cannot be placed", waiting.request.request_id)
                deltas += self._drop(waiting.request, now)
        return deltas

    def _try(self, request: Request, reserved: set[int], now: float) -> list[Delta]:
        group = self._choose(request, reserved)
        if group is None:
            return []
        self._queue.remove(request.request_id)
        return self._place(request, group, now)

    def _drop(self, request: Request, now: float) -> list[Delta]:
        """End a request that broke something, wherever it is by now."""
        if self.is_waiting(request.request_id):
            self._queue.remove(request.request_id)
        for group in self.groups.values():
            group.requests.pop(request.request_id, None)
        return request.fail(ErrorCode.INTERNAL, "the engine core cannot place this request", now)

    def _open(self, reserved: set[int]) -> Iterator[Group]:
        for group in self.groups.values():
            if group.epoch not in reserved and group.has_room(self._config.max_tokens_per_step):
                yield group

    def _choose(self, request: Request, reserved: set[int]) -> Group | None:
        groups = [group for group in self._open(reserved) if group.scheduler.fits(request)]
        if request.deaths < SUSPECT_DEATHS:
            return min(groups, key=lambda group: group.cost(request), default=None)
        group = min(groups, key=lambda group: len(group.requests), default=None)
        if group is None or not group.requests:
            return group
        reserved.add(group.epoch)  # it is let run empty for this suspect
        return None

    def _place(self, request: Request, group: Group, now: float) -> list[Delta]:
        group.requests[request.request_id] = request
        if request.deaths >= SUSPECT_DEATHS:
            group.suspect = request.request_id
        return self.ended(group, group.scheduler.add(request, now))

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
        everything = (*self._gone, *(group.scheduler.counters.totals for group in self.groups.values()))
        totals = Counter({name: sum(getattr(one, name) for one in everything) for name in TOTALS})
        return totals + Counter(replays=self._replays)

    def check_fits(self, request: Request) -> None:
        """Raises PagodaError when workers are here and none is large enough."""
        if not self.groups or any(group.scheduler.fits(request) for group in self.groups.values()):
            return
        num_tokens = request.num_prompt_tokens + request.max_output_tokens
        message = f"prompt and output of up to {num_tokens} tokens do not fit into any worker's KV cache"
        raise PagodaError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, "max_tokens")

    def ready(self) -> list[Group]:
        return [group for group in self.groups.values() if group.state is WorkerState.READY]
