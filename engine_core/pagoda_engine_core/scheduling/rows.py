"""A choice either has a row of its worker or waits for one, both in the policy's order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter

from pagoda_engine_core.scheduling.ledger import Cause
from pagoda_engine_core.scheduling.request import Choice, ChoiceState, Request

Policy = Callable[[Request], tuple[float, ...]]
"""Smaller runs earlier. Fixed while a scheduler holds the request; ties go to the one added first."""

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


class Adapters:
    """Digests of the adapters that one worker's rows use, at most `most` of them.

    There is always a place for one: a worker that takes no adapters refuses each such row itself.
    """

    def __init__(self, most: int, choices: Iterable[Choice]) -> None:
        self._most = max(1, most)
        self._choices = choices
        self._taken: set[str] = set()

    def fits(self, digest: str) -> bool:
        if not digest:
            return True
        held = self._taken | {choice.request.adapter_digest for choice in self._choices} - {""}
        return digest in held or len(held) < self._most

    def take(self, digest: str) -> None:
        self._taken |= {digest} - {""}


class Rows:
    """Choices that have a row on a worker (`running`) and those that wait for one.

    `dropped` are rows that the worker still holds; the next plan tells it to drop them. `num_requests` counts requests
    with a row, `queued_tokens` the prompt tokens of the others. A choice frees its blocks before it leaves. Rows use at
    most `max_adapters` adapters at once.
    """

    def __init__(self, row_ids: Iterator[int], max_rows: int, max_adapters: int = 0) -> None:
        self.waiting, self.running = OrderedChoices(), OrderedChoices()
        self.dropped: list[int] = []
        self.max_rows = max_rows
        self.max_adapters = max_adapters
        self.num_requests = self.queued_tokens = 0
        self._row_ids = row_ids

    def emptied(self) -> Rows:
        """Rows of the same worker, without choices."""
        return Rows(self._row_ids, self.max_rows, self.max_adapters)

    @property
    def num_free(self) -> int:
        return self.max_rows - len(self.running)

    def lacks(self, choice: Choice) -> Cause | None:
        """What keeps a waiting choice from getting a row, apart from tokens and blocks."""
        if self.num_free < 1:
            return Cause.QUEUED_ROWS
        fits = Adapters(self.max_adapters, self.running).fits(choice.request.adapter_digest)
        return None if fits else Cause.QUEUED_ADAPTERS

    @property
    def adapters(self) -> Adapters:
        """Adapters of all choices, running and waiting."""
        return Adapters(self.max_adapters, [*self.running, *self.waiting])

    def enter(self, choice: Choice) -> None:
        """Give a waiting choice a row."""
        request = choice.request
        self.waiting.remove(choice)
        choice.become_row(next(self._row_ids))
        self.running.add(choice)
        request.num_rows += 1
        if request.num_rows == 1:
            self.num_requests += 1
            self.queued_tokens -= request.num_prompt_tokens

    def renew(self, choice: Choice) -> None:
        """Give a choice that continues from another beam a new row."""
        if choice.state is not ChoiceState.RUNNING:
            self.enter(choice)
            return
        self._drop(choice)
        choice.become_row(next(self._row_ids))

    def leave(self, choice: Choice, state: ChoiceState, now: float) -> None:
        """Take a choice's row away."""
        request = choice.request
        self.running.remove(choice)
        self._drop(choice)
        choice.leave_worker(state)
        request.num_rows -= 1
        if not request.num_rows:
            self.num_requests -= 1
            self.queued_tokens += request.num_prompt_tokens
            request.note_idle(now)

    def preempt(self, choice: Choice, now: float) -> None:
        """Let a choice wait to resume, from its swapped-out blocks or by recomputation."""
        if choice.state is ChoiceState.RUNNING:
            self.leave(choice, ChoiceState.PREEMPTED, now)
            self.waiting.add(choice)
        else:
            choice.leave_worker(ChoiceState.PREEMPTED)

    def _drop(self, choice: Choice) -> None:
        if choice.launched:
            self.dropped.append(choice.row_id)  # else the worker has never seen it

    def drop_rows(self, failed: Collection[int]) -> None:
        """Forget rows that the worker has dropped by itself."""
        self.dropped = [row_id for row_id in self.dropped if row_id not in failed]

    def take_dropped(self) -> list[int]:
        dropped, self.dropped = self.dropped, []
        return dropped
