"""A worker's end of one connection to the engine core: connects, frames what it sends, and opens incoming frames."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from pagoda_proto.addresses import check_host_port, check_socket_path
from pagoda_proto.channel import MAX_FRAME_BYTES, Envelope, FrameError, encode, open_envelope
from pagoda_proto.keys import CurveKeys, load_curve
from pagoda_proto.steps import PROTOCOL_VERSION, SPOKEN, Message, Versions
from pagoda_proto.times import link_times_ms

log = logging.getLogger(__name__)

PING_MS, DEAD_MS = link_times_ms()
ENGINE_CORE_KEY = "engine-core.public"
SOCKET_OPTIONS = {
    zmq.LINGER: 0,
    zmq.SNDHWM: 100,
    zmq.RCVHWM: 100,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    zmq.IMMEDIATE: 1,  # nothing is queued for an absent engine core
    zmq.HEARTBEAT_IVL: PING_MS,
    zmq.HEARTBEAT_TIMEOUT: DEAD_MS,
    zmq.HANDSHAKE_IVL: DEAD_MS,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
}
LAST, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
"""As plain integers: arithmetic on zmq's enums costs more than sending a result."""
NO_CONNECTION = "no connection"
NO_HANDSHAKE = "the handshake failed: the keys do not match, one side has none, or the listener is not an engine core"
SILENCES: dict[int, str] = {
    zmq.EVENT_CLOSED: NO_CONNECTION,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the handshake failed: the engine core does not admit this worker's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: NO_HANDSHAKE,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: NO_HANDSHAKE,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "connected, but there is no answer",
}
"""What a connection event says about why nothing is heard; the last one holds."""


class Link(NamedTuple):
    """Where the engine core is, which worker speaks to it, and in which protocol versions; `keys` are the worker's if
    the link is encrypted (CURVE)."""

    endpoint: str
    worker_id: str
    keys: CurveKeys | None = None
    spoken: Versions = SPOKEN


def local_or_encrypted(endpoint: str, worker_id: str, keys_dir: str = "") -> Link:
    """A link that nobody else can listen to: a socket file, a loopback port or, given keys, any TCP address.

    Raises ValueError for any other address, KeyFileError (a ValueError) for missing keys.
    """
    scheme, _, rest = endpoint.partition("://")
    try:
        if scheme == "ipc":
            check_socket_path(endpoint, rest)
            return Link(endpoint, worker_id)
        if scheme != "tcp" or rest.endswith(":0"):
            raise ValueError(f"must be ipc:///path or tcp://host:port, got {endpoint!r}")
        check_host_port(endpoint, rest, keyed=bool(keys_dir))
    except ValueError as error:
        raise ValueError(f"engine: {error}") from None
    return Link(endpoint, worker_id, load_curve(keys_dir, ENGINE_CORE_KEY) if keys_dir else None)


class Wire:
    """One DEALER socket. It belongs to the thread that made it; its sequence numbers start with the socket.

    Raises ValueError if the address cannot be connected to.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], link: Link, routing_id: str) -> None:
        self._worker_id = link.worker_id
        self._spoken = link.spoken
        self._sequence = 0
        self._socket = context.socket(zmq.DEALER)
        for option, value in SOCKET_OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.ROUTING_ID, routing_id.encode())
        if link.endpoint.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        if link.keys is not None:
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, link.keys.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, link.keys.secret)
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, link.keys.peers[0])
        watched = sum(SILENCES, zmq.EVENT_DISCONNECTED)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(watched)
        self._endings = 0  # disconnects since `broke` was last called
        self._why_silent = NO_CONNECTION
        self.dropped = 0  # frames, so far
        try:
            self._socket.connect(link.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"engine: cannot connect to {link.endpoint!r}: {error}") from error

    def reaches(self, timeout_s: float = 0.0) -> bool:
        """Whether the engine core is connected, so that a message sent now would leave."""
        return _ready(self._socket, WRITABLE, timeout_s)

    def broke(self) -> bool:
        """Whether a connection has ended since the last call: what of it arrived is unknown, even though libzmq
        reconnects by itself."""
        self._look()
        found, self._endings = self._endings > 0, 0
        return found

    def why_silent(self) -> str:
        """What libzmq reports about the connection, for when nothing is heard."""
        self._look()
        return self._why_silent

    def _look(self) -> None:
        while _ready(self._monitor, READABLE):
            event = int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder)
            self._endings += event == zmq.EVENT_DISCONNECTED
            self._why_silent = SILENCES.get(event, self._why_silent)

    def send(
        self,
        message: Message,
        boot_id: str = "",
        epoch: int = 0,
        version: int = PROTOCOL_VERSION,
        timeout_s: float = 0.0,
    ) -> bool:
        """False if the engine core could not be reached in time; the message is then lost."""
        if not self.reaches(timeout_s):
            return False
        self._sequence += 1
        try:
            frame = encode(Envelope(boot_id, self._worker_id, epoch, self._sequence, version), message)
            for part in frame[:-1]:
                self._socket.send(part, MORE)
            self._socket.send(frame[-1], LAST)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_s: float) -> tuple[Envelope, bytes] | None:
        """The next frame for this worker, its payload still encoded; None if none arrives in time, or if it is bad."""
        if not _ready(self._socket, READABLE, timeout_s):
            return None
        parts: Sequence[bytes] = self._socket.recv_multipart(LAST)
        try:
            envelope, payload = open_envelope(parts, self._spoken)
        except FrameError as error:
            self.drop(str(error))
            return None
        if envelope.worker_id != self._worker_id:
            self.drop(f"it is for worker {envelope.worker_id!r}")
            return None
        return envelope, payload

    def drop(self, reason: str) -> None:
        """Count and log a frame that is not acted upon; a flood of them makes one line."""
        self.dropped += 1
        log.log(logging.WARNING if self.dropped == 1 else logging.DEBUG, "dropped a frame: %s", reason)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; sent messages may still leave within `linger_s`."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=round(linger_s * 1000))


def _ready(socket: zmq.Socket[bytes], for_what: int, timeout_s: float = 0.0) -> bool:
    """Whether it is ready within `timeout_s`. Reading EVENTS is far cheaper than a poll, and under load it suffices."""
    if int(socket.get(zmq.EVENTS)) & for_what:
        return True
    return timeout_s > 0 and bool(socket.poll(round(timeout_s * 1000), for_what))
