"""Incremental parsing: a parser is written as if the whole text were there, and waits where it is not yet.

Parsers are generators over a `Source`: they yield when they need more text, and make no decision before the text, or
its end, makes it certain. So their results cannot depend on how the text was split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields when it needs more text
Tell = Callable[[str], object]

MAX_NAME_CHARS = 256
_NAME_CHAR = re.compile(r"[A-Za-z0-9_.\-]")
_SCALAR_END = frozenset(",]}")


class NotACall(ValueError):
    """What looked like the beginning of a construct is ordinary text."""


class _Brackets:
    """The nesting depth of a JSON text in objects and lists; brackets in its strings do not count."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def close_with(self, char: str) -> bool:
        """Whether this character closes the outermost bracket."""
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = not self._escaped and char == "\\"
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class Source:
    """The text received so far. Owned by one parser, which reads it from left to right."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._ended = False

    def feed(self, text: str) -> None:
        keep = self._at if self._mark is None else self._mark
        self._text = self._text[keep:] + text
        self._at -= keep
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        self._ended = True

    def mark(self, back: int = 0) -> None:
        """Keep the text read from here on, and `back` characters before it."""
        self._mark = self._at - back

    def unmark(self) -> str:
        """Return the text read since the mark, and drop the mark."""
        start, self._mark = self._mark, None
        return "" if start is None else self._text[start : self._at]

    @property
    def position(self) -> int:
        """How much of the kept text is read. Valid until more arrives; see `mark`."""
        return self._at - (self._mark or 0)

    def more(self) -> Reading[bool]:
        """Wait for more text; False at the end."""
        there = len(self._text) - self._at
        while not self._ended and len(self._text) - self._at == there:
            yield
        return len(self._text) - self._at > there

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        if self._at == len(self._text):
            yield from self.more()
        return self._text[self._at : self._at + 1]

    def next(self) -> Reading[str]:
        """Read the next character, "" at the end."""
        char = yield from self.peek()
        self._at += len(char)
        return char

    def space(self) -> Reading[str]:
        """Read white space, as much as there is."""
        found = ""
        while (char := (yield from self.peek())).isspace():
            found += char
            self._at += 1
        return found

    def name(self) -> Reading[str]:
        """Read a name of letters, digits, dots, dashes and underscores, as far as it goes."""
        name = ""
        while len(name) < MAX_NAME_CHARS and _NAME_CHAR.match((yield from self.peek())):
            name += yield from self.next()
        return name

    def take(self, text: str) -> Reading[bool]:
        """Read `text`, if it comes next."""
        while len(self._text) - self._at < len(text) and text.startswith(self._text[self._at :]):
            if not (yield from self.more()):
                return False
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def one_of(self, texts: Sequence[str]) -> Reading[str]:
        """Read whichever of these texts comes next; "" if none does. No text may be a prefix of another."""
        for text in texts:
            if (yield from self.take(text)):
                return text
        return ""

    def loosely(self, text: str) -> Reading[bool]:
        """Read `text` if it comes next, with any spacing of its words. On failure, part of it may have been read."""
        for word in text.split():
            yield from self.space()
            if not (yield from self.take(word)):
                return False
        return True

    def closing(self, text: str) -> Reading[None]:
        """Read `text` loosely, as far as it comes next, including a last word that is cut off by the end."""
        for word in text.split():
            yield from self.space()
            if not (yield from self.take(word)):
                if self.ends_in(word):
                    self._at = len(self._text)
                return

    def ends_in(self, word: str) -> bool:
        """Whether the text ends within this word."""
        return self._ended and word.startswith(self._text[self._at :])

    def until(self, markers: Sequence[str], tell: Tell, *, whole: bool = True) -> Reading[str | None]:
        """Pass the text before the first marker to `tell`, as it arrives; read and return the marker, None at the end.

        No marker may be a prefix of another. If the text ends in what could be the start of a marker, that is passed on
        only if the text may be `whole` without the marker.
        """
        pattern = _any_of(tuple(markers))
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                self._pass_on(found.start(), tell)
                self._at = found.end()
                return found[0]
            self._pass_on(len(self._text) - self._num_held(markers), tell)
            if not (yield from self.more()):
                if whole:
                    self._pass_on(len(self._text), tell)
                return None

    def collect(self, *markers: str) -> Reading[str]:
        """Read the text before the first of these, and the marker. Raises NotACall at the end."""
        pieces: list[str] = []
        if (yield from self.until(markers, pieces.append)) is None:
            raise NotACall("it ends early")
        return "".join(pieces)

    def rest(self) -> str:
        """Read everything received so far."""
        text, self._at = self._text[self._at :], len(self._text)
        return text

    def brackets(self, tell: Tell) -> Reading[bool]:
        """Pass a JSON object or list to `tell` as it arrives, by its brackets and strings; False if the text ends in
        it."""
        brackets = _Brackets()
        while True:
            for i in range(self._at, len(self._text)):
                if brackets.close_with(self._text[i]):
                    self._pass_on(i + 1, tell)
                    return True
            self._pass_on(len(self._text), tell)
            if not (yield from self.more()):
                return False

    def json_text(self) -> Reading[str]:
        """Read the text of a JSON value, by its brackets, quotes or delimiters."""
        first = yield from self.peek()
        pieces: list[str] = []
        if first and first in "{[":
            yield from self.brackets(pieces.append)
        elif first == '"':
            yield from self._quoted(pieces)
        else:
            while (char := (yield from self.peek())) and not char.isspace() and char not in _SCALAR_END:
                pieces.append(char)
                self._at += 1
        return "".join(pieces)

    def json(self) -> Reading[object]:
        """Read a JSON value. Raises NotACall if it is invalid or incomplete."""
        text = yield from self.json_text()
        try:
            value: object = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise NotACall("it is no JSON") from error
        return value

    def _quoted(self, pieces: list[str]) -> Reading[None]:
        escaped, opened = False, False
        while char := (yield from self.next()):
            pieces.append(char)
            if char == '"' and opened and not escaped:
                return
            escaped = not escaped and char == "\\"
            opened = True

    def _pass_on(self, end: int, tell: Tell) -> None:
        if end > self._at:
            tell(self._text[self._at : end])
            self._at = end

    def _num_held(self, markers: Sequence[str]) -> int:
        """How many characters at the end could be the start of a marker."""
        there = len(self._text) - self._at
        longest = min(max(map(len, markers)) - 1, there)
        for num in range(longest, 0, -1):
            tail = self._text[len(self._text) - num :]
            if any(marker.startswith(tail) for marker in markers):
                return num
        return 0


@lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))
