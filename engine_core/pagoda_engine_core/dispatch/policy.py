"""A policy is an order of requests; who has a row, who waits for one and who is preempted first all follow from it.

Rows that run are planned in that order and preempt from its end, so a row is never preempted by one behind it, and the
first request always advances: preemption cannot go round in circles.
"""

from __future__ import annotations

from pagoda_engine_core.scheduling.request import Request
from pagoda_engine_core.scheduling.rows import Policy
from pagoda_proto.params import BACKGROUND_PRIORITY

PRIORITY_LEVEL_S = 10.0


def fcfs(request: Request) -> tuple[float, ...]:
    """First come, first served, those in the background last. A request moved from a lost worker keeps its arrival."""
    return (request.record.priority >= BACKGROUND_PRIORITY, request.arrived_at)


def priority(request: Request) -> tuple[float, ...]:
    """A level of priority is worth so many seconds of waiting: whoever is low is late, but nobody waits for ever, and
    nothing is ever sorted anew."""
    return (request.arrived_at + request.record.priority * PRIORITY_LEVEL_S, request.record.priority)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority, "fair": fcfs}
"""Under `fair`, the order of a tenant's own requests and of rows; whose turn it is, says `dispatch/fairness.py`."""
