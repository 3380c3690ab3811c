"""A row's place in its grammar. The mask of each position is computed exactly once, before its token is consumed,
whoever asks. So a grammar's cost, and where it exceeds a limit, depend on the row's tokens alone, also under replay.

Copies of a compiled grammar share lexer state and its size limit. A row that finds the limit used up starts over with
an unshared copy, and fails only if that exceeds the limit, too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from pagoda_worker.grammars.masks import Bits, Ids, Mask, has, mask_of, put

NO_TEXT = b"\xff"  # llguidance writes this before the number of a token without text
NOTHING = np.empty(0, np.int64)


class GrammarTokens:
    """What matchers know of a vocabulary. `vocab_size` is the width of the logits, `model_ends` are the end-of-sequence
    tokens known to `tokenizer`, `special` its other special tokens."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        ends = tokenizer.eos_tokens
        self.model_ends = np.array(ends, np.int64)
        size = min(vocab_size, tokenizer.vocab_size)
        special = [token for token in range(size) if tokenizer.is_special_token(token) and token not in ends]
        self.special = np.array(special, np.int64)
        self._tokenizer = tokenizer

    @property
    def num_bytes(self) -> int:
        """Size of a mask with one bit per token."""
        return -(-self.vocab_size // 8)

    def spelled(self, text: bytes) -> Ids:
        """The token that begins this text when it is written without special tokens."""
        return np.array(self._tokenizer.tokenize_bytes(text[:1])[:1], np.int64)


class Matcher:
    """Belongs to one row, and is dropped with it.

    `state` is its own; `anew` makes one that shares nothing. `ends` are the request's end-of-sequence tokens, which are
    allowed where the grammar may end, and nowhere else. A failed matcher allows nothing, and `error` says why.
    """

    def __init__(self, state: LLMatcher, tokens: GrammarTokens, ends: Ids, anew: Callable[[], LLMatcher]) -> None:
        self._state = state
        self._anew: Callable[[], LLMatcher] | None = anew
        self._taken: list[int] = []  # by the state
        self._tokens = tokens
        self._ends = ends
        self._ended = False
        self._num_consumed = 0
        self._bits: Bits | None = None
        self._mask: Mask | None = None
        self._forced: Ids | None = None
        self.error = ""

    def bits(self) -> Bits:
        """Which tokens may come next, a bit per token, lowest bit of a byte first; after an end, only ends. The caller
        must not write to it, and must ignore bits beyond the vocabulary."""
        if self._bits is None:
            self._bits = self._allowed()
        return self._bits

    def mask(self) -> Mask:
        """The same as the shorter of two lists."""
        if self._mask is None:
            self._mask = mask_of(self.bits(), self._tokens.vocab_size)
        return self._mask

    def allows(self, token: int) -> bool:
        """Whether this token of the vocabulary may come next."""
        return bool(has(self.bits(), np.array([token])).all())

    def forced(self, limit: int) -> Ids:
        """Up to `limit` tokens that the grammar forces next. The mask is computed first, so this reveals nothing to the
        matcher that a row without drafts would not know."""
        if self._ended or limit < 1:
            return NOTHING
        self.bits()
        if self.error:
            return NOTHING
        if self._forced is None:
            self._forced = np.array(self._state.compute_ff_tokens(), np.int64)
        return self._forced[:limit]

    def may_begin(self, tokens: Ids) -> bool:
        """Whether the first of these tokens may come next. Looking further, even on a copy, would explore what a row
        without drafts does not, and so move the point where the grammar exceeds its limit."""
        return not self.error and not self._ended and len(tokens) > 0 and self.allows(int(tokens[0]))

    def consume(self, token: int) -> None:
        """Take the next output; a forbidden token is an error."""
        if not self.allows(token):
            self._fail("the tokens so far do not match it")
        elif token in self._ends:
            self._ended = True
        elif not self._take(token):
            self._fail(self._state.get_error())
        self._num_consumed += 1
        self._bits = self._mask = self._forced = None

    def _take(self, token: int) -> bool:
        if not self._state.consume_token(token):
            return self._begin_anew() and self._take(token)
        self._taken.append(token)
        return True

    def _begin_anew(self) -> bool:
        """Replace the failed state once by an unshared one at the same place; returns whether that worked."""
        if self._anew is None:
            return False
        self._state, self._anew = self._anew(), None
        for token in self._taken:
            self._state.compute_bitmask()
            if not self._state.consume_token(token):
                return False
        return not self._state.is_error()

    def _allowed(self) -> Bits:
        tokens = self._tokens
        allowed = np.zeros(tokens.num_bytes, np.uint8)
        if not self.error and not self._ended:
            found = self._state.compute_bitmask()
            if self._state.is_error() and self._begin_anew():
                found = self._state.compute_bitmask()
            if self._state.is_error():
                self._fail(self._state.get_error())
            else:
                allowed = np.frombuffer(found, np.uint8).copy()
        ends = bool(has(allowed, tokens.model_ends).any())
        may_end = self._ended or (ends and self._state.is_accepting())
        special = tokens.special[has(allowed, tokens.special)]
        wrong = [token for token in special.tolist() if not self._state.validate_tokens([token])]
        if wrong or (ends and not may_end):
            # Where only one text can follow, llguidance allows the token it is usually written with, but does not
            # accept that token if it is special. Such a text is spelled out.
            put(allowed, np.array(wrong, np.int64), to=False)
            self._spell(allowed, self._state.compute_ff_bytes())
        put(allowed, tokens.model_ends, to=False)
        put(allowed, self._ends, to=may_end and not self.error)
        return allowed

    def _spell(self, allowed: Bits, text: bytes) -> None:
        if text.startswith(NO_TEXT):
            self._fail("it requires an end of sequence before its end")
        else:
            put(allowed, self._tokens.spelled(text), to=True)

    def _fail(self, why: str) -> None:
        self.error = self.error or f"{why.splitlines()[0] if why else 'it failed'} (output token {self._num_consumed})"
