"""A policy is an order of requests, which decides which have rows, which wait and which are preempted first.

Running rows are planned in that order and preempt from its end, so a row never preempts one ahead of it, and the first
request always advances: preemption cannot cycle.
"""

from __future__ import annotations

from pagoda_engine_core.scheduling.request import Request
from pagoda_engine_core.scheduling.rows import Policy
from pagoda_proto.params import BACKGROUND_PRIORITY

PRIORITY_LEVEL_S = 10.0


def fcfs(request: Request) -> tuple[float, ...]:
    """First come, first served; background requests last. A request taken back from a lost worker keeps its arrival."""
    return (request.record.priority >= BACKGROUND_PRIORITY, request.arrived_at)


def priority(request: Request) -> tuple[float, ...]:
    """A priority level is worth PRIORITY_LEVEL_S of waiting: low priority delays a request but cannot starve it, and
    the order never changes."""
    return (request.arrived_at + request.record.priority * PRIORITY_LEVEL_S, request.record.priority)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority, "fair": fcfs}
"""Under `fair`, this orders rows and each tenant's requests; `dispatch/fairness.py` decides which tenant is next."""
