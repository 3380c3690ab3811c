"""Whether an HTTP address can be taken, asked before anything is started that would have to be stopped again.

The gateway's own bind has the last word; this one exists to name flag, host and port while a person still looks.
"""

from __future__ import annotations

import errno
import socket

from pagoda.settings.problems import ConfigError
from pagoda.settings.resolving import Settings
from pagoda_gateway.config import GatewayConfig


def refuse_taken_address(settings: Settings) -> None:
    """Raises ConfigError when the configured host and port cannot be listened on."""
    config = settings.build(GatewayConfig)
    problem = address_problem(config.host, config.port)
    if problem:
        sources = f"--host from {settings.source('host')}, --port from {settings.source('port')}"
        raise ConfigError([f"{problem} ({sources})"])


def address_problem(host: str, port: int) -> str:
    """Why nothing can listen there, "" if something can."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        return f"host {host!r} is unknown: {getattr(error, 'strerror', None) or error}"
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return f"host {host!r} is no address of this machine"
            if error.errno == errno.EADDRINUSE:
                return f"port {port} of host {host!r} is in use; stop what uses it or take another"
            return f"port {port} of host {host!r} cannot be had: {error.strerror}"
    return ""
