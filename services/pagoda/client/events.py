"""Passes a stream on in whole events, so that the last id covers exactly what was passed on."""

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
    """Cuts one stream into events, over all of its connections.

    Attributes:
        last_id: The id of the last event passed on that had one; "" before.
        said: Whether an event with data was passed on.
        ended: Whether the stream's last event was passed on, or an error that ends it for good.
        interrupted: Whether this connection said that it cannot continue; that event is held back in `complaint`.
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
        """Whether an id covers everything passed on, if anything was."""
        return bool(self.last_id) or not self.said

    def begin(self) -> None:
        """Begin a new connection, discarding an incomplete event of the one before."""
        self._rest, self.interrupted, self.complaint = b"", False, b""

    def feed(self, data: bytes) -> bytes:
        """The events that are complete now. Raises ValueError for one that is too large."""
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
            return b""  # only comments; after an id, OpenAI's client would take them for an event
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
    """The error code of an event that says that the stream failed; None for other events."""
    if kind != b"error" and not data.startswith(b'{"error":'):
        return None
    try:
        said: Any = msgspec.json.decode(data)["error"]
        return str(said.get("code") or said.get("type") or "")
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
        return ""
