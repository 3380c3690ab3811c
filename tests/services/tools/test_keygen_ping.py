"""Generated keys load, fit together, and are private; `ping` tells health from its opposite."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from pagoda.commands.ping import ping
from pagoda.tools.keygen import generate
from pagoda_proto.keys import KeyFileError, load_curve, load_tls


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    files = generate(tmp_path / "keys")
    assert len(files) == 12
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    with pytest.raises(FileExistsError):
        generate(tmp_path / "keys")


def test_curve_keys_name_each_other(tmp_path: Path) -> None:
    generate(tmp_path)
    engine = load_curve(str(tmp_path / "engine-core"), "worker*.public")
    worker = load_curve(str(tmp_path / "worker"), "engine-core.public")
    assert engine.peers == (worker.public,)
    assert worker.peers == (engine.public,)


BAD_CURVE_KEYS = [(None, "cannot read"), (b"short", "40 characters"), (b'"' * 40, "not Z85"), (b"#" * 40, "not Z85")]


@pytest.mark.parametrize("name", ["curve.secret", "curve.public", "engine-core.public"])
@pytest.mark.parametrize(("content", "message"), BAD_CURVE_KEYS)
def test_a_bad_curve_key_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    generate(tmp_path)
    file = tmp_path / "worker" / name
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(KeyFileError, match=message if content or name.startswith("curve") else "has no") as error:
        load_curve(str(tmp_path / "worker"), "engine-core.public")
    assert name in str(error.value)


def test_a_secret_of_another_public_key_is_told(tmp_path: Path) -> None:
    generate(tmp_path / "ours")
    generate(tmp_path / "theirs")
    (tmp_path / "theirs" / "worker" / "curve.secret").replace(tmp_path / "ours" / "worker" / "curve.secret")
    with pytest.raises(KeyFileError, match=r"worker/curve\.public and .*worker/curve\.secret are not a pair"):
        load_curve(str(tmp_path / "ours" / "worker"), "engine-core.public")


def test_a_bad_certificate_is_named(tmp_path: Path) -> None:
    generate(tmp_path)
    (tmp_path / "gateway" / "tls.crt").write_bytes(b"nothing")
    with pytest.raises(KeyFileError, match=r"tls\.crt is not PEM"):
        load_tls(str(tmp_path / "gateway"))


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
@pytest.mark.parametrize("begin", ["CERTIFICATE", "PRIVATE KEY"])
def test_what_is_only_called_a_certificate_is_named(tmp_path: Path, name: str, begin: str) -> None:
    generate(tmp_path)
    (tmp_path / "gateway" / name).write_text(f"-----BEGIN {begin}-----\nAAAA\n-----END {begin}-----\n")
    with pytest.raises(KeyFileError, match=re.escape(str(tmp_path / "gateway" / name))):
        load_tls(str(tmp_path / "gateway"))


def test_a_key_of_another_certificate_is_told(tmp_path: Path) -> None:
    generate(tmp_path / "ours")
    generate(tmp_path / "theirs")
    (tmp_path / "theirs" / "gateway" / "tls.key").replace(tmp_path / "ours" / "gateway" / "tls.key")
    with pytest.raises(KeyFileError, match=r"tls\.crt and .*tls\.key are not a usable pair"):
        load_tls(str(tmp_path / "ours" / "gateway"))
    assert "are not a usable pair" in (ping("grpcs://127.0.0.1:1", keys_dir=str(tmp_path / "ours" / "gateway")) or "")
    assert "cannot read" in (ping("grpcs://127.0.0.1:1") or "")


async def test_ping_grpc_under_mutual_tls_lets_only_key_holders_in(tmp_path: Path) -> None:
    generate(tmp_path / "ours")
    generate(tmp_path / "theirs")
    keys = load_tls(str(tmp_path / "ours" / "engine-core"))
    server = grpc.aio.server()
    add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    credentials = grpc.ssl_server_credentials(
        [(keys.private_key, keys.certificate)], root_certificates=keys.ca, require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        target = f"grpcs://127.0.0.1:{port}"
        assert await asyncio.to_thread(ping, target, keys_dir=str(tmp_path / "ours" / "gateway")) is None
        stranger = await asyncio.to_thread(ping, target, keys_dir=str(tmp_path / "theirs" / "gateway"), timeout_s=1)
        assert stranger is not None
        assert "UNAVAILABLE" in stranger or "DEADLINE_EXCEEDED" in stranger
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"live": "SERVING", "": "NOT_SERVING"}, None),
        ({"live": "NOT_SERVING", "": "SERVING"}, "live is NOT_SERVING"),
        ({"": "SERVING"}, None),
        ({"": "NOT_SERVING"}, "the server is NOT_SERVING"),
        ({"live": "UNKNOWN"}, "live is UNKNOWN"),
    ],
)
async def test_ping_grpc_takes_serving_for_health_and_nothing_else(told: dict[str, str], problem: str | None) -> None:
    server = grpc.aio.server()
    healthy = health.aio.HealthServicer()
    for service, status in told.items():
        await healthy.set(service, health_pb2.HealthCheckResponse.ServingStatus.Value(status))
    add_HealthServicer_to_server(healthy, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = f"grpc://127.0.0.1:{port}"
    try:
        found = await asyncio.to_thread(ping, target, timeout_s=30)
        assert found == (None if problem is None else f"{target}: {problem}")
    finally:
        await server.stop(0)
    assert await asyncio.to_thread(ping, target, timeout_s=30) == f"{target}: UNAVAILABLE"


async def test_ping_grpc_of_a_server_without_a_health_service(tmp_path: Path) -> None:
    server = grpc.aio.server()
    server.add_insecure_port(f"unix:{tmp_path}/e.sock")
    await server.start()
    try:
        found = await asyncio.to_thread(ping, f"unix:{tmp_path}/e.sock", timeout_s=30)
        assert found == f"unix:{tmp_path}/e.sock: UNIMPLEMENTED"
    finally:
        await server.stop(0)


def test_ping_file_by_age(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    assert "No such file" in (ping(f"file:{path}") or "")
    path.touch()
    assert ping(f"file:{path}") is None
    os.utime(path, (time.time() - 60, time.time() - 60))
    assert "60 s ago" in (ping(f"file:{path}", max_age_s=10) or "")


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ok" else 503)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_ping_http_by_status() -> None:
    with HTTPServer(("127.0.0.1", 0), _Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        assert ping(f"{base}/ok") is None
        assert "503" in (ping(f"{base}/bad") or "")
        server.shutdown()


def test_ping_http_of_what_speaks_no_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"nonsense\r\n\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        assert ping(url) == f"{url}: nonsense\r\n"
        answering.join()


def test_ping_refuses_other_schemes() -> None:
    assert "cannot ping" in (ping("ftp://x") or "")
