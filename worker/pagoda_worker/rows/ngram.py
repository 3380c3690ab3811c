"""Text repeats itself: what followed an earlier occurrence of the last few tokens is a good draft of what follows now.

For every token the index stores where the trigram ending there occurred before, so a lookup walks back through earlier
places, most recent first. Prompt lookup decoding (A. Saxena, 2023) finds its drafts in this way.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from pagoda_worker.rows.order import Ids

SIZE = 3  # tokens that must match
MAX_MATCH = 16  # longer matches are not told apart
MAX_PLACES = 8  # earlier places examined
ID_BITS = 21  # of a token id in a key; larger ids may share a key, which a lookup notices


class NgramIndex:
    """Trigram positions in one growing list of tokens, which its owner keeps and passes to every call."""

    __slots__ = ("_last", "_previous")

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # where each trigram last ended
        self._previous = array("i")  # per token, where its trigram ended before; -1: nowhere

    def __len__(self) -> int:
        """Tokens indexed so far."""
        return len(self._previous)

    def extend(self, tokens: Ids, limit: int) -> int:
        """Index up to `limit` more of `tokens`; returns how many."""
        start = len(self._previous)
        end = min(len(tokens), start + limit)
        first = max(start, SIZE - 1)
        self._previous.extend([-1] * (min(first, end) - start))  # no trigram ends there
        if first < end:
            window = tokens[first - SIZE + 1 : end]
            keys = window[:-2] << 2 * ID_BITS | window[1:-1] << ID_BITS | window[2:]
            for place, key in enumerate(keys.tolist(), first):
                self._previous.append(self._last.get(key, -1))
                self._last[key] = place
        return end - start

    def matches(self, tokens: Ids) -> Iterator[tuple[int, int]]:
        """Pairs of match length at an earlier place and distance to it, the most recent place first; none if not all
        tokens are indexed."""
        if not len(tokens) or len(self._previous) != len(tokens):
            return
        last = len(tokens) - 1
        place = self._previous[last]
        tail = tokens[-MAX_MATCH:].tolist()
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            length = common_suffix(tail, tokens[max(0, place + 1 - MAX_MATCH) : place + 1].tolist())
            if length >= SIZE:  # otherwise large ids have shared a key
                yield length, last - place
            place = self._previous[place]


def continuation(tokens: Ids, distance: int, count: int) -> Ids:
    """The next `count` tokens if the text continues as it did `distance` tokens ago, repeating itself if need be."""
    start = len(tokens) - distance
    return np.resize(tokens[start : start + count], count)


def common_suffix(one: Sequence[int], other: Sequence[int]) -> int:
    length = 0
    for left, right in zip(reversed(one), reversed(other), strict=False):
        if left != right:
            break
        length += 1
    return length
