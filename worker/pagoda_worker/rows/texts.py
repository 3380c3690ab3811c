"""Earlier outputs, indexed for suffix lookup and visible only within their domain.

A domain is the scope of prefix sharing: one salt of one API key. Nothing is found across domains: neither tokens nor,
through timing, the fact that there were any. Memory is bounded. A domain has two halves; when the newer is full, the
older is dropped. When all domains together are too large, the least recently used is dropped.
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
TEXT_TOKENS = 64  # cost of a text beyond its own tokens
_PLACE_BITS = 32  # bits of a place within its text; the rest is the text's number


class _Half:
    """Growing texts, and for each trigram where it last ended and where before that."""

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
    """One row's outputs, stored in a half (None before any were taken); its first `known` tokens are stored or stay
    out. The reference is weak, so a running row does not retain what its domain drops."""

    known: int
    half: ReferenceType[_Half] | None = None
    number: int = 0


class Outputs:
    """The outputs of one domain."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._newer, self._older = _Half(), _Half()

    @property
    def size(self) -> int:
        return self._newer.size + self._older.size

    def take(self, text: Text, tokens: Ids) -> Text:
        """Add the tokens of a row that `text` does not have yet; returns the text to extend next time.

        A new text begins with some preceding tokens, because places are found by the tokens before them.
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
        """Pairs of match length between `tail` and the tokens before an earlier place, and up to `count` tokens that
        followed there, the most recent first."""
        yield from islice(
            chain.from_iterable(half.matches(tail, count) for half in (self._newer, self._older)), MAX_PLACES
        )


class Domains:
    """The outputs of all domains, within the memory limit."""

    def __init__(self) -> None:
        self._outputs: OrderedDict[str, Outputs] = OrderedDict()
        self._size = 0  # of all; there may be thousands, so it is not summed at every step

    def of(self, domain: str) -> Outputs:
        """The domain's outputs; marks it as most recently used."""
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
        """Drop domains beyond the memory limit; the most recently used stays."""
        while self._size > ALL_TOKENS and len(self._outputs) > 1:
            self._size -= self._outputs.popitem(last=False)[1].size


def _key(three: Sequence[int]) -> int:
    return three[0] << 2 * ID_BITS | three[1] << ID_BITS | three[2]
