"""At every moment a request has exactly one reason why it is not finished yet; the ledger adds up the time per reason.

Because one cause ends where the next begins, the entries sum to the request's latency by construction. `Totals` counts
the work of a scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pagoda_proto.records import LedgerEntry


class Cause(StrEnum):
    """Why time passes. A request with several choices shows its most advanced one: decoding beats waiting."""

    QUEUED_NO_WORKER = "queued_no_worker"  # no worker has taken the request yet
    QUEUED_BEHIND = "queued_behind"  # behind earlier requests, or until the next step is planned
    QUEUED_BLOCKS = "queued_blocks"  # first in line, but not enough free KV blocks
    QUEUED_BUDGET = "queued_budget"  # first in line, but the steps' token budget is used up
    QUEUED_ROWS = "queued_rows"  # first in line, but the worker's rows are all in use
    QUEUED_ADAPTERS = "queued_adapters"  # first in line, but rows use as many other adapters as the worker can hold
    PREFILL = "prefill"  # first row planned until first token
    DECODE = "decode"
    PREEMPTED = "preempted"  # lost its blocks: waiting, and recomputing them
    REPLAYING = "replaying"  # lost its worker: the same, elsewhere


QUEUED = frozenset(cause for cause in Cause if cause.startswith("queued"))


class Ledger:
    """Time per cause, in the unit and number type of the `now` given to it. Owned by one request."""

    __slots__ = ("_closed", "_since", "_spent", "cause")

    def __init__(self, cause: Cause, now: float) -> None:
        self.cause = cause
        self._since = now
        self._spent: dict[Cause, float] = {}
        self._closed = False

    def enter(self, cause: Cause, now: float) -> None:
        """Attribute the time from `now` on to `cause`. A closed ledger takes no more entries (ValueError)."""
        if self._closed:
            raise ValueError(f"the ledger is closed; {cause} comes too late")
        self._settle(now)
        self.cause = cause

    def close(self, now: float) -> None:
        """Close the ledger when the request ends."""
        self.enter(self.cause, now)
        self._closed = True

    def entries(self) -> list[LedgerEntry]:
        """Entries in order of first appearance; they sum to the time from opening to the last change. Causes that took
        no time are left out."""
        return [LedgerEntry(cause.value, spent) for cause, spent in self._spent.items() if spent]

    def _settle(self, now: float) -> None:
        self._spent[self.cause] = self._spent.get(self.cause, 0) + (now - self._since)
        self._since = now


@dataclass(slots=True, kw_only=True)
class Totals:
    """Counts since the scheduler was made. Of the `draft_tokens` verified, `accepted_draft_tokens` became output; of
    the `preemptions`, `swap_preemptions` kept their K and V in swap blocks."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    swap_preemptions: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
