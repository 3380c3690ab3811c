"""Text repeats itself: what followed the last few tokens where they stood before is a good guess at what follows now.

Prompt lookup decoding (A. Saxena, 2023). Every token remembers where the three tokens that end with it ended before,
so a lookup walks back through earlier places, most recent first, and takes the one that agrees with most of the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from pagoda_worker.rows.order import Ids

SIZE = 3  # tokens that must agree
MAX_MATCH = 16  # agreement beyond this is not told apart
MAX_PLACES = 8  # earlier places looked at
ID_BITS = 21  # of a token id in a key; longer ids may share a key, which a lookup notices


class NgramIndex:
    """The places of one growing list of tokens, which its owner keeps and hands to every call."""

    __slots__ = ("_last", "_previous")

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # where these three tokens ended last
        self._previous = array("i")  # per token, where the same three tokens ended before; -1: nowhere

    def __len__(self) -> int:
        """Tokens indexed so far."""
        return len(self._previous)

    def extend(self, tokens: Ids, limit: int) -> int:
        """Index up to `limit` more of `tokens`; how many it were."""
        start = len(self._previous)
        end = min(len(tokens), start + limit)
        first = max(start, SIZE - 1)
        self._previous.extend([-1] * (min(first, end) - start))  # no three tokens end there
        if first < end:
            window = tokens[first - SIZE + 1 : end]
            keys = window[:-2] << 2 * ID_BITS | window[1:-1] << ID_BITS | window[2:]
            for place, key in enumerate(keys.tolist(), first):
                self._previous.append(self._last.get(key, -1))
                self._last[key] = place
        return end - start

    def distance(self, tokens: Ids) -> int:
        """How far back the text last read as it does now; 0 when it never did, or when not all is indexed."""
        best, longest = 0, SIZE - 1
        for length, distance in self.matches(tokens):
            if length > longest:
                best, longest = distance, length
            if length >= min(MAX_MATCH, len(tokens)):
                break
        return best

    def matches(self, tokens: Ids) -> Iterator[tuple[int, int]]:
        """How many of the last tokens agree with those before earlier places, and how far back these are, the most
        recent first; none when not all is indexed."""
        if not len(tokens) or len(self._previous) != len(tokens):
            return
        last = len(tokens) - 1
        place = self._previous[last]
        tail = tokens[-MAX_MATCH:].tolist()
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            length = common_suffix(tail, tokens[max(0, place + 1 - MAX_MATCH) : place + 1].tolist())
            if length >= SIZE:  # else long ids have shared a key
                yield length, last - place
            place = self._previous[place]


def continuation(tokens: Ids, distance: int, count: int) -> Ids:
    """The `count` tokens that follow if the text goes on as it did `distance` ago, its own repetition included."""
    start = len(tokens) - distance
    return np.resize(tokens[start : start + count], count)


def common_suffix(one: Sequence[int], other: Sequence[int]) -> int:
    length = 0
    for left, right in zip(reversed(one), reversed(other), strict=False):
        if left != right:
            break
        length += 1
    return length
