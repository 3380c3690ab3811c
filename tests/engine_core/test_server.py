from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.engine_core.fake_worker import REPO, FakeWorker, make_hello
from tests.engine_core.served import WAIT_S, Server, Session, eventually
from tests.fakes import FakeRunner, make_record, reference_tokens

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.server import serve
from pagoda_engine_core.sessions import outbox
from pagoda_engine_core.sessions.session import Mailbox, _protocol
from pagoda_proto import convert
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1 import engine_pb2_grpc as pb_grpc
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import SESSION_PROTOCOL, SESSION_SPOKEN, FinishReason, Load, RequestRecord
from pagoda_proto.steps import Hello, Versions
from pagoda_proto.times import LOOP_STUCK_S


async def test_load_comes_first_and_a_request_runs_to_its_end(server: Server, worker: FakeWorker) -> None:
    session = Session(server)
    first = await session.read()
    assert first is not None
    assert first.load.num_workers == 1
    assert first.load.vocab_size == 256
    record = make_record(max_tokens=20, n=3)
    session.submit(record)
    assert (await session.answer()).accepted.request_id == record.request_id
    await session.until(record.request_id)
    assert [session.tokens(record.request_id, choice) for choice in range(3)] == reference_tokens(record)
    assert session.ended[record.request_id].usage.output_tokens == 60


async def test_an_idle_session_hears_the_load_every_second_and_changes_at_once(server: Server) -> None:
    session = Session(server)
    while len(session.loads) < 3:
        await session.read()
    with FakeWorker(server.config.worker_endpoint):
        while session.loads[-1].num_workers == 0:
            await session.read()


async def test_bad_records_are_rejected_one_by_one(server: Server, worker: FakeWorker) -> None:
    session = Session(server)
    good = make_record()
    bad = pb.Submit(record=convert.record_to_pb(make_record(request_id="bad")), attempt=4)
    bad.record.generate.params.top_p = 7.0
    session.frames.put_nowait(pb.ClientFrame(submit=bad))
    nameless = pb.Submit(record=pb.RequestRecord(prompt_token_ids=[1], generate=pb.Generate()))
    session.frames.put_nowait(pb.ClientFrame(submit=nameless))
    session.frames.put_nowait(pb.ClientFrame(submit=pb.Submit(record=pb.RequestRecord(request_id="taskless"))))
    session.frames.put_nowait(pb.ClientFrame())
    session.submit(make_record((1, 1000), request_id="oov"))
    session.submit(good)
    answers = {}
    while len(answers) < 5:
        frame = await session.answer()
        kind = frame.WhichOneof("frame")
        answers[getattr(frame, kind).request_id] = getattr(frame, kind)
    assert (answers["taskless"].code, answers["taskless"].param) == ("invalid_argument", "task")
    assert (answers["bad"].code, answers["bad"].param, answers["bad"].attempt) == ("invalid_argument", "top_p", 4)
    assert answers[""].param == "request_id"
    assert answers["oov"].param == "prompt"
    await session.until(good.request_id)
    assert session.tokens(good.request_id) == reference_tokens(good)[0]


async def test_bytes_that_are_no_frame_cost_their_own_stream_only(server: Server, worker: FakeWorker) -> None:
    raw = server.channel.stream_stream("/pagoda.engine.v1.Engine/Session")
    call = raw(iter([b"\xff\xff\xff"]))
    with pytest.raises(grpc.aio.AioRpcError) as broken:
        async for _ in call:
            pass
    assert broken.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await server.channel.unary_unary("/pagoda.engine.v1.Engine/Nothing")(b"")
    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
    session, record = Session(server), make_record()
    session.submit(record)
    await session.until(record.request_id)


async def test_a_message_above_the_limit_is_refused(server: Server) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        record = pb.RequestRecord(request_id="x" * (65 * 1024 * 1024))
        async for _ in server.engine.Generate(pb.GenerateRequest(record=record)):
            pass
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_abort_ends_choices_and_requests(server: Server, worker: FakeWorker) -> None:
    worker.hold.set()
    session, record = Session(server), make_record(max_tokens=100, n=2)
    session.submit(record)
    await session.answer()
    session.abort(record.request_id, (1,))
    session.abort(record.request_id)
    await session.until(record.request_id)
    worker.hold.clear()
    reasons = {delta.choice: delta.finish_reason for delta in session.deltas if delta.finish_reason}
    assert reasons == {0: FinishReason.ABORT, 1: FinishReason.ABORT}


