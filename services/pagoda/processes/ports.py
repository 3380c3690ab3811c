"""Ports: the HTTP address is bound before anything starts that would otherwise have to be stopped again."""

from __future__ import annotations

import errno
import socket

from pagoda.settings.problems import ConfigError
from pagoda.settings.resolving import Settings
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.http.listening import bind

LAST_PORT = 65535


def metrics_ports(first: int, count: int, gateway_port: int) -> list[int]:
    """Of `count` engine cores, one after the other; all `first` if that is no port, because there are no metrics.

    Raises ConfigError if there is no such port, or the gateway has it.
    """
    if first <= 0:
        return [first] * count
    ports = list(range(first, first + count))
    for number, port in enumerate(ports, 1):
        if port == gateway_port or port > LAST_PORT:
            what = "the gateway's" if port == gateway_port else "which does not exist"
            raise ConfigError([f"metrics_port: engine core number {number} would take port {port}, {what}"])
    return ports


def take_address(settings: Settings) -> socket.socket:
    """Bind the configured host and port. Raises ConfigError, which names the options and their sources, on failure."""
    config = settings.build(GatewayConfig)
    try:
        return bind(config.host, config.port)
    except (OSError, UnicodeError) as error:
        sources = f"--host from {settings.source('host')}, --port from {settings.source('port')}"
        raise ConfigError([f"{_problem(error, config.host, config.port)} ({sources})"]) from error


def inherited(fd: int) -> socket.socket:
    """The socket that the supervisor has bound. Raises ConfigError unless it is a socket."""
    try:
        return socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigError([f"listen_fd: {fd} is not a socket: {error.strerror}"]) from error


def address_problem(host: str, port: int) -> str:
    """Why nothing can listen there; "" if something can."""
    try:
        bind(host, port).close()
    except (OSError, UnicodeError) as error:
        return _problem(error, host, port)
    return ""


def _problem(error: Exception, host: str, port: int) -> str:
    what = getattr(error, "strerror", None) or error
    if isinstance(error, UnicodeError | socket.gaierror):
        return f"host {host!r} is unknown: {what}"
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        return f"host {host!r} is not an address of this machine"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} of host {host!r} is in use; stop the process that uses it or choose another port"
    return f"port {port} of host {host!r} cannot be used: {what}"
