"""A row's place in its grammar. Every position has its mask computed once, before its token is consumed, whoever asks:
so what a grammar costs, and where it becomes too much, depends on the row's tokens alone, also when they are replayed.
"""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class Matcher:
    """Of one row; dropped with it.

    `state` is its own. `model_ends` are the ends of sequence that `state` knows, `ends` those of the request: they are
    allowed where the grammar may end, and nowhere else. Once it has failed, it allows nothing, and `error` says why.
    """

    def __init__(self, state: LLMatcher, vocab_size: int, model_ends: Ids, ends: Ids) -> None:
        self._state = state
        self._vocab_size = vocab_size
        self._model_ends = model_ends
        self._ends = ends
        self._ended = False
        self._num_consumed = 0
        self._forbidden: Ids | None = None
        self.error = ""

    def forbidden(self) -> Ids:
        """The tokens that must not come next, ascending; after an end, all but ends."""
        if self._forbidden is None:
            self._forbidden = np.flatnonzero(~self._allowed())
        return self._forbidden

    def consume(self, token: int) -> None:
        """Take the next output; a token that is forbidden is an error."""
        forbidden = self.forbidden()
        place = int(np.searchsorted(forbidden, token))
        if place < len(forbidden) and forbidden[place] == token:
            self._fail("its tokens so far do not fit it")
        elif token in self._ends:
            self._ended = True
        elif not self._state.consume_token(token):
            self._fail(self._state.get_error())
        self._num_consumed += 1
        self._forbidden = None

    def _allowed(self) -> NDArray[np.bool_]:
        allowed = np.zeros(self._vocab_size, np.bool_)
        if not self.error and not self._ended:
            mask = self._state.compute_bitmask()
            if self._state.is_error():
                self._fail(self._state.get_error())
            else:
                bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._vocab_size, bitorder="little")
                allowed = bits.astype(np.bool_)
        may_end = self._ended or bool(allowed[self._model_ends].any())
        allowed[self._model_ends] = False
        allowed[self._ends] = may_end and not self.error
        return allowed

    def _fail(self, why: str) -> None:
        self.error = self.error or f"{why.splitlines()[0] if why else 'it failed'} (output token {self._num_consumed})"