@pytest.mark.parametrize("how", ["cancel", "half-close"])
async def test_the_end_of_a_session_ends_its_requests(server: Server, worker: FakeWorker, how: str) -> None:
    worker.hold.set()
    session = Session(server)
    session.submit(make_record(max_tokens=900, request_id="orphan"))
    assert (await session.answer()).HasField("accepted")
    if how == "cancel":
        session.call.cancel()
    else:
        session.frames.put_nowait(None)
        while await session.read() is not None:
            pass

    async def freed() -> bool:
        stats = await server.admin.GetStats(pb.GetStatsRequest())
        return stats.load.num_running == 0 and stats.blocks_used == 0

    await eventually(freed)
    worker.hold.clear()


async def test_a_higher_attempt_on_another_session_survives_the_first_ones_end(
    server: Server, worker: FakeWorker
) -> None:
    worker.hold.set()
    first, second = Session(server), Session(server)
    record = make_record(max_tokens=30)
    first.submit(record)
    await first.answer()
    second.submit(record, attempt=1)
    await second.answer()
    first.call.cancel()
    worker.hold.clear()
    await second.until(record.request_id)
    assert second.tokens(record.request_id) == reference_tokens(record)[0]


async def test_a_slow_session_gets_merged_deltas_and_every_token(server: Server, worker: FakeWorker) -> None:
    slow, quick = Session(server), Session(server)
    records = [make_record(max_tokens=900, logprobs=20, seed=i) for i in range(12)]
    witness = make_record(max_tokens=1000)
    for record in records:
        slow.submit(record)
    await slow.answer()
    quick.submit(witness)
    await quick.until(witness.request_id)  # nobody has read the slow session meanwhile
    await slow.until(*(record.request_id for record in records))
    for record in records:
        assert slow.tokens(record.request_id) == reference_tokens(record)[0]
        assert all(
            len(d.result.logprobs or ()) == len(d.result.token_ids)
            for d in slow.deltas
            if d.request_id == record.request_id
        )
    assert max(len(delta.result.token_ids) for delta in slow.deltas) > 1
    assert len(slow.deltas) < 12 * 900


async def test_a_session_that_is_too_far_behind_loses_its_requests_and_nobody_elses(
    server: Server, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING_NUMBERS", 20_000)
    narrow = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 65_536),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    channel = grpc.aio.insecure_channel(server.config.listen, options=narrow)
    slow, quick = Session(server, channel), Session(server)
    for seed in range(12):
        slow.submit(make_record(max_tokens=1000, logprobs=20, seed=seed))
    await slow.answer()
    witness = make_record(max_tokens=1000)
    quick.submit(witness)
    await quick.until(witness.request_id)
    assert quick.tokens(witness.request_id) == reference_tokens(witness)[0]
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        while await slow.read() is not None:
            assert len(slow.ended) < 12
    await channel.close()
    assert lost.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_generate_serves_plain_clients(server: Server, worker: FakeWorker) -> None:
    record = make_record(max_tokens=15, n=2, seed=9)
    message = convert.record_to_pb(record)
    message.request_id = ""
    tokens: dict[int, list[int]] = {0: [], 1: []}
    async for response in server.engine.Generate(pb.GenerateRequest(record=message)):
        assert response.delta.tokens.first_index == len(tokens[response.delta.choice])
        tokens[response.delta.choice] += response.delta.tokens.token_ids
    assert [tokens[0], tokens[1]] == reference_tokens(record)


