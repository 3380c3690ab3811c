from __future__ import annotations

import pytest

from pagoda_proto.addresses import MAX_SOCKET_PATH_BYTES, check_host_port, check_socket_path

LOCAL = ["127.0.0.1:80", "127.1.2.3:0", "localhost:5", "[::1]:7"]
REMOTE = ["10.0.0.1:80", "0.0.0.0:80", "host:80", "[::]:1"]


@pytest.mark.parametrize("address", LOCAL)
def test_loopback_needs_no_keys(address: str) -> None:
    check_host_port(address, address, keyed=False)


@pytest.mark.parametrize("address", REMOTE)
def test_everything_else_does(address: str) -> None:
    with pytest.raises(ValueError, match="needs keys_dir"):
        check_host_port(address, address, keyed=False)
    check_host_port(address, address, keyed=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", ":1", "127.0.0.1:70000", "127.0.0.1:*", "host:-1", ""])
def test_what_is_no_host_and_port_is_refused_even_with_keys(address: str) -> None:
    with pytest.raises(ValueError, match="must be host:port"):
        check_host_port(address, address, keyed=True)


def test_a_server_may_leave_the_port_open() -> None:
    check_host_port("127.0.0.1:*", "127.0.0.1:*", keyed=False, any_port=True)


@pytest.mark.parametrize("path", ["", "x" * (MAX_SOCKET_PATH_BYTES + 1), "ä" * 54])
def test_a_socket_path_has_some_bytes_and_not_too_many(path: str) -> None:
    check_socket_path("unix:there", "x" * MAX_SOCKET_PATH_BYTES)
    with pytest.raises(ValueError, match=r"unix:there.*bytes"):
        check_socket_path("unix:there", path)
