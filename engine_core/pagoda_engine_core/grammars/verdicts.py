"""Remembers verdicts on grammars for when they come again, for good or for a while.

A grammar that took its process down costs more than any other, so it is refused unchecked for a while, which doubles
each time it does so again. Not for good, because a busy machine may have been the cause.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple

from pagoda_proto.errors import PagodaError
from pagoda_proto.times import GRAMMAR_REFUSED_MOST_S, GRAMMAR_REFUSED_S

MAX_FINAL = 4096
MAX_DEAR = 1024


class Verdict(NamedTuple):
    """`error` says why a grammar is refused, None if it is not. `final`: checking again would give the same. `dear`: it
    took the process down. `tenant`: the verdict only concerns this tenant's place in the queue; None: the grammar."""

    error: PagodaError | None
    final: bool
    dear: bool = False
    tenant: str | None = None


class _Dear(NamedTuple):
    verdict: Verdict
    until: float
    refused_s: float


class Verdicts:
    """The verdicts used last, a limited number of each kind."""

    def __init__(self) -> None:
        self._final: OrderedDict[bytes, Verdict] = OrderedDict()
        self._dear: OrderedDict[bytes, _Dear] = OrderedDict()

    def find(self, grammar: str, now: float) -> Verdict | None:
        name = _digest(grammar)
        if (verdict := self._final.get(name)) is not None:
            self._final.move_to_end(name)
            return verdict
        dear = self._dear.get(name)
        return dear.verdict if dear is not None and now < dear.until else None

    def keep(self, grammar: str, verdict: Verdict, now: float) -> None:
        name = _digest(grammar)
        if verdict.final:
            self._dear.pop(name, None)
            self._final[name] = verdict
            self._final.move_to_end(name)
        elif verdict.dear:
            before = self._dear.pop(name, None)
            seconds = min(2 * before.refused_s, GRAMMAR_REFUSED_MOST_S) if before else GRAMMAR_REFUSED_S
            self._dear[name] = _Dear(verdict, now + seconds, seconds)
        if len(self._final) > MAX_FINAL:
            self._final.popitem(last=False)
        if len(self._dear) > MAX_DEAR:
            self._dear.popitem(last=False)


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
