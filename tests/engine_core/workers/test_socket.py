from __future__ import annotations

import logging
from pathlib import Path

import pytest
import zmq

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.workers.socket import TOLD_EVERY_S, Refusals, WorkerSocket
from pagoda_proto.times import WORKER_DEAD_S


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


@pytest.mark.parametrize("dead_s", [3.0, 30.0])
def test_a_link_is_given_up_no_sooner_than_its_worker_is(dead_s: float) -> None:
    config = EngineConfig(worker_endpoint="tcp://127.0.0.1:0", worker_dead_s=dead_s, worker_lease_s=dead_s + 1)
    bound = WorkerSocket(config)
    try:
        assert bound.socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) == dead_s * 1000
        assert bound.socket.getsockopt(zmq.HEARTBEAT_IVL) == dead_s * 1000 / 3
        assert bound.socket.getsockopt(zmq.HANDSHAKE_IVL) == WORKER_DEAD_S * 1000
    finally:
        bound.close()


def test_refused_handshakes_are_a_line_at_most_every_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    refusals = Refusals("tcp://here:1")
    refusals.tell(now=1000.0)
    assert not caplog.records
    unlisted, other = zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    for event, now in ((unlisted, 1000.0), (other, 1000.1), (unlisted, 1059.0), (other, 1059.9)):
        refusals.add(event)
        refusals.tell(now)
    refusals.tell(1000.0 + TOLD_EVERY_S)  # nothing new, but refusals not yet logged
    refusals.tell(1000.0 + 3 * TOLD_EVERY_S)
    start = "connections to tcp://here:1 refused in the handshake"
    assert [record.getMessage() for record in caplog.records] == [
        f"1 {start}: 1 with a key that is not listed, 0 with none that fits",
        f"3 {start}: 1 with a key that is not listed, 2 with none that fits",
    ]
