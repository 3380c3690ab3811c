"""The socket that a gateway listens on. Whoever is to start it again may hold the socket, too.

Then who comes while there is no gateway is not refused but waits for the next one. Where a gateway leaves in order,
it ends the listening of the socket itself, whoever else holds it.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

SEND_BUFFER_BYTES = 256 * 1024  # what the kernel holds for a client that does not read
RECEIVE_BUFFER_BYTES = 256 * 1024  # .. and for one that is not read from


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 is any that is free.

    Raises:
        OSError: there is no such host, or the address cannot be had.
        UnicodeError: this cannot be the name of a host.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    if port:
        return _bound(family, address)
    # A port that was asked for stays when the listening ends, one that the system chose would not.
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
    """Refuse whoever comes, until somebody listens again. Nobody of this process may be accepting any more.

    Raises:
        OSError: it is closed.
    """
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:  # it did not listen
            raise


def is_private(listener: socket.socket) -> bool:
    """Whether nobody but this machine can reach it."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
