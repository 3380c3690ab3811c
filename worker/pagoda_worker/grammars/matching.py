"""A row's place in its grammar. Every position has its mask computed once, before its token is consumed, whoever asks:
so what a grammar costs, and where it becomes too much, depends on the row's tokens alone, also when they are replayed.
"""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

Ids = NDArray[np.int64]
NOTHING = np.empty(0, np.int64)


class GrammarTokens:
    """What matchers know of a vocabulary. `vocab_size` is the width of the logits, `model_ends` are the ends of
    sequence that `tokenizer` knows, `special` its other special tokens."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.model_ends = np.array(tokenizer.eos_tokens, np.int64)
        size = min(vocab_size, tokenizer.vocab_size)
        special = np.array([token for token in range(size) if tokenizer.is_special_token(token)], np.int64)
        self.special = np.setdiff1d(special, self.model_ends)
        self._tokenizer = tokenizer

    def spelled(self, text: bytes) -> list[int]:
        """The token that begins this text, if it is to be written without special ones."""
        return self._tokenizer.tokenize_bytes(text[:1])[:1]


class Matcher:
    """Of one row; dropped with it.

    `state` is its own. `ends` are the request's ends of sequence: they are allowed where the grammar may end, and
    nowhere else. Once it has failed, it allows nothing, and `error` says why.
    """

    def __init__(self, state: LLMatcher, tokens: GrammarTokens, ends: Ids) -> None:
        self._state = state
        self._tokens = tokens
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

    def forced(self, limit: int) -> Ids:
        """The tokens that come next, up to `limit`, as far as the grammar leaves no choice. The mask is found first, so
        this finds out nothing that a row without drafts would not know."""
        self.forbidden()
        if self.error or self._ended or limit < 1:
            return NOTHING
        return np.array(self._state.compute_ff_tokens()[:limit], np.int64)

    def fitting(self, tokens: Ids) -> Ids:
        """The first of these tokens, up to one that cannot stand there. A copy is asked: see above."""
        if self.error or self._ended:
            return tokens[:0]
        return tokens[: self._state.deep_copy().validate_tokens(tokens.tolist())]

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
        allowed = np.zeros(self._tokens.vocab_size, np.bool_)
        if not self.error and not self._ended:
            mask = self._state.compute_bitmask()
            if self._state.is_error():
                self._fail(self._state.get_error())
            else:
                bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(allowed), bitorder="little")
                allowed = bits.astype(np.bool_)
        ends = bool(allowed[self._tokens.model_ends].any())
        may_end = self._ended or (ends and self._state.is_accepting())
        special = self._tokens.special
        wrong = [one for one in special[allowed[special]].tolist() if not self._state.validate_tokens([one])]
        if wrong or (ends and not may_end):
            # Where only one text can follow, llguidance allows the token it is written with, and then does not take
            # that one if it is special. Such a text is spelled out.
            allowed[wrong] = False
            allowed[self._tokens.spelled(self._state.compute_ff_bytes())] = True
        allowed[self._tokens.model_ends] = False
        allowed[self._ends] = may_end and not self.error
        return allowed

    def _fail(self, why: str) -> None:
        self.error = self.error or f"{why.splitlines()[0] if why else 'it failed'} (output token {self._num_consumed})"
