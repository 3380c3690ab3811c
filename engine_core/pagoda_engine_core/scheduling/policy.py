"""A policy puts requests into one order; who waits longer and who is preempted first both follow from it.

Rows that run are planned in that order and preempt from its end, so a row is never preempted by one behind it, and the
first request always advances: preemption cannot go round in circles.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Protocol

from pagoda_engine_core.scheduling.request import Choice, Request
from pagoda_proto.params import BACKGROUND_PRIORITY

PRIORITY_LEVEL_S = 10.0


class Policy(Protocol):
    def key(self, request: Request) -> tuple[float, ...]:
        """Smaller runs earlier. Fixed while a scheduler holds the request; ties go to the one added first."""

    def victim(self, candidates: Sequence[Choice]) -> Choice:
        """Which running choice gives up its blocks. `candidates`, in order, ends with the natural one; never empty."""


class Fcfs:
    """First come, first served, those in the background last. A request moved from a lost worker keeps its arrival."""

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.record.priority >= BACKGROUND_PRIORITY, request.arrived_at)

    def victim(self, candidates: Sequence[Choice]) -> Choice:
        return candidates[-1]


class Priority:
    """A level of priority is worth so many seconds of waiting: whoever is low is late, but nobody waits for ever, and
    nothing is ever sorted anew."""

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.arrived_at + request.record.priority * PRIORITY_LEVEL_S, request.record.priority)

    def victim(self, candidates: Sequence[Choice]) -> Choice:
        return candidates[-1]


POLICIES: dict[str, type[Fcfs] | type[Priority]] = {"fcfs": Fcfs, "priority": Priority}


def load_policy(name: str) -> Policy:
    """Raises ValueError for a name that is not in POLICIES."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]()


def _order(choice: Choice) -> tuple[float, ...]:
    return choice.order


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

    def since(self, choice: Choice) -> list[Choice]:
        """The choice and all behind it. Raises ValueError when it is not here."""
        return self._choices[self._index(choice) :]

    def add(self, choice: Choice) -> None:
        insort(self._choices, choice, key=_order)

    def remove(self, choice: Choice) -> None:
        """Raises ValueError when the choice is not here."""
        del self._choices[self._index(choice)]

    def _index(self, choice: Choice) -> int:
        index = bisect_left(self._choices, choice.order, key=_order)
        if index == len(self._choices) or self._choices[index] is not choice:
            raise ValueError(f"choice {choice.index} of {choice.request.request_id} is not here")
        return index
