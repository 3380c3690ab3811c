"""Combines frames of a session into one message, because gRPC forwards only about one message per event-loop
iteration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from pagoda_proto.engine.v1 import engine_pb2 as pb

TOGETHER_SINCE = 7  # session protocol version
MOST_TOGETHER = 64
MOST_BYTES = 1024 * 1024  # of combined frames; a single frame may be larger

Frame = TypeVar("Frame", pb.ClientFrame, pb.ServerFrame)


def joined(frames: Iterable[Frame], protocol: int) -> Iterator[Frame]:
    """Combine frames, in order, into as few messages as allowed; `protocol` is the version both sides speak."""
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
    """The frames of a message, in order. `more` of the combined frames themselves is ignored."""
    yield message
    yield from message.more
