"""Beam search: keep the likeliest continuations, and the ended sequences with the best score.

This is transformers' search with `early_stopping: false`: an ending counts if it is among the first `width` candidates;
the score is the sum of log-probabilities divided by length to the power of `length_penalty`; the search is over when no
running beam, at its present length, could score better than the ended ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest
from typing import NamedTuple

from pagoda_proto.steps import TopLogprobs


class Beam(NamedTuple):
    """`token_ids` after the prompt, the sum of their log-probabilities, and those reported of each, if asked for."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    told: tuple[TopLogprobs, ...] = ()


class Way(NamedTuple):
    """A candidate: the beam at `place` followed by its token of this rank; `logprob` is the sum with that token."""

    place: int
    rank: int
    token_id: int
    logprob: float


class Ended(NamedTuple):
    """An ended beam. `at_end`: its last token ended it; otherwise the length limit did."""

    beam: Beam
    score: float
    at_end: bool


class BeamSearch:
    """The search of one prompt. Until `done`: `find` the likeliest tokens after each of `running`, then `advance`.

    Args:
        width: Number of beams kept, and of sequences returned.
        ends: The tokens that end a sequence.
        num_logprobs: Alternatives reported of each token; None if no log-probabilities are.
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
        self.best: list[Ended] = []  # ended sequences, the best first
        self.sources: list[int] = []  # the place of each running beam's source one step ago
        self.done = False
        self._found: dict[int, TopLogprobs] = {}
        self._width = width
        self._length_penalty = length_penalty
        self._ends = ends
        self._max_tokens = max_tokens
        self._num_logprobs = num_logprobs

    def find(self, place: int, found: TopLogprobs) -> bool:
        """Record the candidates after the beam at `place`, the likeliest first. Whether all beams have theirs now."""
        self._found[place] = found
        return len(self._found) == len(self.running)

    def is_found(self, place: int) -> bool:
        return place in self._found

    def advance(self) -> None:
        """Choose the next beams, once all have their candidates."""
        length = len(self.running[0].token_ids) + 1
        cut = length >= self._max_tokens
        # With E ending tokens at most E * width candidates end, so `width` others remain.
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
    """The score of a sequence of `length` tokens whose log-probabilities sum to `logprob`."""
    divisor: float = length**length_penalty
    return logprob / divisor
