"""Nobody but this user on this machine may connect: a socket file in a private directory, or a loopback port.

Neither wire has keys yet, so every other address is refused when the process starts.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 107
"""sizeof(sockaddr_un.sun_path) less the closing zero, on Linux."""


def prepare(address: str, *, file_scheme: str, tcp_scheme: str) -> Path | None:
    """Check a listening address and clear its way; the socket's path if it is a file.

    `file_scheme` and `tcp_scheme` are what the two kinds of address begin with, such as "ipc://" and "tcp://".

    Raises:
        ValueError: the address is not local, or open to other users.
        OSError: a living process is listening there, or the directory cannot be made.
    """
    if address.startswith(file_scheme):
        rest = address[len(file_scheme) :]
        path = Path("/" + rest.lstrip("/") if rest.startswith("/") else rest)
        claim_socket_path(path)
        return path
    if address.startswith(tcp_scheme):
        check_loopback(address, address[len(tcp_scheme) :])
        return None
    raise ValueError(f"address {address!r} must begin with {' or '.join(filter(None, (file_scheme, tcp_scheme)))}")


def check_loopback(address: str, host_and_port: str) -> None:
    """Raises ValueError unless it is `host:port` with a loopback host."""
    host, colon, port = host_and_port.rpartition(":")
    if not colon or not (port == "*" or (port.isdecimal() and int(port) < 65536)):
        raise ValueError(f"address {address!r} must end with a port")
    if host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ValueError(f"address {address!r} is not on the loopback interface, and this wire is not encrypted")


def claim_socket_path(path: Path) -> None:
    """Make the directory private and remove what a killed predecessor left at `path`."""
    if not path.is_absolute():
        raise ValueError(f"socket path {str(path)!r} must be absolute")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"socket path {str(path)!r} is longer than {MAX_SOCKET_PATH_BYTES} bytes")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = path.parent.stat()
    if directory.st_uid != os.geteuid() or stat.S_IMODE(directory.st_mode) & 0o077:
        raise ValueError(f"directory {str(path.parent)!r} must belong to this user and have mode 0700")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ValueError(f"{str(path)!r} exists and is not a socket")
    if _answers(path):
        raise OSError(f"another process is listening at {str(path)!r}")
    path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
