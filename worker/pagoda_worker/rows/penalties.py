"""Changes that a request asks for to its logits before sampling. Most rows ask for none and have no Processing.

The order is that of vLLM's sampler: allowed tokens, bad words, min_tokens, the grammar, logit bias, then the
repetition, frequency and presence penalties. Masking is -inf, which no later operation undoes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagoda_proto.params import SamplingParams
from pagoda_worker.grammars.matching import Matcher
from pagoda_worker.rows.order import Ids, Logits

MASKED = np.float32(-np.inf)


class TokenCounts:
    """A row's distinct tokens and how often each is in its output; adding a token costs one lookup."""

    def __init__(self, tokens: Ids, num_prompt_tokens: int) -> None:
        ids, place = np.unique(tokens, return_inverse=True)
        self._size = len(ids)
        self._place = {token: i for i, token in enumerate(ids.tolist())}
        self._ids = np.concatenate([ids, np.zeros(64, np.int64)])
        counts = np.bincount(place[num_prompt_tokens:], minlength=len(self._ids))
        self._counts = counts.astype(np.int64)

    @property
    def ids(self) -> Ids:
        """Every token of prompt and output once."""
        return self._ids[: self._size]

    @property
    def output_counts(self) -> Ids:
        """How often each of `ids` is in the output; 0 for tokens only in the prompt."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1


@dataclass(frozen=True, kw_only=True)
class Processing:
    """One row's changes to its logits. Only `counts` and `matcher` grow with the row; they exist only with penalties
    and with a grammar, respectively."""

    params: SamplingParams
    allowed: Ids | None
    ending: Ids  # eos and stop tokens, masked until min_tokens outputs
    bias_ids: Ids
    bias: Logits
    counts: TokenCounts | None
    matcher: Matcher | None = None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        eos_token_ids: tuple[int, ...],
        tokens: Ids,
        num_prompt_tokens: int,
        matcher: Matcher | None = None,
    ) -> Processing | None:
        """The row's processing, or None if its parameters ask for nothing. `matcher` has consumed the output."""
        penalised = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        ending = (*eos_token_ids, *params.stop_token_ids) if params.min_tokens else ()
        listed = params.allowed_token_ids or params.bad_words_token_ids or params.logit_bias
        if not (penalised or ending or listed or matcher):
            return None
        return cls(
            params=params,
            allowed=_ids(params.allowed_token_ids) if params.allowed_token_ids else None,
            ending=_ids(ending),
            bias_ids=_ids(tuple(params.logit_bias)),
            bias=np.array(list(params.logit_bias.values()), np.float32),
            counts=TokenCounts(tokens, num_prompt_tokens) if penalised else None,
            matcher=matcher,
        )

    def count(self, token: int) -> None:
        """Note a token appended to the output."""
        if self.counts is not None:
            self.counts.add(token)
        if self.matcher is not None:
            self.matcher.consume(token)

    def applies(self, num_outputs: int) -> bool:
        """Whether the next token's logits can change at all: min_tokens alone stops mattering once it is reached."""
        lasting = self.allowed is not None or self.params.bad_words_token_ids or len(self.bias_ids) or self.counts
        lasting = lasting or self.matcher is not None
        return bool(lasting) or (len(self.ending) > 0 and num_outputs < self.params.min_tokens)

    def apply(self, logits: Logits, outputs: Ids) -> None:
        """Change `logits` [V] in place for the token that follows `outputs`."""
        allowed, masked = self.limits(outputs, len(logits))
        if allowed is not None:
            kept = logits[allowed]
            logits.fill(MASKED)
            logits[allowed] = kept
        logits[masked] = MASKED
        with np.errstate(over="ignore"):  # the caller checks the maximum for overflow
            logits[self.bias_ids] += self.bias
            if self.counts is not None:
                self._penalise(logits, self.counts)

    def limits(self, outputs: Ids, vocab_size: int) -> tuple[Ids | None, Ids]:
        """The only tokens that may follow `outputs` (None: all), and those that must not: they would complete a bad
        word, end the row too early, or violate its grammar."""
        masked = _ids(tuple(w[-1] for w in self.params.bad_words_token_ids if completes(w, outputs)))
        if len(outputs) < self.params.min_tokens:
            masked = np.concatenate([masked, self.ending])
        if self.matcher is None:
            return self.allowed, masked
        mask = self.matcher.mask()
        if not mask.keeps:
            return self.allowed, np.concatenate([masked, mask.ids])
        allowed = mask.ids if self.allowed is None else np.intersect1d(self.allowed, mask.ids)
        return (allowed, masked) if len(allowed) else (None, np.arange(vocab_size))

    def _penalise(self, logits: Logits, counts: TokenCounts) -> None:
        """CTRL's repetition penalty (arXiv 1909.05858) over prompt and output, OpenAI's two over the output."""
        repetition = np.float32(self.params.repetition_penalty)
        values = logits[counts.ids]
        values = np.where(values > 0, values / repetition, values * repetition)
        times = counts.output_counts
        values -= np.float32(self.params.frequency_penalty) * times.astype(np.float32)
        values -= np.float32(self.params.presence_penalty) * (times > 0).astype(np.float32)
        logits[counts.ids] = values


def completes(word: tuple[int, ...], outputs: Ids) -> bool:
    """Whether the word's last token would complete it: the rest ends the output, never the prompt (as in vLLM)."""
    prefix = len(word) - 1
    return prefix <= len(outputs) and tuple(outputs[len(outputs) - prefix :].tolist()) == word[:-1]


def _ids(values: tuple[int, ...]) -> Ids:
    return np.array(values, np.int64)