async def test_generate_errors_carry_status_and_code(server: Server, worker: FakeWorker) -> None:
    async def fail(record: RequestRecord) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in server.engine.Generate(pb.GenerateRequest(record=convert.record_to_pb(record))):
                pass
        return raised.value

    for record, status, code in (
        (make_record((1, 999)), grpc.StatusCode.INVALID_ARGUMENT, ErrorCode.INVALID_ARGUMENT),
        (make_record(max_tokens=5000), grpc.StatusCode.INVALID_ARGUMENT, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    ):
        error = await fail(record)
        assert error.code() is status
        assert dict([*error.trailing_metadata()])["pagoda-code"] == code


async def test_generate_that_is_cancelled_frees_its_blocks(server: Server, worker: FakeWorker) -> None:
    worker.hold.set()
    record = make_record(max_tokens=900)
    call = server.engine.Generate(pb.GenerateRequest(record=convert.record_to_pb(record)))

    async def running() -> bool:
        return (await server.admin.GetStats(pb.GetStatsRequest())).load.num_running == 1

    reading = asyncio.create_task(call.read())
    await eventually(running)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading

    async def freed() -> bool:
        return (await server.admin.GetStats(pb.GetStatsRequest())).blocks_used == 0

    await eventually(freed)
    worker.hold.clear()


async def test_the_process_is_live_also_without_workers(server: Server) -> None:
    stub = health_pb2_grpc.HealthStub(server.channel)

    async def live() -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):  # not reported yet
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="live"))
            return answer.status == health_pb2.HealthCheckResponse.SERVING
        return False

    await eventually(live)


NEXT, OLD = SESSION_PROTOCOL + 1, SESSION_PROTOCOL - 1


@pytest.mark.parametrize(
    ("ours", "said", "agreed"),
    [
        (SESSION_SPOKEN, {}, SESSION_PROTOCOL),
        (SESSION_SPOKEN, {"pagoda-protocol": NEXT, "pagoda-protocol-oldest": SESSION_PROTOCOL}, SESSION_PROTOCOL),
        (Versions(OLD, SESSION_PROTOCOL), {"pagoda-protocol": OLD}, OLD),
        (Versions(OLD, OLD), {"pagoda-protocol": SESSION_PROTOCOL, "pagoda-protocol-oldest": OLD}, OLD),
        (Versions(OLD, OLD), {"pagoda-protocol": SESSION_PROTOCOL}, None),
        (SESSION_SPOKEN, {"pagoda-protocol": NEXT, "pagoda-protocol-oldest": NEXT}, None),
        (SESSION_SPOKEN, {"pagoda-protocol": "x"}, None),
        (SESSION_SPOKEN, {"pagoda-protocol": SESSION_PROTOCOL, "pagoda-protocol-oldest": "9" * 5000}, None),
    ],
)
async def test_a_session_is_in_the_newest_version_that_both_speak(
    ours: Versions, said: dict[str, object], agreed: int | None
) -> None:
    class Context:
        def invocation_metadata(self) -> list[tuple[str, str]]:
            return [(key, str(value)) for key, value in said.items()]

        async def abort(self, code: grpc.StatusCode, message: str, trailers: object) -> None:
            raise RuntimeError(message)

    context: Any = Context()
    if agreed is None:
        with pytest.raises(RuntimeError, match=f"session protocol {ours} is spoken here, this gateway speaks"):
            await _protocol(context, ours)
        return
    protocol = await _protocol(context, ours)
    mailbox = Mailbox(protocol)
    mailbox.load(Load(engine_id="e", protocol=ours.newest))
    assert [frame.load.protocol for frame in mailbox.outbox.take()] == [agreed]


@pytest.mark.parametrize("spoken", [SESSION_PROTOCOL, SESSION_PROTOCOL + 1])
async def test_a_gateway_of_another_protocol_is_refused_by_both_names(server: Server, spoken: int) -> None:
    frames: asyncio.Queue[pb.ClientFrame] = asyncio.Queue()

    async def requests() -> AsyncIterator[pb.ClientFrame]:
        while True:
            yield await frames.get()

    call = server.engine.Session(requests(), metadata=(("pagoda-protocol", str(spoken)),))
    if spoken == SESSION_PROTOCOL:
        load = (await call.read()).load
        assert (load.protocol, load.policy) == (SESSION_PROTOCOL, "fcfs")
        call.cancel()
        return
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert str(spoken) in refused.value.details()
    assert str(SESSION_PROTOCOL) in refused.value.details()


