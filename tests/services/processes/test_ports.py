"""An address is checked before anything is started."""

from __future__ import annotations

import socket

import pytest
from tests.services.test_cli import pagoda

from pagoda.processes.ports import address_problem


def test_a_free_port_and_any_port_are_fine() -> None:
    assert address_problem("127.0.0.1", 0) == ""
    assert address_problem("localhost", 0) == ""


def test_a_taken_port_is_named_until_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert address_problem("127.0.0.1", port).startswith(f"port {port} of host '127.0.0.1' is in use")
    assert address_problem("127.0.0.1", port) == ""


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 300, "300.1.1.1", "a..b"])
def test_an_unknown_host_is_named(host: str) -> None:
    assert address_problem(host, 0).startswith(f"host {host!r} is unknown: ")


def test_a_host_elsewhere_is_named() -> None:
    assert address_problem("192.0.2.1", 0) == "host '192.0.2.1' is not an address of this machine"


@pytest.mark.parametrize("command", [["serve"], ["gateway", "--engine", "unix:/e"]])
def test_what_cannot_be_listened_on_is_one_line_and_nothing_is_started(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = pagoda(*command, "--port", port)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"port {port} of host '127.0.0.1' is in use" in line
    assert "--host from default, --port from --port" in line
    assert "host 'nowhere.invalid' is unknown" in pagoda(*command, "--host", "nowhere.invalid").stderr


def test_what_is_no_socket_cannot_be_listened_on() -> None:
    done = pagoda("gateway", "--engine", "unix:/e", "--listen-fd", "0")
    assert (done.returncode, done.stderr) == (
        2,
        "pagoda: error: listen_fd: 0 is not a socket: Socket operation on non-socket\n",
    )
