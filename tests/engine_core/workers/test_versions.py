"""Workers of two protocol versions at one engine core, and workers whose version it does not speak."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine_core.workers.test_zmq_executor import Engine, engine

from pagoda_engine_core.workers.executor import StepDone
from pagoda_proto.channel import decode_to_worker
from pagoda_proto.steps import PROTOCOL_VERSION, Refused, StepPlan, StepResult, Versions

__all__ = ["engine"]  # a fixture
OLD = PROTOCOL_VERSION - 1


@pytest.mark.parametrize(
    ("spoken", "theirs", "said_in", "agreed"),
    [
        (Versions(OLD, PROTOCOL_VERSION), Versions(OLD, OLD), OLD, OLD),
        (Versions(OLD, PROTOCOL_VERSION), Versions(OLD, PROTOCOL_VERSION), OLD, PROTOCOL_VERSION),
        (Versions(OLD, OLD), Versions(OLD, PROTOCOL_VERSION), OLD, OLD),
    ],
)
def test_a_worker_of_the_version_before_works_beside_those_of_this_one(
    socket_dir: Path, spoken: Versions, theirs: Versions, said_in: int, agreed: int
) -> None:
    engine = Engine(socket_dir, spoken=spoken)
    try:
        peer = engine.peer("old", protocol=theirs.newest, oldest_protocol=theirs.oldest)
        peer.spoken, peer.version = theirs, said_in
        epoch = engine.admit(peer)
        peer.version = agreed
        engine.executor.send(epoch, StepPlan(step=1))
        envelope, message = peer.receive()
        assert (envelope.version, message) == (agreed, StepPlan(step=1))
        peer.send(StepResult(step=1))
        assert engine.next(StepDone) == StepDone(epoch, StepResult(step=1))
        peer.beat()
        engine.answers(peer.control)
        assert peer.receive(peer.control)[0].version == agreed
        others = {spoken.oldest, spoken.newest} - {agreed}
        for other in others:
            peer.send(StepResult(step=2), version=other)
            engine.counted("version")
    finally:
        engine.close()


def test_a_worker_of_another_protocol_version_is_told_both(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    peer = engine.peer("old")
    for _ in range(3):
        peer.data.send_multipart([bytes([PROTOCOL_VERSION - 1]), *peer.frame(peer.hello)[1:]])
        engine.pump(lambda: peer.data.poll(0) > 0)
        version, _, _, _, _, payload = peer.data.recv_multipart()
        refused = decode_to_worker(payload)
        assert version == bytes([PROTOCOL_VERSION - 1])  # else it could not read the answer
        assert isinstance(refused, Refused)
        assert refused.final
        for number in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
            assert str(number) in refused.reason
    peer.data.send_multipart([bytes([PROTOCOL_VERSION + 1]), *peer.frame(StepResult(step=1))[1:]])
    engine.pump(lambda: engine.executor.counters()["frames_dropped_version"] == 4)
    assert len([record for record in caplog.records if "'old'" in record.getMessage()]) == 1
    assert not peer.data.poll(0)
