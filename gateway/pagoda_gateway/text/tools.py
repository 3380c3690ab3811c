"""A tool call is shown only when it is whole and valid; everything else the model wrote is text.

The Hermes dialect: `<tool_call>{"name": .., "arguments": {..}}</tool_call>` inside ordinary text. A call's JSON can
only be judged at its closing tag, so it is held back until then; text before and between calls streams. White space
next to a call is layout and dropped.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from pagoda_gateway.text.events import CallArguments, CallBegun, Said, Text

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_NAME_CHARS = 256
_TO_CLOSE_OR_QUOTE = re.compile(r'</tool_call>|"')
# A raw control character cannot occur in a JSON string: the string is broken and ends there.
_IN_STRING = re.compile(r'"|\\.|[\x00-\x1f]', re.DOTALL)


class HermesParser:
    """Text in, events out, the same for any cutting of the input.

    `num_calls` counts the calls so far.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._text = ""  # outside a call: what is not yet certain to be text
        self._body: _Body | None = None  # inside a call
        self._after_call = False

    def push(self, text: str) -> list[Said]:
        events: list[Said] = []
        while text:
            text = self._outside(text, events) if self._body is None else self._inside(self._body, text, events)
        return _merged(events)

    def flush(self) -> list[Said]:
        """End of the text. A call whose closing tag is missing counts if its JSON is whole."""
        events: list[Said] = []
        if self._body is not None:
            self._end_call(self._body, "", events)
        elif not self._after_call or self._text.strip():
            events.append(Text(self._text))
        self._text = ""
        return _merged(events)

    def _outside(self, text: str, events: list[Said]) -> str:
        """Take text up to an opening tag; returns what follows it."""
        pending = self._text + text
        at = pending.find(OPEN)
        if at >= 0:
            shown = pending[:at].rstrip()
            self._text = ""
            self._show(shown, events)
            self._body = _Body(lead=pending[len(shown) : at])
            return pending[at + len(OPEN) :]
        shown = pending[: len(pending) - _num_prefix_chars(pending, OPEN)].rstrip()
        self._text = pending[len(shown) :]
        self._show(shown, events)
        return ""

    def _show(self, text: str, events: list[Said]) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            events.append(Text(text))

    def _inside(self, body: _Body, text: str, events: list[Said]) -> str:
        """Take text up to the closing tag; returns what follows it."""
        rest = body.take(text)
        if rest is None:
            return ""
        self._end_call(body, CLOSE, events)
        return rest

    def _end_call(self, body: _Body, close: str, events: list[Said]) -> None:
        """The call, or the text it is instead."""
        self._body = None
        call = parse_call(body.text)
        if call is None:
            self._show(body.lead + OPEN + body.text + close, events)
            return
        name, arguments = call
        events += CallBegun(self.num_calls, name), CallArguments(self.num_calls, arguments)
        self.num_calls += 1
        self._after_call = True


class _Body:
    """The inside of a call: looks for the closing tag, but not inside JSON strings. Every character is seen once."""

    def __init__(self, lead: str) -> None:
        self.lead = lead  # white space before the opening tag
        self._pieces: list[str] = []
        self._tail = ""  # looked at, undecided: the beginning of a tag, or a lone backslash
        self._in_string = False

    @property
    def text(self) -> str:
        return "".join(self._pieces) + self._tail

    def take(self, text: str) -> str | None:
        """Returns what follows the closing tag, None while it has not come."""
        pending, self._tail = self._tail + text, ""
        position = 0
        while match := (_IN_STRING if self._in_string else _TO_CLOSE_OR_QUOTE).search(pending, position):
            if match[0] == CLOSE:
                self._pieces.append(pending[: match.start()])
                return pending[match.end() :]
            position = match.end()
            if not match[0].startswith("\\"):
                self._in_string = not self._in_string
        keep = pending.endswith("\\", position) if self._in_string else _num_prefix_chars(pending[position:], CLOSE)
        self._pieces.append(pending[: len(pending) - keep])
        self._tail = pending[len(pending) - keep :]
        return None


def _num_prefix_chars(text: str, tag: str) -> int:
    """How many characters at the end of `text` could be the beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _merged(events: list[Said]) -> list[Said]:
    merged: list[Said] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Text) and isinstance(last, Text):
            merged[-1] = Text(last.text + event.text)
        elif event != Text(""):
            merged.append(event)
    return merged


def parse_call(body: str) -> tuple[str, str] | None:
    """Name and arguments of the call in `body`; None for bad JSON, no name, or arguments that are no object."""
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
        if not isinstance(call, dict) or not 1 <= len(_string(call.get("name"))) <= MAX_NAME_CHARS:
            return None
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        if not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (call["name"] + text).encode()
    except (ValueError, RecursionError):
        return None
    return call["name"], text


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
