"""The ROUTER socket that workers connect to: frames in, frames out, and authentication.

A routing id belongs to one connection of one registration of one process. A new registration brings new sockets and
ids, so an id need never be handed over: not to a stranger who claims it, and not after a link broke in one direction
only, which this end learns late.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.workers import endpoints
from pagoda_proto.channel import MAX_FRAME_BYTES
from pagoda_proto.keys import CurveKeys, load_curve
from pagoda_proto.times import link_times_ms

log = logging.getLogger(__name__)

SOCKET_OPTIONS = {
    zmq.ROUTER_MANDATORY: 1,  # sending to a missing peer fails instead of being dropped
    zmq.ROUTER_HANDOVER: 0,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    zmq.LINGER: 0,
    zmq.SNDHWM: 1000,
    zmq.RCVHWM: 1000,
    zmq.HANDSHAKE_IVL: link_times_ms()[1],  # for every peer, known or not
}
REFUSED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
LOOK_EVERY_S = 0.1  # for refused handshakes, while there are none; libzmq can keep well over 1000 that are unread
TOLD_EVERY_S = 60.0  # refused handshakes are logged at most this often
WORKER_KEYS = "worker*.public"
LAST, MORE, READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)
"""As plain integers: arithmetic on zmq's enums costs more than sending a plan."""


class _AllowedKeys:
    """Answers the ZAP request (RFC 27) that libzmq makes before a peer's first frame reaches us."""

    def __init__(self, keys: CurveKeys) -> None:
        self._allowed = frozenset(keys.peers)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._allowed


def admit_only(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: CurveKeys
) -> ThreadAuthenticator:
    """Let only holders of `keys.peers` connect to `socket`, encrypted. Call it before binding the socket."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=_AllowedKeys(keys))
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    return authenticator


class Refusals:
    """Counts refused handshakes and logs them now and then. `now` is any monotonic clock."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._unlisted = self._others = 0  # not logged yet
        self._next_at = float("-inf")

    def add(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._unlisted += 1
        else:
            self._others += 1

    def tell(self, now: float) -> None:
        """Log at once, unless the last line is recent; then later, with those that came meanwhile."""
        if not self._unlisted + self._others or now < self._next_at:
            return
        log.warning(
            "%d connections to %s refused in the handshake: %d with a key that is not listed, %d with none that fits",
            self._unlisted + self._others, self._endpoint, self._unlisted, self._others,
        )  # fmt: skip
        self._unlisted = self._others = 0
        self._next_at = now + TOLD_EVERY_S


class WorkerSocket:
    """A socket bound at construction. Used by one thread.

    Raises ValueError for an endpoint that others could reach, OSError if it is in use.
    """

    def __init__(self, config: EngineConfig) -> None:
        keyed = bool(config.keys_dir) and config.worker_endpoint.startswith("tcp://")
        keys = load_curve(config.keys_dir, WORKER_KEYS) if keyed else None
        self._path = endpoints.prepare(config.worker_endpoint, file_scheme="ipc://", tcp_scheme="tcp://", keyed=keyed)
        self._context = zmq.Context(io_threads=1)
        self.socket = self._context.socket(zmq.ROUTER)  # for pollers
        self._authenticator = admit_only(self._context, self.socket, keys) if keys else None
        ping_ms, dead_ms = link_times_ms(config.worker_dead_s)
        beats = {zmq.HEARTBEAT_IVL: ping_ms, zmq.HEARTBEAT_TIMEOUT: dead_ms}
        for option, value in (SOCKET_OPTIONS | beats).items():
            self.socket.setsockopt(option, value)
        self._monitor: zmq.Socket[Any] = self.socket.get_monitor_socket(REFUSED_HANDSHAKES)
        try:
            self.socket.bind(config.worker_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"cannot listen for workers at {config.worker_endpoint}: {error}") from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._refusals = Refusals(self.endpoint)
        self._look_at = float("-inf")

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The next frame and the route it came on; None if there is none."""
        if not _is_readable(self.socket):
            return None
        route, *parts = self.socket.recv_multipart(LAST)
        return route, parts

    def send(self, route: bytes, parts: list[bytes]) -> bool:
        """False if the peer is not connected, or has not read for so long that its queue is full."""
        try:
            for part in (route, *parts[:-1]):
                self.socket.send(part, MORE)
            self.socket.send(parts[-1], LAST)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def refused_handshakes(self, now: float) -> int:
        """How many peers were refused before their first frame since the last call: without a key, with one not listed,
        or otherwise. libzmq refuses them by itself and reports it only to a monitor socket; this logs them. `now` is
        any monotonic clock.
        """
        if now < self._look_at:
            return 0
        count = 0
        while _is_readable(self._monitor):
            self._refusals.add(int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder))
            count += 1
        self._refusals.tell(now)
        if not count:
            self._look_at = now + LOOK_EVERY_S
        return count

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)


def _is_readable(socket: zmq.Socket[Any]) -> bool:
    """Whether a whole message has arrived."""
    return bool(int(socket.get(zmq.EVENTS)) & READABLE)