async def test_a_resumed_request_is_bound_to_what_it_began_with(server: Server, worker: FakeWorker) -> None:
    session, record = Session(server), make_record(max_tokens=8)
    session.submit(record)
    await session.until(record.request_id)
    (begun,) = [delta.result.begun for delta in session.deltas if delta.result.begun is not None]
    assert begun.numerics_id == session.loads[-1].numerics_id == "fake-numerics"
    again = make_record(max_tokens=8)
    prior = pb.PriorOutput(choice=0, token_ids=reference_tokens(again)[0][:3])
    foreign = convert.begun_to_pb(msgspec.structs.replace(begun, model_fingerprint="another"))
    resume = pb.Resume(prior_outputs=[prior], begun=foreign)
    submit = pb.Submit(record=convert.record_to_pb(again), attempt=1, resume=resume)
    session.frames.put_nowait(pb.ClientFrame(submit=submit))
    session.answers.clear()
    answer = await session.answer()
    assert answer.rejected.code == ErrorCode.STREAM_INTERRUPTED


@pytest.mark.slow
async def test_a_process_whose_loop_is_stuck_tells_its_stacks_and_ends(socket_dir: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.engine_core.stuck_loop", str(socket_dir), stderr=asyncio.subprocess.PIPE, cwd=REPO
    )
    try:
        with FakeWorker(f"ipc://{socket_dir}/w.sock"):
            async with asyncio.timeout(LOOP_STUCK_S + WAIT_S):
                _, stacks = await process.communicate()
        assert process.returncode == 1
        assert b"in block_for_ever" in stacks
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_health_follows_the_workers(server: Server) -> None:
    stub = health_pb2_grpc.HealthStub(server.channel)

    async def status() -> int:
        return (await stub.Check(health_pb2.HealthCheckRequest(service="pagoda.engine.v1.Engine"))).status

    assert await status() == health_pb2.HealthCheckResponse.NOT_SERVING
    with FakeWorker(server.config.worker_endpoint):

        async def serving() -> bool:
            return await status() == health_pb2.HealthCheckResponse.SERVING

        await eventually(serving)


@contextlib.asynccontextmanager
async def _stopping_beside_a_stream(
    socket_dir: Path, *, drain_timeout_s: float
) -> AsyncIterator[tuple[FakeWorker, Session, RequestRecord]]:
    """An engine core is told to stop while a worker that computes nothing holds one request of an open session."""
    server = Server(socket_dir, drain_timeout_s=drain_timeout_s)
    await server.event("listening")
    worker = FakeWorker(server.config.worker_endpoint)
    worker.hold.set()
    with worker:
        await server.workers(1)
        session, record = Session(server), make_record(max_tokens=50)
        session.submit(record)
        await session.answer()
        server.stop.set()
        yield worker, session, record
        await server.close()


async def test_an_engine_core_that_is_to_leave_ends_what_is_open_and_gives_back_what_comes(socket_dir: Path) -> None:
    async with _stopping_beside_a_stream(socket_dir, drain_timeout_s=600.0) as (worker, session, record):
        late = make_record()
        while not (await session.read()).load.draining:
            pass
        session.submit(late)
        assert (await session.answer()).migrate.request_id == late.request_id
        worker.hold.clear()
        await session.until(record.request_id)
        assert session.tokens(record.request_id) == reference_tokens(record)[0]


async def test_stopping_migrates_running_requests_and_removes_the_sockets(socket_dir: Path) -> None:
    async with _stopping_beside_a_stream(socket_dir, drain_timeout_s=0.0) as (_, session, record):
        migrate = (await session.answer()).migrate
        assert (migrate.request_id, migrate.attempt) == (record.request_id, 0)
        while await session.read() is not None:
            pass
        assert await session.call.code() is grpc.StatusCode.OK
    assert os.listdir(socket_dir) == []


async def test_a_killed_predecessors_sockets_are_replaced(socket_dir: Path) -> None:
    for name in ("e.sock", "w.sock"):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(socket_dir / name))
    server = Server(socket_dir)
    assert await server.event("listening") == {
        "event": "listening",
        "address": server.config.listen,
        "worker_endpoint": server.config.worker_endpoint,
    }
    assert (await Session(server).read()).load.num_workers == 0
    await server.close()


@pytest.mark.parametrize("listen", ["", "0.0.0.0:0", "example.com:50051", "unix:relative.sock", ":50051", "[::]:1"])
async def test_addresses_that_others_could_reach_are_refused(socket_dir: Path, listen: str) -> None:
    config = EngineConfig(listen=listen, worker_endpoint=f"ipc://{socket_dir}/w.sock")
    with pytest.raises(ValueError):
        await serve(config, lambda event: None, asyncio.Event())


