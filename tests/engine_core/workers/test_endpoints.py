from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pagoda_engine_core.workers.endpoints import claim_socket_path, prepare
from pagoda_proto.addresses import MAX_SOCKET_PATH_BYTES


@pytest.mark.parametrize("form", ["unix:{}", "unix://{}"])
def test_both_forms_of_a_unix_address_name_the_path(socket_dir: Path, form: str) -> None:
    path = socket_dir / "sub" / "e.sock"
    assert prepare(form.format(path), file_scheme="unix:", tcp_scheme="") == path
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_that_is_no_socket_is_left_alone(socket_dir: Path) -> None:
    path = socket_dir / "precious"
    path.write_text("data")
    with pytest.raises(ValueError, match="not a socket"):
        claim_socket_path(path)
    assert path.read_text() == "data"


def test_a_listening_socket_is_left_alone_and_a_dead_one_removed(socket_dir: Path) -> None:
    path = socket_dir / "e.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        with pytest.raises(OSError, match="listening"):
            claim_socket_path(path)
    claim_socket_path(path)
    assert not path.exists()


def test_paths_must_be_absolute_and_short(socket_dir: Path) -> None:
    with pytest.raises(ValueError, match="absolute"):
        claim_socket_path(Path("e.sock"))
    with pytest.raises(ValueError, match="bytes"):
        claim_socket_path(socket_dir / ("x" * MAX_SOCKET_PATH_BYTES))


def test_a_public_directory_is_refused(socket_dir: Path) -> None:
    socket_dir.chmod(0o777)
    with pytest.raises(ValueError, match="0700"):
        claim_socket_path(socket_dir / "e.sock")
