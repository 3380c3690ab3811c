"""Peers that were refused before their first frame: without a key, with one that is not listed, or in another way.

libzmq refuses them on its own; it tells a monitor, and nobody else would know.
"""

from __future__ import annotations

from typing import Any

import zmq

_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class RefusedHandshakes:
    """Lives as long as the socket's context."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._monitor: zmq.Socket[Any] = socket.get_monitor_socket(_EVENTS)

    def take(self) -> int:
        """How many there were since it was last asked."""
        count = 0
        while True:
            try:
                self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return count
            count += 1
