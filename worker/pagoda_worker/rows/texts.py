"""What was said before, to those who may know it: the outputs of rows of one domain, found by how they go on.

A domain is what shares prefixes: one salt of one key's. Nothing is found across domains, neither tokens nor, by how
fast a request is, that there were any.

Memory is bounded. A domain has two halves; when the newer is full the older is forgotten. When all domains together
have too much, the one that was used longest ago is.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from weakref import ReferenceType, ref

from pagoda_worker.rows.ngram import ID_BITS, MAX_MATCH, MAX_PLACES, SIZE, common_suffix
from pagoda_worker.rows.order import Ids

HALF_TOKENS = 2**15  # of one domain; a token takes some 150 bytes
ALL_TOKENS = 2**19
TEXT_TOKENS = 64  # that a text counts for besides its own
_PLACE_BITS = 32  # of a place in its text; the rest is the text's number


class _Half:
    """Growing texts, and where any three of their tokens ended last and before that."""

    __slots__ = ("__weakref__", "_last", "_previous", "_texts", "size")

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._texts: list[array[int]] = []
        self._previous: list[array[int]] = []
        self.size = 0

    def begin(self) -> int:
        self._texts.append(array("q"))
        self._previous.append(array("q"))
        self.size += TEXT_TOKENS
        return len(self._texts) - 1

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        own, previous, last = self._texts[text], self._previous[text], self._last
        for token in tokens:
            own.append(token)
            if len(own) < SIZE:
                previous.append(-1)
                continue
            key = _key(own[-SIZE:])
            previous.append(last.get(key, -1))
            last[key] = text << _PLACE_BITS | len(own) - 1
        self.size += len(tokens)

    def matches(self, tail: Sequence[int], count: int) -> Iterator[tuple[int, list[int]]]:
        """See `Outputs.matches`."""
        found = self._last.get(_key(tail[-SIZE:]), -1)
        for _ in range(MAX_PLACES):
            if found < 0:
                return
            text, place = found >> _PLACE_BITS, found & (1 << _PLACE_BITS) - 1
            own = self._texts[text]
            following = own[place + 1 : place + 1 + count]
            length = common_suffix(tail, own[max(0, place + 1 - len(tail)) : place + 1])
            if following and length >= SIZE:
                yield length, following.tolist()
            found = self._previous[text][place]


@dataclass(slots=True)
class Text:
    """One row's outputs, in a half or, before any was taken, in none; its first `known` tokens are in or stay out. A
    row that goes on does not keep what its domain forgets."""

    known: int
    half: ReferenceType[_Half] | None = None
    number: int = 0


class Outputs:
    """Those of one domain."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._newer, self._older = _Half(), _Half()

    @property
    def size(self) -> int:
        return self._newer.size + self._older.size

    def take(self, text: Text, tokens: Ids) -> Text:
        """What `text` has not yet of its row's `tokens`; where to add more.

        A text begins with some tokens that come before: places are found by what precedes them.
        """
        if self._newer.size >= HALF_TOKENS:
            self._newer, self._older = _Half(), self._newer
        first = text.known
        if text.half is None or text.half() is not self._newer:
            text, first = Text(text.known, ref(self._newer), self._newer.begin()), max(0, first - MAX_MATCH)
        self._newer.extend(text.number, tokens[first:].tolist())
        text.known = len(tokens)
        return text

    def matches(self, tail: Sequence[int], count: int) -> Iterator[tuple[int, list[int]]]:
        """How many of `tail`, at most all, agree with what stood before places of earlier texts, and up to `count`
        tokens that followed there, the most recent first."""
        yield from islice(
            chain.from_iterable(half.matches(tail, count) for half in (self._newer, self._older)), MAX_PLACES
        )


class Domains:
    """The outputs of all domains, as far as there is room."""

    def __init__(self) -> None:
        self._outputs: OrderedDict[str, Outputs] = OrderedDict()
        self._size = 0  # of all: there may be thousands, so nobody counts them at every step

    def of(self, domain: str) -> Outputs:
        """To be read from now."""
        outputs = self._outputs.setdefault(domain, Outputs())
        self._outputs.move_to_end(domain)
        return outputs

    def take(self, domain: str, text: Text, tokens: Ids) -> Text:
        """See `Outputs.take`."""
        outputs = self.of(domain)
        before = outputs.size
        text = outputs.take(text, tokens)
        self._size += outputs.size - before
        return text

    def trim(self) -> None:
        """Forget what there is no room for; the domain used last stays."""
        while self._size > ALL_TOKENS and len(self._outputs) > 1:
            self._size -= self._outputs.popitem(last=False)[1].size


def _key(three: Sequence[int]) -> int:
    return three[0] << 2 * ID_BITS | three[1] << ID_BITS | three[2]
