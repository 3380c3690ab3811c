"""The proxy injects the faults it claims to; otherwise the scenarios would prove nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.faults.proxy import ChaosProxy

SILENT_S = 0.3  # no data may arrive within this time
PATIENCE_S = 60.0


@pytest.fixture
def echo_port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))

    def echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=echo, args=[listener.accept()[0]], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture
def proxy(echo_port: int) -> Iterator[ChaosProxy]:
    with ChaosProxy(echo_port) as proxy:
        yield proxy


@contextlib.contextmanager
def connected(proxy: ChaosProxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S) as connection:
        yield connection


def echoes(connection: socket.socket, data: bytes = b"hello") -> bool:
    connection.sendall(data)
    return connection.recv(100) == data


def silent(connection: socket.socket) -> bool:
    connection.settimeout(SILENT_S)
    try:
        connection.recv(100)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(PATIENCE_S)
    return False


def test_what_is_held_arrives_when_it_is_released(proxy: ChaosProxy) -> None:
    with connected(proxy) as link:
        assert echoes(link)
        proxy.hold()
        link.sendall(b"late")
        with connected(proxy) as new:
            new.sendall(b"new")
            assert silent(link)
            assert silent(new)
            proxy.release()
            assert link.recv(100) == b"late"
            assert new.recv(100) == b"new"


def test_a_peer_that_vanished_is_never_heard_again_and_new_links_work(proxy: ChaosProxy) -> None:
    with connected(proxy) as link:
        assert echoes(link)
        proxy.vanish()
        link.sendall(b"anybody?")
        assert silent(link)
    with connected(proxy) as newer:
        assert echoes(newer)


def test_a_reset_is_one(proxy: ChaosProxy) -> None:
    with connected(proxy) as link:
        assert echoes(link)
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            link.recv(100)
    with connected(proxy) as new:
        assert echoes(new)
    assert proxy.num_links == 2
