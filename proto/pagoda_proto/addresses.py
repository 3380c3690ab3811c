"""Which addresses a link between processes may have without keys: those that only this machine can reach."""

from __future__ import annotations

import ipaddress

MAX_SOCKET_PATH_BYTES = 107
"""sizeof(sockaddr_un.sun_path) less the closing zero, on Linux."""


def is_loopback(host: str) -> bool:
    """`host` without a port; an IPv6 address with or without its brackets. Other names are not resolved."""
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
