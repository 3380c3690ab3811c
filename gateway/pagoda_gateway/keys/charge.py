"""Charges a run to its key: against the quota while it runs, and to the usage, once, when it is over."""

from __future__ import annotations

from collections.abc import Callable

from pagoda_gateway.keys.quota import Quota
from pagoda_gateway.keys.usage import UsageLedger
from pagoda_proto.records import Usage


class Charge:
    """Call `begin` before the run is submitted, `taken` once an engine core has accepted it, and `end` with the run. A
    run that no engine core accepted has used nothing.
    """

    def __init__(self, quota: Quota, ledger: UsageLedger, tenant: str, model: str) -> None:
        self._quota = quota
        self._ledger = ledger
        self._tenant = tenant
        self._model = model
        self._taken = False

    def check(self, num_prompt_tokens: int) -> None:
        """Raises PagodaError as `Quota.check_prompt` does."""
        self._quota.check_prompt(num_prompt_tokens)

    def begin(self, usage: Callable[[], Usage]) -> None:
        """`usage` returns the run's usage so far."""
        self._quota.begin(self, usage().prompt_tokens, lambda: usage().output_tokens)

    def taken(self) -> None:
        self._taken = True

    def end(self, usage: Usage) -> None:
        self.release(usage)
        self.count(usage)

    def release(self, usage: Usage) -> None:
        """The run is over here; the caller decides later whether to `count` it."""
        self._quota.end(self, give_back=0 if self._taken else usage.prompt_tokens)

    def count(self, usage: Usage) -> None:
        if self._taken:
            self._ledger.count(self._tenant, self._model, usage)
