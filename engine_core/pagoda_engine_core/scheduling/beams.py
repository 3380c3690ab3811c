"""Beam search: of all ways to go on, keep the likeliest few, and of those that ended the best by likelihood and length.

It is transformers' search with `early_stopping: false`: a way that ends counts if it is among the first `width`; the
score is the sum of log-probabilities over length to the power of `length_penalty`; it is over when what goes on could
not be better, at its present length, than what ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest
from typing import NamedTuple

from pagoda_proto.steps import TopLogprobs


class Beam(NamedTuple):
    """`token_ids` behind the prompt, the sum of their log-probabilities, and what is told of each, if anything is."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    told: tuple[TopLogprobs, ...] = ()


class Way(NamedTuple):
    """What the beam at `place` may become, with the sum of log-probabilities then: its token of this rank."""

    place: int
    rank: int
    token_id: int
    logprob: float


class Ended(NamedTuple):
    """`at_end`: by a token that ends it, its last; else it was cut."""

    beam: Beam
    score: float
    at_end: bool


class BeamSearch:
    """Of one prompt. While it is not `done`: `find` the likeliest tokens after each of `running`, then `advance`.

    Args:
        width: How many beams are kept, and how many sequences come of it.
        ends: The tokens that end a sequence.
        num_logprobs: Alternatives that are told of each token; None if nothing is.
    """

    def __init__(
        self,
        width: int,
        length_penalty: float,
        ends: frozenset[int],
        max_tokens: int,
        num_logprobs: int | None = None,
    ) -> None:
        self.running = [Beam()]
        self.best: list[Ended] = []  # of what ended, the best first
        self.sources: list[int] = []  # from which places, one step ago, they come
        self.done = False
        self._found: dict[int, TopLogprobs] = {}
        self._width = width
        self._length_penalty = length_penalty
        self._ends = ends
        self._max_tokens = max_tokens
        self._num_logprobs = num_logprobs

    def find(self, place: int, found: TopLogprobs) -> bool:
        """What may follow the beam at `place`, the likeliest first; whether that is known of all now."""
        self._found[place] = found
        return len(self._found) == len(self.running)

    def is_found(self, place: int) -> bool:
        return place in self._found

    def advance(self) -> None:
        """All is found: the next beams run."""
        length = len(self.running[0].token_ids) + 1
        cut = length >= self._max_tokens
        # Of E ends, at most E * width ways end: `width` go on.
        kept = nlargest((1 + len(self._ends)) * self._width, self._ways(), key=lambda way: way.logprob)
        ended = [
            Ended(self._taken(way), self._score(way.logprob, length), way.token_id in self._ends)
            for way in kept[: self._width]
            if cut or way.token_id in self._ends
        ]
        self.best = nlargest(self._width, [*self.best, *ended], key=lambda one: one.score)
        going_on = [way for way in kept if not cut and way.token_id not in self._ends][: self._width]
        self.running = [self._taken(way) for way in going_on]
        self.sources = [way.place for way in going_on]
        self._found = {}
        self.done = not self.running or not self._may_improve(length)

    def _ways(self) -> Iterator[Way]:
        for place, beam in enumerate(self.running):
            found = self._found[place]
            for rank, (token_id, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), 1):
                yield Way(place, rank, token_id, beam.logprob + logprob)

    def _taken(self, way: Way) -> Beam:
        beam, found = self.running[way.place], self._found[way.place]
        told = beam.told
        if self._num_logprobs is not None:
            tops = found.top_ids[: self._num_logprobs], found.top_logprobs[: self._num_logprobs]
            told = (*told, TopLogprobs(found.top_logprobs[way.rank - 1], way.rank, *tops))
        return Beam((*beam.token_ids, way.token_id), way.logprob, told)

    def _may_improve(self, length: int) -> bool:
        if len(self.best) < self._width:
            return True
        return self._score(self.running[0].logprob, length) > self.best[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return score(logprob, length, self._length_penalty)


def score(logprob: float, length: int, length_penalty: float) -> float:
    """Of a sequence of so many tokens with log-probabilities of this sum."""
    divisor: float = length**length_penalty
    return logprob / divisor
