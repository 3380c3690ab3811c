"""A session ends by what the engine core does or fails to do, never because the gateway itself was suspended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.fake_engine_core import FakeEngineCore, Run, expected_tokens, until
from tests.gateway.streams import Connect, collect, record, sample, tokens_of

from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.engine.session import EngineAddress, Session
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.engine.frames import TOGETHER_SINCE
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import PagodaError
from pagoda_proto.records import SESSION_PROTOCOL, Delta
from pagoda_proto.times import ENGINE_SILENT_S, STALL_S


async def test_a_session_says_which_protocol_it_speaks(engine: FakeEngineCore, client: SessionClient) -> None:
    await collect(await client.submit(record()))
    assert engine.metadata[0]["pagoda-protocol"] == str(SESSION_PROTOCOL)


@pytest.mark.parametrize("protocol", [TOGETHER_SINCE - 1, TOGETHER_SINCE])
async def test_what_is_submitted_at_once_goes_together_to_who_can_read_it(
    engine: FakeEngineCore, client: SessionClient, protocol: int
) -> None:
    engine.set_load(protocol=protocol)
    await until(lambda: client.load.protocol == protocol)
    requests = [record() for _ in range(50)]
    submitted = await asyncio.gather(*map(client.submit, requests))
    for generation, request in zip(submitted, requests, strict=True):
        assert tokens_of(await collect(generation)) == expected_tokens(request)
    assert (engine.num_messages == len(requests)) == (protocol < TOGETHER_SINCE)


async def test_an_engine_core_of_another_protocol_is_not_used(
    engine: FakeEngineCore, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(connect_s=0.05)
    engine.set_load(protocol=SESSION_PROTOCOL + 1)
    await until(lambda: client.connected)
    with pytest.raises(PagodaError, match=f"speaks version {SESSION_PROTOCOL + 1} of the session's protocol"):
        await client.submit(record())
    assert engine.submits == []
    assert client.load.num_workers == 0
    engine.set_load()
    engine.set_load()
    await asyncio.sleep(0.05)
    assert len([r for r in caplog.records if "is not used" in r.message]) == 1  # not with every load report


async def test_requests_outwait_an_engine_core_of_another_protocol(
    engine: FakeEngineCore, client: SessionClient
) -> None:
    """As in an update of all processes in the wrong order."""
    engine.steps = asyncio.Semaphore(3)
    request = record()
    reading = asyncio.create_task(collect(await client.submit(request)))
    await engine.wait_sent(3)
    await engine.kill()
    engine.steps = None
    engine.load = type(engine.load)(engine_id="other", num_workers=1, protocol=SESSION_PROTOCOL + 1)
    await engine.start()
    await until(lambda: "speaks version" in client.problem)
    assert len(engine.submits) == 1
    await engine.kill()
    engine.set_load(protocol=SESSION_PROTOCOL)
    await engine.start()
    assert tokens_of(await reading) == expected_tokens(request)


async def test_who_was_held_up_itself_blames_nobody(engine: FakeEngineCore, connect: Connect) -> None:
    """Everything is stopped for longer than the silence limit of any part; then all continue."""
    client = connect(silent_s=2 * STALL_S)  # a stall of the event loop is either shorter or does not count
    engine.pulse_s = STALL_S / 2
    engine.steps = asyncio.Semaphore(2)
    request = record()
    reading = asyncio.create_task(collect(await client.submit(request)))
    await until(lambda: sample(client, "generation_tokens_total") == 2)  # nothing is in flight
    time.sleep(3 * STALL_S)  # noqa: ASYNC251 - the stall is what is tested
    await asyncio.sleep(0.2)
    engine.steps = None
    engine.break_streams()
    assert tokens_of(await reading) == expected_tokens(request)
    assert sample(client, "engine_sessions_lost_total") == 1  # the one that the test broke


async def test_a_wait_for_an_engine_core_does_not_run_while_the_gateway_sleeps(
    engine: FakeEngineCore, connect: Connect
) -> None:
    client = connect(resume_s=1.0)
    engine.steps = asyncio.Semaphore(2)
    request = record()
    reading = asyncio.create_task(collect(await client.submit(request)))
    await engine.wait_sent(2)
    await engine.kill()
    await until(lambda: not client.connected)
    time.sleep(STALL_S + 1.0)  # noqa: ASYNC251 - the stall is what is tested
    await asyncio.sleep(0.1)
    assert not reading.done()
    engine.steps = None
    await engine.start()
    assert tokens_of(await reading) == expected_tokens(request)


STREAM = """
import asyncio, json, sys
from tests.gateway.streams import collect, record, sample, tokens_of
from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.engine.session import EngineAddress, Session
from pagoda_gateway.metrics import GatewayMetrics

async def main():
    client = SessionClient([EngineAddress(sys.argv[1])], GatewayMetrics("m"))
    client.start()
    tokens = tokens_of(await collect(await client.submit(record())))
    print(json.dumps({"tokens": tokens, "lost": sample(client, "engine_sessions_lost_total")}))
    await client.aclose()

