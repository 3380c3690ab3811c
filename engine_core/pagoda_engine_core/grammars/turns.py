"""Which grammar is checked next: tenants with waiting grammars take turns, and the one with most of them makes room.

So whatever one tenant sends, another's first grammar finds a place and waits for at most one check of each tenant.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from pagoda_engine_core.grammars.verdicts import Verdict
from pagoda_proto.errors import ErrorCode, PagodaError

Told = Callable[[str, Verdict], object]


class Turns:
    """Waiting grammars, at most `most`, each with its `Told` callback. For any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lines: OrderedDict[str, dict[str, Told]] = OrderedDict()  # by tenant, in order of turns; never empty
        self._changed = threading.Condition()
        self._closed = False

    def put(self, tenant: str, grammar: str, told: Told) -> tuple[str, str, Told] | None:
        """Queue a grammar. Returns the entry that had to make room for it, preceded by its tenant. Raises PagodaError
        OVERLOADED if none has to."""
        with self._changed:
            line = self._lines.get(tenant, {})
            if grammar in line:
                return None
            gone = None
            if sum(map(len, self._lines.values())) >= self._most:
                longest = max(self._lines, key=lambda name: len(self._lines[name]))
                if len(self._lines[longest]) < len(line) + 2:
                    if self._waits(grammar):
                        return None
                    raise self.overloaded()
                gone = (longest, *self._lines[longest].popitem())
            self._lines.setdefault(tenant, line)[grammar] = told
            self._changed.notify()
            return None if gone is None or self._waits(gone[1]) else gone

    def take(self) -> tuple[str, Told] | None:
        """Wait for the next grammar and remove it from all tenants' queues; None when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed)
            if self._closed:
                return None
            tenant, line = self._lines.popitem(last=False)
            grammar, told = next(iter(line.items()))
            self._lines[tenant] = line
            for name, other in list(self._lines.items()):
                other.pop(grammar, None)
                if not other:
                    del self._lines[name]
            return grammar, told

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def overloaded(self) -> PagodaError:
        message = f"{self._most} grammars are already waiting to be checked; try again"
        return PagodaError(ErrorCode.OVERLOADED, message, "grammar")

    def _waits(self, grammar: str) -> bool:
        return any(grammar in line for line in self._lines.values())
