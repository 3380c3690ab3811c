"""Parses calls out of a text; everything that does not turn out to be a call is text, and white space next to calls is
layout.

Arguments are passed on as they arrive: the grammar makes them conform to their schema, not the reader.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagoda_gateway.text.events import Said, Text, merged
from pagoda_gateway.text.source import NotACall, Reading, Source
from pagoda_gateway.text.tool_formats.format import Calls, ToolFormat
from pagoda_gateway.text.tool_formats.functions import Function


class ToolReader:
    """Text in, events out, however the input is split."""

    def __init__(self, tool_format: ToolFormat, functions: Sequence[Function]) -> None:
        self._format = tool_format
        self._said: list[Said] = []
        self._source = Source()
        self._calls = Calls(functions, self._said, self._source.unmark)
        self._held: list[str] = []  # white space, until it is known whether a call follows
        self._after_call = False
        self._reading = self._read()
        next(self._reading, None)

    @property
    def num_calls(self) -> int:
        """Number of complete calls so far."""
        return self._calls.number

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended; at the end of the text, whether one broke off."""
        return self._calls.begun

    def push(self, text: str) -> list[Said]:
        self._source.feed(text)
        return self._go_on()

    def flush(self) -> list[Said]:
        """End of the text."""
        self._source.end()
        said = self._go_on()
        held, self._held = "".join(self._held), []
        if held and not self._after_call and not self._calls.begun:
            said.append(Text(held))
        return merged(said)

    def _go_on(self) -> list[Said]:
        next(self._reading, None)
        said = merged(self._said)
        self._said.clear()
        return said

    def _say(self, text: str) -> None:
        text = text.lstrip() if self._after_call else text
        shown = text.rstrip()
        if shown:
            self._after_call = False
            self._said.append(Text("".join([*self._held, shown])))
            self._held = []
        self._held.append(text[len(shown) :])

    def _read(self) -> Reading[None]:
        if self._format.bare:
            self._source.mark()
            yield from self._source.space()
            yield from self._group()
        while not self._calls.begun:
            marker = yield from self._source.until(self._format.triggers, self._say)
            if marker is None:
                return
            self._source.mark(len(marker))
            yield from self._group()

    def _group(self) -> Reading[None]:
        """Read a group of calls; whatever is not a call becomes text, from the mark that the caller has set."""
        source, calls = self._source, self._calls
        try:
            if not (yield from source.loosely(self._format.opening)):
                raise NotACall("it begins in another way")
            while True:
                yield from self._format.shape.read(source, calls)
                if calls.begun:
                    break  # it broke off
                self._held, self._after_call = [], True
                source.mark()
                if (yield from self._ends()):
                    break
        except NotACall:
            pass
        unread = source.unmark()
        if not calls.begun:
            self._say(unread)

    def _ends(self) -> Reading[bool]:
        """Read the text between calls, or at the end of their group; return whether the group has ended."""
        source, between, end = self._source, self._format.between, self._format.end
        yield from source.space()
        before = source.position
        yield from source.closing(end)
        if source.position > before or (end and between is None):
            source.mark()
            return True
        if between is None or not between.strip():
            return between is None or not (yield from source.peek())
        return not (yield from source.loosely(between))
