"""One life of a worker, as the router sees it: what it holds, what it could take, and at what cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pagoda_engine_core.dispatch.pace import WEIGHT, Pace
from pagoda_engine_core.dispatch.suspicion import is_suspect
from pagoda_engine_core.scheduling.request import Request
from pagoda_engine_core.scheduling.scheduler import Scheduler
from pagoda_engine_core.workers.executor import WorkerState
from pagoda_proto.steps import Hello

RUNNING_REQUEST_COST_TOKENS = 32
"""The load of a running request, in prompt tokens, when workers are compared."""

MOST_SLOWNESS = 8.0
"""Cap on what one step can indicate, so that a worker that was frozen for a while soon counts as fast again."""


@dataclass(eq=False)
class Worker:
    """`requests` are those its scheduler holds, by id. `suspect` is the one that must still prove, by a token, that it
    does not kill workers. `slowness` is the time its steps take, relative to such steps on all workers.
    """

    epoch: int
    hello: Hello
    scheduler: Scheduler
    max_steps_in_flight: int
    plans_late: bool = False  # as late as possible, see Pace
    state: WorkerState = WorkerState.READY
    requests: dict[str, Request] = field(default_factory=dict)
    suspect: str = ""
    slowness: float = 1.0
    pace: Pace = field(default_factory=Pace)
    served: int = 0  # tokens of requests, prompt and output, up to the last step
    short: bool = False  # it had no room left for a request that still waits
    num_ended: int = 0  # requests since; planning its next step gives their places away
    unaudited: bool = False  # it has run steps since its last audit
    leave_by: float | None = None  # deadline for moving its requests, once it is to leave

    @property
    def ready(self) -> bool:
        return self.state is WorkerState.READY and not self.leaving

    @property
    def leaving(self) -> bool:
        return self.leave_by is not None

    @property
    def next_at(self) -> float:
        """When to plan its next step: `inf` if an event must come first. A worker that is to leave continues with the
        requests that it holds."""
        works = self.state in (WorkerState.READY, WorkerState.DRAINING)
        if not works or self.scheduler.steps_in_flight >= self.max_steps_in_flight:
            return math.inf
        return self.pace.next_at() if self.plans_late else 0.0

    def leaves(self, now: float) -> bool:
        """Whether it should leave now: it holds no requests, or its time is up."""
        return self.leave_by is not None and (not self.requests or now >= self.leave_by)

    def change(self, state: WorkerState) -> None:
        self.state = state
        if state is WorkerState.DRAINING and self.leave_by is None:
            self.leave_by = math.inf  # it knows its own deadline, and says goodbye then

    def forget(self, request_id: str) -> None:
        """Note that it no longer holds this request."""
        self.requests.pop(request_id, None)
        if self.suspect == request_id:
            self.suspect = ""

    def takes(self, request: Request) -> bool:
        """Whether it would take the request, given room. It takes one suspect at a time."""
        return self.ready and not (self.suspect and is_suspect(request)) and self.scheduler.serves(request)

    def cost(self, request: Request) -> float:
        """A relative estimate of the time to first token, from prefix match, load and speed."""
        missing = request.num_prompt_tokens - self.scheduler.matched_tokens(request)
        load = self.scheduler.queued_tokens + RUNNING_REQUEST_COST_TOKENS * self.scheduler.num_running
        return (missing + load) * self.slowness

    def stepped(self, worked_s: float, now: float, fleet: Pace) -> int:
        """Note that its oldest step is done, in which it says it worked `worked_s`; `fleet` is the pace of all workers.
        Returns how many tokens of requests were served since the last call, computed or from the prefix cache."""
        self.unaudited = True
        num_tokens, seconds = self.pace.answered(now, worked_s)
        if num_tokens and seconds:
            expected_s = fleet.step_s(num_tokens)
            fleet.observe(num_tokens, seconds)
            if expected_s > 0:
                self.slowness += (min(seconds / expected_s, MOST_SLOWNESS) - self.slowness) * WEIGHT
        totals, before = self.scheduler.totals, self.served
        self.served = totals.prompt_tokens + totals.output_tokens
        return self.served - before

    def audit(self) -> None:
        """Raises BrokenInvariant if the books do not balance."""
        self.scheduler.check_invariants()
        self.unaudited = False
