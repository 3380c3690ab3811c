"""A policy is an order of requests; who waits longer and who is preempted first both follow from it.

Rows that run are planned in that order and preempt from its end, so a row is never preempted by one behind it, and the
first request always advances: preemption cannot go round in circles.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from pagoda_engine_core.scheduling.request import Choice, Request
from pagoda_proto.params import BACKGROUND_PRIORITY

PRIORITY_LEVEL_S = 10.0

Policy = Callable[[Request], tuple[float, ...]]
"""Smaller runs earlier. Fixed while a scheduler holds the request; ties go to the one added first."""


def fcfs(request: Request) -> tuple[float, ...]:
    """First come, first served, those in the background last. A request moved from a lost worker keeps its arrival."""
    return (request.record.priority >= BACKGROUND_PRIORITY, request.arrived_at)


def priority(request: Request) -> tuple[float, ...]:
    """A level of priority is worth so many seconds of waiting: whoever is low is late, but nobody waits for ever, and
    nothing is ever sorted anew."""
    return (request.arrived_at + request.record.priority * PRIORITY_LEVEL_S, request.record.priority)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority, "fair": fcfs}
"""Under `fair`, the order of a tenant's own requests and of rows; whose turn it is, says `dispatch/fairness.py`."""

_order = attrgetter("order")


class OrderedChoices:
    """Choices sorted by `Choice.order`. Adding and removing move memory, but compare only O(log n) choices."""

    def __init__(self) -> None:
        self._choices: list[Choice] = []

    def __len__(self) -> int:
        return len(self._choices)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._choices)

    def __getitem__(self, index: int) -> Choice:
        return self._choices[index]

    def add(self, choice: Choice) -> None:
        insort(self._choices, choice, key=_order)

    def remove(self, choice: Choice) -> None:
        """Raises ValueError when the choice is not here."""
        index = bisect_left(self._choices, choice.order, key=_order)
        if index == len(self._choices) or self._choices[index] is not choice:
            raise ValueError(f"choice {choice.index} of {choice.request.request_id} is not here")
        del self._choices[index]
