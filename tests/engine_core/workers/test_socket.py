from __future__ import annotations

from pathlib import Path

import pytest

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.workers.socket import WorkerSocket


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "tcp://0.0.0.0:5555",
        "tcp://*:5555",
        "tcp://192.168.1.1:0",
        "tcp://example.com:1",
        "inproc://x",
        "ipc://w.sock",
    ],
)
def test_endpoints_that_others_could_reach_are_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"address|socket path"):
        WorkerSocket(EngineConfig(worker_endpoint=endpoint))


def test_a_directory_open_to_others_is_refused(socket_dir: Path) -> None:
    socket_dir.chmod(0o755)
    with pytest.raises(ValueError, match="0700"):
        WorkerSocket(EngineConfig(worker_endpoint=f"ipc://{socket_dir}/w.sock"))


def test_loopback_tcp_tells_its_port() -> None:
    bound = WorkerSocket(EngineConfig(worker_endpoint="tcp://127.0.0.1:0"))
    try:
        assert bound.endpoint.startswith("tcp://127.0.0.1:")
        assert not bound.endpoint.endswith(":0")
    finally:
        bound.close()
