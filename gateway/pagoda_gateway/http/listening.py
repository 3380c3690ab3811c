"""The socket that a gateway listens on. The process that restarts the gateway may hold the socket too.

Then connections made while there is no gateway are not refused but wait for the next one. A gateway that shuts down in
order ends listening on the socket itself, whoever else holds it.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

SEND_BUFFER_BYTES = 256 * 1024  # the most the kernel holds for a client that does not read
RECEIVE_BUFFER_BYTES = 256 * 1024  # .. and for one we do not read from


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet; port 0 means any free port.

    Raises:
        OSError: there is no such host, or the address is not available.
        UnicodeError: `host` cannot be a host name.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    if port:
        return _bound(family, address)
    # A socket keeps a port it asked for when listening ends; it would lose one that the system chose.
    with _bound(family, address) as found:
        return _bound(family, found.getsockname())


def _bound(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def end(listener: socket.socket) -> None:
    """Refuse new connections until somebody listens again. Nothing in this process may still be accepting.

    Raises:
        OSError: the socket is closed.
    """
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:  # it did not listen
            raise


def is_private(listener: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
