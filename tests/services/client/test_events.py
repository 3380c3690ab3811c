"""Only whole events come out, however the bytes are split, and the last id covers exactly those."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.client.events import EventCutter

COMMENT = b": ping\n\n"
EVENTS = [
    b'id: s:00000000:0:0.1\ndata: {"a": "1"}\n\n',
    COMMENT,
    b'id: s:00000000:0:1.2\ndata: {"a": "\xf0\x9f\x99\x82"}\n\n',
    b"event: x\r\ndata: 3\r\n\r\n",
    b"data: [DONE]\n\n",
]
WHOLE = b"".join(EVENTS)


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8), st.integers(0, len(WHOLE)))
def test_events_are_handed_on_whole(cuts: list[int], end: int) -> None:
    cutter, told = EventCutter(), b""
    places = sorted({0, end, *(cut for cut in cuts if cut < end)})
    for begin, stop in itertools.pairwise(places):
        told += cutter.feed(WHOLE[begin:stop])
    whole = [EVENTS[:i] for i in range(len(EVENTS) + 1) if len(b"".join(EVENTS[:i])) <= end]
    assert told == b"".join(event for event in whole[-1] if event != COMMENT)
    assert cutter.last_id == ["", "s:00000000:0:0.1", "s:00000000:0:0.1", *["s:00000000:0:1.2"] * 3][len(whole) - 1]
    assert cutter.ended == (end == len(WHOLE))


def test_of_a_connection_that_broke_only_what_was_whole_counts() -> None:
    cutter = EventCutter()
    assert cutter.feed(EVENTS[0] + EVENTS[2][:20]) == EVENTS[0]
    cutter.begin()
    assert cutter.feed(EVENTS[2]) == EVENTS[2]


@pytest.mark.parametrize(
    ("said", "passing"),
    [
        ({"error": {"code": "unavailable"}}, True),
        ({"error": {"code": "stream_interrupted"}}, True),
        ({"error": {"code": "cancelled"}}, False),
        ({"error": "?"}, False),
    ],
)
def test_a_failure_that_passes_is_kept_back(said: object, passing: bool) -> None:
    cutter, event = EventCutter(), b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"
    assert cutter.feed(EVENTS[0] + event) == EVENTS[0] + (b"" if passing else event)
    assert (cutter.interrupted, cutter.ended) == (passing, not passing)
    assert cutter.complaint == (event if passing else b"")


@pytest.mark.parametrize("kind", ["message_stop", "response.completed", "response.failed", "error"])
def test_every_dialect_has_its_last_event(kind: str) -> None:
    cutter = EventCutter()
    cutter.feed(EVENTS[0] + f'event: {kind}\ndata: {{"type": "{kind}"}}\n\n'.encode())
    assert cutter.ended
