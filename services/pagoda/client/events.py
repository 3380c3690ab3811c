"""A stream is handed on event by event, never by halves: so what was handed on is what the last id covers."""

from __future__ import annotations

import re
from typing import Any

import msgspec

MAX_EVENT_BYTES = 256 * 1024 * 1024
_BORDER = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_BORDER_BYTES = 4
_LAST_EVENTS = frozenset(
    (b"message_stop", b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled")
)
_PASSING = frozenset(("unavailable", "stream_interrupted", "overloaded", "api_error", "overloaded_error"))


class EventCutter:
    """Of one stream, over all of its connections.

    Attributes:
        last_id: Of the last event that was handed on and had one; "" before.
        said: Something was handed on.
        ended: Its last event was handed on, or one that says for good that there are no more.
        interrupted: This connection said that it cannot go on; what it said so with waits in `complaint`.
    """

    def __init__(self) -> None:
        self.last_id = ""
        self.said = False
        self.ended = False
        self.interrupted = False
        self.complaint = b""
        self._rest = b""

    @property
    def resumable(self) -> bool:
        """What was handed on, if anything, is known by an id."""
        return bool(self.last_id) or not self.said

    def begin(self) -> None:
        """A new connection: of the one before nothing is left but what was whole."""
        self._rest, self.interrupted, self.complaint = b"", False, b""

    def feed(self, data: bytes) -> bytes:
        """The events that are whole now. Raises ValueError for one that is too large."""
        searched = max(0, len(self._rest) - _BORDER_BYTES)
        self._rest += data
        told, begin = b"", 0
        while (found := _BORDER.search(self._rest, max(begin, searched))) is not None:
            event, begin = self._rest[begin : found.end()], found.end()
            told += self._taken(event)
            if self.interrupted:
                break
        self._rest = self._rest[begin:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        return told

    def _taken(self, event: bytes) -> bytes:
        fields = [line.partition(b":") for line in event.splitlines() if line]
        found = {name: value.removeprefix(b" ") for name, _, value in fields}
        if not found.keys() - {b""}:
            return b""  # comments; behind an id OpenAI's client would take them for an event
        data, kind = found.get(b"data", b""), found.get(b"event", b"")
        code = _failure(kind, data)
        if code in _PASSING and self.resumable:
            self.interrupted, self.complaint = True, event
            return b""
        self.last_id = found[b"id"].decode("latin-1") if found.get(b"id") else self.last_id
        self.said |= bool(data)
        self.ended |= data == b"[DONE]" or kind in _LAST_EVENTS or code is not None
        return event


def _failure(kind: bytes, data: bytes) -> str | None:
    """The code of an event that says that the stream failed; None for any other."""
    if kind != b"error" and not data.startswith(b'{"error":'):
        return None
    try:
        said: Any = msgspec.json.decode(data)["error"]
        return str(said.get("code") or said.get("type") or "")
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
        return ""
