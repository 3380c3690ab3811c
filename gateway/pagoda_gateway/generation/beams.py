"""Beam search: of all ways to go on, keep the likeliest few, and of those that ended the best by likelihood and length.

It is transformers' search with `early_stopping: false`: a way that ends counts if it is among the first `width`; the
score is the sum of log-probabilities over length to the power of `length_penalty`; it is over when what goes on could
not be better, at its present length, than what ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nlargest
from typing import NamedTuple

from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.params import MAX_LOGPROBS

Candidates = Sequence[tuple[int, float]]
"""Tokens and their log-probabilities."""


class Beam(NamedTuple):
    """`token_ids` behind the prompt, and the sum of their log-probabilities."""

    token_ids: tuple[int, ...]
    logprob: float


class Way(NamedTuple):
    """What a beam may become, with the sum of log-probabilities then; few do, so it is not written out yet."""

    beam: Beam
    token_id: int
    logprob: float

    def taken(self) -> Beam:
        return Beam((*self.beam.token_ids, self.token_id), self.logprob)


class Ended(NamedTuple):
    """`at_end`: by an end of sequence, its last token; else it was cut."""

    beam: Beam
    score: float
    at_end: bool


class BeamSearch:
    """Of one prompt. While it is not `done`: find `num_candidates` of each of `running`, and `take` them."""

    def __init__(self, width: int, length_penalty: float, ends: frozenset[int], max_tokens: int) -> None:
        """Raises InvalidParams for a width that would need more candidates than are told."""
        self.num_candidates = max(2, 1 + len(ends)) * width
        if self.num_candidates > MAX_LOGPROBS:
            most = MAX_LOGPROBS // max(2, 1 + len(ends))
            raise InvalidParams([Problem("n", f"beam search has at most {most} beams here, got {width}")])
        self.running = [Beam((), 0.0)]
        self.done = False
        self._width = width
        self._length_penalty = length_penalty
        self._ends = ends
        self._max_tokens = max_tokens
        self._ended: list[Ended] = []

    @property
    def best(self) -> list[Ended]:
        """What ended, the best first."""
        return self._ended

    def take(self, candidates: Sequence[Candidates]) -> None:
        """One list for each of `running`."""
        length = len(self.running[0].token_ids) + 1
        kept = nlargest(self.num_candidates, self._ways(candidates), key=lambda way: way.logprob)
        cut = length >= self._max_tokens
        ended = [
            Ended(way.taken(), self._score(way.logprob, length), way.token_id in self._ends)
            for way in kept[: self._width]
            if cut or way.token_id in self._ends
        ]
        self._ended = nlargest(self._width, [*self._ended, *ended], key=lambda one: one.score)
        going_on = [way for way in kept if not cut and way.token_id not in self._ends]
        self.running = [way.taken() for way in going_on[: self._width]]
        self.done = not self.running or not self._may_improve(length)

    def _ways(self, candidates: Sequence[Candidates]) -> Iterator[Way]:
        for beam, found in zip(self.running, candidates, strict=True):
            for token_id, logprob in found:
                yield Way(beam, token_id, beam.logprob + logprob)

    def _may_improve(self, length: int) -> bool:
        if len(self._ended) < self._width:
            return True
        return self._score(self.running[0].logprob, length) > self._ended[-1].score

    def _score(self, logprob: float, length: int) -> float:
        divisor: float = length**self._length_penalty
        return logprob / divisor
