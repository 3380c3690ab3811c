from __future__ import annotations

import pytest
from tests.engine_core.served import Server

from pagoda_proto.engine.frames import TOGETHER_SINCE, parted
from pagoda_proto.engine.v1 import engine_pb2 as pb


@pytest.mark.parametrize("protocol", [TOGETHER_SINCE - 1, TOGETHER_SINCE])
async def test_frames_come_together_and_go_together_to_who_can_read_it(server: Server, protocol: int) -> None:
    bad = [pb.ClientFrame(submit=pb.Submit(record=pb.RequestRecord(request_id=str(i)))) for i in range(50)]
    bad[0].more.extend(bad[1:])
    call = server.engine.Session(iter(bad[:1]), metadata=[("pagoda-protocol", str(protocol))])
    messages = [message async for message in call]
    frames = [frame for message in messages for frame in parted(message)]
    assert sorted(int(frame.rejected.request_id) for frame in frames if frame.HasField("rejected")) == list(range(50))
    assert (len(messages) == len(frames)) == (protocol < TOGETHER_SINCE)
