"""Local addresses, which no other host can reach and which are the only ones allowed without keys; and the host id,
within which process ids have one meaning."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 107
"""sizeof(sockaddr_un.sun_path) less the closing zero, on Linux."""


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address. No port; IPv6 with or without brackets. Other names are not resolved."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_host_port(address: str, host_and_port: str, *, keyed: bool, any_port: bool = False) -> None:
    """Raises ValueError, naming `address`, unless it is `host:port`; without keys the host must be loopback."""
    host, colon, port = host_and_port.rpartition(":")
    if not (colon and host and ((any_port and port == "*") or (port.isdecimal() and int(port) < 65536))):
        raise ValueError(f"address {address!r} must be host:port")
    if not keyed and not is_loopback(host):
        raise ValueError(f"address {address!r} is not on the loopback interface; a link off this host needs keys_dir")


def check_socket_path(address: str, path: str) -> None:
    """Raises ValueError, naming `address`, unless a Unix socket can be at `path`."""
    if not 0 < len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"address {address!r} needs a socket path of 1 to {MAX_SOCKET_PATH_BYTES} bytes")


def host_id() -> str:
    """The kernel's boot id and this process's pid namespace; "" where the system has neither (no Linux, no /proc)."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        pid_namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return f"{boot_id}:{pid_namespace}"
