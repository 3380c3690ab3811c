"""Frames of a session that travel together: gRPC passes on about one message in a round of an event loop, so whoever
has many to send says them as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from pagoda_proto.engine.v1 import engine_pb2 as pb

TOGETHER_SINCE = 7  # the session's protocol
MOST_TOGETHER = 64
MOST_BYTES = 1024 * 1024  # together; a frame may have more

Frame = TypeVar("Frame", pb.ClientFrame, pb.ServerFrame)


def joined(frames: Iterable[Frame], protocol: int) -> Iterator[Frame]:
    """In order, in as few messages as may be; `protocol` is what both sides speak."""
    message: Frame | None = None
    room = 0
    for frame in frames:
        size = frame.ByteSize()
        if message is not None and size <= room and len(message.more) + 1 < MOST_TOGETHER:
            message.more.append(frame)
            room -= size
            continue
        if message is not None:
            yield message
        message, room = frame, MOST_BYTES - size if protocol >= TOGETHER_SINCE else -1
    if message is not None:
        yield message


def parted(message: Frame) -> Iterator[Frame]:
    """Its frames, in order. What is in frames that came with others is not looked at."""
    yield message
    yield from message.more
