"""Frames of the ZMQ wire: an envelope that can be checked before the payload is decoded.

    [version: 1 byte][engine_boot_id][worker_id][epoch: 8 bytes][sequence: 8 bytes][payload: msgpack]

Six ZMQ message parts. A frame of another protocol version, engine boot, worker or epoch is refused by its envelope
alone, so no receiver decodes (or acts on) the payload of a zombie. Payloads decode only into the closed unions of
`steps`; nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from pagoda_proto.errors import PagodaError
from pagoda_proto.steps import PROTOCOL_VERSION, SPOKEN, FromWorker, Message, ToWorker, Versions

MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_ID_BYTES = 128
NUM_PARTS = 6
_U64 = struct.Struct(">Q")

T = TypeVar("T")


class FrameError(ValueError):
    """Bytes that are not a frame of this protocol. The frame is ignored, with no other effect."""


class OtherVersionError(FrameError):
    """A frame in a version not spoken here. The envelope, a Hello's name and a Refused are the same in all versions, so
    the sender can be told."""

    def __init__(self, version: int, worker_id: str, payload: bytes, spoken: Versions) -> None:
        super().__init__(f"protocol version {spoken} expected, got {version}")
        self.version = version
        self.worker_id = worker_id
        self.payload = payload

    @property
    def is_hello(self) -> bool:
        try:
            message = msgspec.msgpack.decode(self.payload)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return False
        return isinstance(message, dict) and message.get("type") == "hello"


class Envelope(NamedTuple):
    """The worker, its life, and the protocol version. `epoch` and `engine_boot_id` are 0 and "" before Welcome."""

    engine_boot_id: str
    worker_id: str
    epoch: int
    sequence: int
    version: int = PROTOCOL_VERSION


_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(envelope: Envelope, message: Message) -> list[bytes]:
    """Message parts of a frame, ready for `send_multipart` (a ROUTER puts the routing id in front)."""
    return [
        bytes([envelope.version]),
        envelope.engine_boot_id.encode(),
        envelope.worker_id.encode(),
        _U64.pack(envelope.epoch),
        _U64.pack(envelope.sequence),
        _encoder.encode(message),
    ]


def open_envelope(parts: Sequence[bytes], spoken: Versions = SPOKEN) -> tuple[Envelope, bytes]:
    """Check the envelope and return it with the still encoded payload.

    Raises:
        FrameError: wrong number or size of parts, ids that are not text.
        OtherVersionError: a whole frame, of another protocol version.
    """
    if len(parts) != NUM_PARTS:
        raise FrameError(f"a frame must have {NUM_PARTS} parts, got {len(parts)}")
    version, boot_id, worker_id, epoch, sequence, payload = parts
    if len(version) != 1:
        raise FrameError(f"a protocol version must be 1 byte, got {version[:8]!r}")
    if len(boot_id) > MAX_ID_BYTES or len(worker_id) > MAX_ID_BYTES:
        raise FrameError(f"ids must have at most {MAX_ID_BYTES} bytes")
    if len(epoch) != _U64.size or len(sequence) != _U64.size:
        raise FrameError("epoch and sequence must be 8 bytes each")
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a payload must have at most {MAX_FRAME_BYTES} bytes, got {len(payload)}")
    try:
        ids = boot_id.decode(), worker_id.decode()
    except UnicodeDecodeError as error:
        raise FrameError("ids must be UTF-8") from error
    if not spoken.oldest <= version[0] <= spoken.newest:
        raise OtherVersionError(version[0], ids[1], payload, spoken)
    return Envelope(*ids, _U64.unpack(epoch)[0], _U64.unpack(sequence)[0], version[0]), payload


def decode_to_worker(payload: bytes) -> ToWorker:
    """Raises FrameError if the payload is not a message for a worker."""
    return _decode(_to_worker, payload)


def decode_from_worker(payload: bytes) -> FromWorker:
    """Raises FrameError if the payload is not a message from a worker."""
    return _decode(_from_worker, payload)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError, PagodaError) as error:  # constructors validate
        raise FrameError(f"bad payload: {error}") from error