async def test_an_address_in_use_is_an_error_and_leaves_nothing_behind(server: Server, socket_dir: Path) -> None:
    other = socket_dir / "other"
    other.mkdir(mode=0o700)
    config = EngineConfig(listen=server.config.listen, worker_endpoint=f"ipc://{other}/w.sock")
    with pytest.raises(OSError, match="listening"):
        await serve(config, lambda event: None, asyncio.Event())
    assert os.listdir(other) == []
    assert (await Session(server).read()).HasField("load")


@pytest.mark.parametrize("host", ["::1", "localhost"])
async def test_metrics_are_where_they_are_said_to_be(socket_dir: Path, host: str) -> None:
    stop, events = asyncio.Event(), asyncio.Queue()
    config = EngineConfig(listen=f"unix:{socket_dir}/e.sock", worker_endpoint=f"ipc://{socket_dir}/w.sock")
    config = replace(config, metrics_port=0, metrics_host=host)
    task = asyncio.create_task(serve(config, events.put_nowait, stop))
    url = str((await events.get())["metrics"])
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    assert "pagoda_engine_core_num_workers 0.0" in page
    stop.set()
    await task


async def test_a_host_that_is_none_is_named(socket_dir: Path) -> None:
    config = EngineConfig(listen=f"unix:{socket_dir}/e.sock", worker_endpoint=f"ipc://{socket_dir}/w.sock")
    config = replace(config, metrics_port=0, metrics_host="no.such.host.invalid")
    with pytest.raises(OSError, match=r"metrics_host 'no\.such\.host\.invalid'"):
        await serve(
            replace(config, metrics_port=0, metrics_host="no.such.host.invalid"), lambda event: None, asyncio.Event()
        )


async def test_tcp_on_loopback_reports_its_port_and_metrics_their_page() -> None:
    stop, events = asyncio.Event(), asyncio.Queue()
    config = EngineConfig(listen="127.0.0.1:0", worker_endpoint="tcp://127.0.0.1:0", metrics_port=0)
    task = asyncio.create_task(serve(config, events.put_nowait, stop))
    event = await events.get()

    def drafting(hello: Hello) -> FakeRunner:
        return FakeRunner(hello.num_blocks, hello.block_size, hint=lambda row: 2, accept=lambda row, allowed: allowed)

    with FakeWorker(str(event["worker_endpoint"]), runner=drafting):
        assert (await events.get()) == {"event": "workers", "ready": 1}
        async with grpc.aio.insecure_channel(str(event["address"])) as channel:
            record = convert.record_to_pb(make_record(max_tokens=5))
            async for _ in pb_grpc.EngineStub(channel).Generate(pb.GenerateRequest(record=record)):
                pass
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(str(event["metrics"])).read().decode())
    assert "pagoda_engine_core_generation_tokens_total 5.0" in page
    assert 'pagoda_engine_core_request_success_total{finished_reason="length"} 1.0' in page
    assert "pagoda_engine_core_num_workers 1.0" in page
    drafts = "pagoda_engine_core_spec_decode_num_draft_tokens_total 2.0"
    assert drafts in page, "after the first two tokens there is room for two"
    assert "pagoda_engine_core_spec_decode_num_accepted_tokens_total 2.0" in page
    assert "pagoda_engine_core_step_seconds_total" in page
    stop.set()
    await task


async def test_a_worker_that_dies_costs_a_session_no_token(server: Server) -> None:
    session = Session(server)
    records = [make_record(range(i + 1), max_tokens=60, seed=i) for i in range(8)]
    with FakeWorker(server.config.worker_endpoint, make_hello("w0"), step_s=0.002) as first:
        await server.workers(1)
        for record in records:
            session.submit(record)
        while len(session.deltas) < 40:
            await session.read()
        with FakeWorker(server.config.worker_endpoint, make_hello("w1")):
            await server.workers(2)
            await asyncio.to_thread(first.stop)
            await session.until(*(record.request_id for record in records))
    for record in records:
        assert session.tokens(record.request_id) == reference_tokens(record)[0]