asyncio.run(main())
"""


@pytest.mark.e2e
async def test_a_gateway_that_was_stopped_keeps_its_session(engine: FakeEngineCore, address: str) -> None:
    engine.steps = asyncio.Semaphore(2)
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": str(root)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STREAM, address, stdout=asyncio.subprocess.PIPE, env=env, cwd=root
    )
    try:
        await engine.wait_sent(2)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(ENGINE_SILENT_S + 2.0)
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.5)
        for _ in range(12):
            engine.steps.release()
        assert process.stdout is not None
        async with asyncio.timeout(60):
            result = json.loads(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert result["tokens"] == expected_tokens(record())
    assert result["lost"] == 0
    assert len(engine.metadata) == 1


async def test_frames_of_another_version_are_nothing_to_a_session(
    engine: FakeEngineCore, client: SessionClient
) -> None:
    """A frame of an unknown kind, and a delta with an unknown field."""
    unknown_kind = pb.ServerFrame.FromString(bytes([0x7A, 0x02, 0x08, 0x01]))  # field 15, a message
    assert unknown_kind.WhichOneof("frame") is None

    def with_strangers(run: Run, delta: Delta) -> list[object]:
        return [unknown_kind, delta, pb.ServerFrame()]

    engine.script = with_strangers
    request = record()
    assert tokens_of(await collect(await client.submit(request))) == expected_tokens(request)
    assert len(engine.metadata) == 1


NUMBERS = st.integers(0, 3)
TOKENS = st.builds(
    pb.Tokens,
    first_index=NUMBERS,
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3),
    stop_token_id=st.one_of(st.none(), st.integers(0, 9)),
    begun=st.one_of(st.none(), st.builds(pb.Begun, model_fingerprint=st.text(max_size=2))),
)
DELTAS = st.builds(
    pb.Delta,
    request_id=st.sampled_from(["r", "other"]),
    attempt=NUMBERS,
    choice=NUMBERS,
    tokens=st.one_of(st.none(), TOKENS),
    finish_reason=st.integers(0, 9),
    error_code=st.text(max_size=3),
    usage=st.one_of(st.none(), st.builds(pb.Usage, output_tokens=NUMBERS)),
)
ABOUT = {"request_id": st.just("r"), "attempt": NUMBERS}
FRAMES = st.one_of(
    st.builds(lambda deltas: pb.ServerFrame(outputs=pb.StepOutputs(deltas=deltas)), st.lists(DELTAS, max_size=4)),
    st.builds(lambda load: pb.ServerFrame(load=load), st.builds(pb.Load, protocol=NUMBERS, draining=st.booleans())),
    st.builds(lambda message: pb.ServerFrame(accepted=message), st.builds(pb.Accepted, **ABOUT)),
    st.builds(lambda message: pb.ServerFrame(migrate=message), st.builds(pb.Migrate, **ABOUT)),
    st.builds(
        lambda message: pb.ServerFrame(rejected=message),
        st.builds(pb.Rejected, code=st.text(max_size=3), retry_after_s=st.floats(), **ABOUT),
    ),
    st.just(pb.ServerFrame()),
)


@given(st.lists(FRAMES, max_size=12))
@settings(max_examples=200, deadline=None)
def test_no_frame_raises_whatever_is_in_it(frames: list[pb.ServerFrame]) -> None:
    async def take() -> None:
        client = SessionClient([EngineAddress("unix:/nowhere")], GatewayMetrics("m"))
        (link,) = client._links
        link._session = Session(EngineAddress("unix:/nowhere"), client.clock, 5.0)
        link.on_frame(pb.ServerFrame(load=pb.Load(protocol=SESSION_PROTOCOL)))
        generation = client._pool.open(msgspec.structs.replace(record(n=2), request_id="r"), counted=True)
        for frame in frames:
            link.on_frame(frame)
        client.end_all("over")
        deltas = []
        while batch := await generation.next():
            deltas += batch
        assert [delta.ends_request for delta in deltas].count(True) == 1
        assert deltas[-1].ends_request

    asyncio.run(take())


async def test_one_engine_cores_frame_that_breaks_the_wire_costs_only_a_session(
    engine: FakeEngineCore, client: SessionClient
) -> None:
    """A frame larger than a message may be: gRPC ends the call, and the request continues with the next session."""
    big = pb.ServerFrame(migrate=pb.Migrate(request_id="x" * (65 * 1024 * 1024)))
    engine.script = lambda run, delta: [delta, big] if (run.attempt, delta.result.first_index) == (0, 3) else [delta]
    request = record()
    assert tokens_of(await collect(await client.submit(request))) == expected_tokens(request)
    assert len(engine.metadata) == 2


@pytest.mark.parametrize("address", ["0.0.0.0:1", "engine:50051", "10.0.0.1:5", "", "ipc:///x"])
def test_only_local_engine_cores(address: str) -> None:
    with pytest.raises(ValueError, match=r"loopback|host:port"):
        EngineAddress(address)


@pytest.mark.parametrize("address", ["unix:/run/x", "127.0.0.1:5", "localhost:5", "[::1]:5"])
def test_local_addresses(address: str) -> None:
    EngineAddress(address)


def test_several_engine_cores_have_commas_between_them() -> None:
    assert [each.text for each in EngineAddress.several("unix:/a, localhost:5")] == ["unix:/a", "localhost:5"]
    for wrong in ("unix:/a,", "unix:/a,unix:/a", "unix:/a,10.0.0.1:5"):
        with pytest.raises(ValueError, match=r"loopback|host:port|twice"):
            EngineAddress.several(wrong)
