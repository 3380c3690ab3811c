"""A socket that outlives the process that listens on it."""

from __future__ import annotations

import socket

import pytest

from pagoda_gateway.http import listening


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_comes_between_two_listeners_waits_unless_the_first_one_left_in_order(host: str) -> None:
    with listening.bind(host, 0) as kept:
        address = kept.getsockname()
        with kept.dup() as first:
            first.listen()
        with socket.create_connection(address[:2]) as waiting, kept.dup() as second:
            second.listen()
            connection, _ = second.accept()
            connection.close()
            assert waiting.recv(1) == b""
            listening.end(second)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address[:2])
        with kept.dup() as third:
            third.listen()
            socket.create_connection(address[:2]).close()
        assert kept.getsockname() == address


def test_what_does_not_listen_cannot_be_ended_and_that_is_no_error() -> None:
    with listening.bind("127.0.0.1", 0) as sock:
        listening.end(sock)


def test_what_is_closed_is_not_taken_for_ended() -> None:
    with listening.bind("127.0.0.1", 0) as sock:
        sock.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        listening.end(sock)
