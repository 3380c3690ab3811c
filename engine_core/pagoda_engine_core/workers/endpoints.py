"""Listening addresses admit only this user on this machine (a socket in a private directory, a loopback port) or peers
with keys.

Any other address is refused when the process starts.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from pagoda_proto.addresses import check_host_port, check_socket_path


def prepare(address: str, *, file_scheme: str, tcp_scheme: str, keyed: bool = False) -> Path | None:
    """Check a listening address and prepare it. Returns the socket's path if it is a file.

    `file_scheme` and `tcp_scheme` are the prefixes of the two kinds of address, such as "ipc://" and "tcp://". With
    `keyed`, connections over TCP are encrypted and authenticated, so they may come from anywhere.

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
        check_host_port(address, address[len(tcp_scheme) :], keyed=keyed, any_port=True)
        return None
    raise ValueError(f"address {address!r} must begin with {' or '.join(filter(None, (file_scheme, tcp_scheme)))}")


def claim_socket_path(path: Path) -> None:
    """Create the directory as private, and remove the socket that a killed predecessor left at `path`."""
    if not path.is_absolute():
        raise ValueError(f"socket path {str(path)!r} must be absolute")
    check_socket_path(str(path), str(path))
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
