"""Links over TCP with keys: only holders of a listed key get in."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import zmq
from tests.engine_core.fake_worker import make_hello
from tests.fakes import make_record

from pagoda.commands.ping import ping
from pagoda.tools.keygen import generate
from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.server import serve
from pagoda_engine_core.workers.executor import WorkerJoined
from pagoda_engine_core.workers.zmq_executor import ZmqExecutor
from pagoda_proto import convert
from pagoda_proto.channel import Envelope, encode
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1 import engine_pb2_grpc as pb_grpc
from pagoda_proto.keys import TLS_SERVER_NAME, CurveKeys, KeyFileError, load_curve, load_tls

WAIT_S = 60.0


def connect(context: zmq.Context, endpoint: str, keys: CurveKeys | None, incarnation: str) -> zmq.Socket:
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.setsockopt(zmq.ROUTING_ID, f"{incarnation}.1/d".encode())
    if keys is not None:
        dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = keys.public, keys.secret, keys.peers[0]
    dealer.connect(endpoint)
    hello = make_hello(incarnation, incarnation=incarnation)
    dealer.send_multipart(encode(Envelope("", incarnation, 0, 1), hello))
    return dealer


def test_sec_03_only_workers_with_a_listed_key_are_heard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generate(tmp_path / "ours")
    generate(tmp_path / "theirs")
    ours = load_curve(str(tmp_path / "ours" / "worker"), "engine-core.public")
    theirs = load_curve(str(tmp_path / "theirs" / "worker"), "engine-core.public")
    config = EngineConfig(worker_endpoint="tcp://127.0.0.1:0", keys_dir=str(tmp_path / "ours" / "engine-core"))
    executor, context = ZmqExecutor(config, "boot"), zmq.Context()
    try:
        strangers = [
            connect(context, executor.endpoint, None, "plain"),
            connect(context, executor.endpoint, theirs._replace(peers=ours.peers), "stranger"),
        ]
        friend = connect(context, executor.endpoint, ours, "friend")
        joined: list[object] = []
        while not joined:
            joined = [event for event in executor.wait(WAIT_S) if isinstance(event, WorkerJoined)]
        assert [event.hello.worker_id for event in joined if isinstance(event, WorkerJoined)] == ["friend"]
        assert friend.poll(WAIT_S * 1000)
        assert not any(stranger.poll(0) for stranger in strangers)
        assert [info.hello.worker_id for info in executor.workers()] == ["friend"]
        while executor.counters().get("handshakes_refused", 0) < len(strangers):
            assert not any(isinstance(event, WorkerJoined) for event in executor.wait(WAIT_S))
        assert [info.hello.worker_id for info in executor.workers()] == ["friend"]
        assert not [name for name in executor.counters() if name.startswith("frames_dropped")]
        line = next(record.getMessage() for record in caplog.records if "handshake" in record.getMessage())
        assert f"connections to {executor.endpoint} refused" in line
    finally:
        executor.close()
        context.destroy(linger=0)


def test_workers_with_old_and_with_new_keys_are_heard_while_both_are_listed(tmp_path: Path) -> None:
    generate(tmp_path / "old")
    generate(tmp_path / "new")
    old, new = (load_curve(str(tmp_path / name / "worker"), "engine-core.public") for name in ("old", "new"))
    shutil.copy(tmp_path / "new" / "worker" / "curve.public", tmp_path / "old" / "engine-core" / "worker-new.public")
    config = EngineConfig(worker_endpoint="tcp://127.0.0.1:0", keys_dir=str(tmp_path / "old" / "engine-core"))
    executor, context = ZmqExecutor(config, "boot"), zmq.Context()
    try:
        workers = {"old": old, "new": new._replace(peers=old.peers)}
        links = [connect(context, executor.endpoint, keys, name) for name, keys in workers.items()]
        joined: set[str] = set()
        while len(joined) < len(links):
            joined |= {event.hello.worker_id for event in executor.wait(WAIT_S) if isinstance(event, WorkerJoined)}
    finally:
        executor.close()
        context.destroy(linger=0)


def test_keys_that_are_missing_are_named_at_start(tmp_path: Path) -> None:
    config = EngineConfig(worker_endpoint="tcp://127.0.0.1:0", keys_dir=str(tmp_path))
    with pytest.raises(KeyFileError, match=r"worker\*\.public"):
        ZmqExecutor(config, "boot")


async def test_gateways_need_a_certificate_of_our_authority(tmp_path: Path) -> None:
    generate(tmp_path / "ours")
    generate(tmp_path / "theirs")
    config = EngineConfig(
        listen="127.0.0.1:0", worker_endpoint="tcp://127.0.0.1:0", keys_dir=str(tmp_path / "ours" / "engine-core")
    )
    stop, events = asyncio.Event(), asyncio.Queue()
    task = asyncio.create_task(serve(config, events.put_nowait, stop))
    address = str((await events.get())["address"])

    async def generate_with(channel: grpc.aio.Channel) -> grpc.StatusCode:
        request = pb.GenerateRequest(record=convert.record_to_pb(make_record(max_tokens=10**6)))
        async with channel:
            try:
                async for _ in pb_grpc.EngineStub(channel).Generate(request, timeout=5):
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    def channel(keys_dir: Path) -> grpc.aio.Channel:
        keys = load_tls(str(keys_dir))
        credentials = grpc.ssl_channel_credentials(
            load_tls(str(tmp_path / "ours" / "gateway")).ca, keys.private_key, keys.certificate
        )
        return grpc.aio.secure_channel(address, credentials, [("grpc.ssl_target_name_override", TLS_SERVER_NAME)])

    try:
        stranger = await generate_with(channel(tmp_path / "theirs" / "gateway"))
        assert stranger is grpc.StatusCode.UNAVAILABLE
        assert await generate_with(grpc.aio.insecure_channel(address)) is grpc.StatusCode.UNAVAILABLE
        # No worker has joined to set the limits, so an admitted request waits for one.
        assert await generate_with(channel(tmp_path / "ours" / "gateway")) is grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        stop.set()
        await task


@asynccontextmanager
async def serving(**options: str) -> AsyncIterator[str]:
    """Serve an engine core; yields its address."""
    config = EngineConfig(listen="127.0.0.1:0", worker_endpoint="tcp://127.0.0.1:0", **options)
    stop, events = asyncio.Event(), asyncio.Queue()
    task = asyncio.create_task(serve(config, events.put_nowait, stop))
    try:
        yield str((await events.get())["address"])
    finally:
        stop.set()
        await task


async def test_certificates_of_two_authorities_are_let_in_while_both_are_named(tmp_path: Path) -> None:
    """So a key set can be replaced one process at a time, without the tiers ever refusing each other."""
    sets = {name: tmp_path / name for name in ("old", "new")}
    for each in sets.values():
        generate(each)
    names = {name: (path / "gateway" / "ca.crt").read_bytes() for name, path in sets.items()}
    names |= {"old, new": names["old"] + names["new"], "new, old": names["new"] + names["old"]}

    def holding(role: str, certificate: str, authorities: str) -> str:
        place = tmp_path / f"{role}, {certificate} of {authorities}"
        if not place.exists():
            shutil.copytree(sets[certificate] / role, place)
            (place / "ca.crt").write_bytes(names[authorities])
        return str(place)

    async def meet(engine: str, gateways: list[tuple[str, str]]) -> list[bool]:
        certificate, _, authorities = engine.partition(" of ")
        async with serving(keys_dir=holding("engine-core", certificate, authorities)) as address:
            places = [holding("gateway", *gateway) for gateway in gateways]
            return [
                await asyncio.to_thread(ping, f"grpcs://{address}", keys_dir=place, timeout_s=WAIT_S) is None
                for place in places
            ]

    for both in ("old, new", "new, old"):
        assert await meet("old of old", [("old", "old"), ("old", both)]) == [True] * 2
        assert await meet(f"old of {both}", [("old", "old"), ("old", both), ("new", both)]) == [True] * 3
        assert await meet(f"new of {both}", [("old", both), ("new", both), ("new", "new")]) == [True] * 3
    assert await meet("new of new", [("new", both), ("old", both), ("old", "old")]) == [True, False, False]


async def test_that_an_engine_core_lives_is_known_without_its_keys(tmp_path: Path) -> None:
    generate(tmp_path / "keys")
    file = tmp_path / "alive"
    async with serving(keys_dir=str(tmp_path / "keys" / "engine-core"), alive_file=str(file)):
        async with asyncio.timeout(WAIT_S):
            while await asyncio.to_thread(ping, f"file:{file}"):  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.05)
