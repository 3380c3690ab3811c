"""The engine core process: gRPC in the main thread's event loop, the engine loop in its own thread.

serve    build, report "listening", run until `stop`, drain, hand back, close; each part of stopping is time-limited
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import start_http_server

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.engine import EngineCore
from pagoda_engine_core.loop_watch import end_when_stuck, keep_touching
from pagoda_engine_core.metrics import Metrics
from pagoda_engine_core.sessions.admin import AdminService
from pagoda_engine_core.sessions.session import EngineService, LoadBoard
from pagoda_engine_core.workers import endpoints
from pagoda_engine_core.workers.zmq_executor import ZmqExecutor
from pagoda_proto.channel import MAX_FRAME_BYTES
from pagoda_proto.engine.v1 import engine_pb2_grpc as pb_grpc
from pagoda_proto.health.services import LIVE
from pagoda_proto.health.sign_file import SignFile
from pagoda_proto.keys import TlsKeys, load_tls
from pagoda_proto.records import Load
from pagoda_proto.times import HAND_BACK_S, SESSION_PING_S, SESSION_PONG_S, SESSIONS_END_S, THREAD_ENDS_S

log = logging.getLogger(__name__)

Report = Callable[[dict[str, object]], None]

SERVICES = ("", "pagoda.engine.v1.Engine", "pagoda.engine.v1.Admin")
MAX_STREAMS = 1024
GRPC_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.so_reuseport", 0),  # a second engine core on the same port must fail, not share it
    ("grpc.keepalive_time_ms", round(SESSION_PING_S * 1000)),
    ("grpc.keepalive_timeout_ms", round(SESSION_PONG_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),  # gateways detect by pings that we are gone
)
SCRAPE_S = 2.0
PULSE_S = 1.0
DRAIN_LOOK_S = 0.05


async def serve(config: EngineConfig, report: Report, stop: asyncio.Event) -> None:
    """Run an engine core until `stop` is set; then return within `drain_timeout_s` plus `ENGINE_CORE_STOPS_S`.

    Reports `{"event": "listening", "address", "worker_endpoint"}` once, with a "metrics" address if there is one, and
    `{"event": "workers", "ready": n}` whenever that number changes.

    Raises:
        ValueError: no address, or a non-local one without keys (KeyFileError: keys that cannot be used), or an
            `alive_file` that cannot be created.
        OSError: an address that is in use.
        RuntimeError: the engine loop has failed.
    """
    async with AsyncExitStack() as stack:
        metrics = Metrics()
        boot_id = secrets.token_hex(8)
        keys = load_tls(config.keys_dir) if config.keys_dir and not config.listen.startswith("unix:") else None
        alive_file = SignFile("alive_file", config.alive_file)
        path = endpoints.prepare(config.listen, file_scheme="unix:", tcp_scheme="", keyed=keys is not None)
        executor = ZmqExecutor(config, boot_id)
        engine = EngineCore(config, executor, engine_id=boot_id, observer=metrics)
        loop_thread = LoopThread(engine, stop)
        stack.push_async_callback(loop_thread.end)
        board = LoadBoard(engine, _workers_report(report))
        engine.on_load(board.changed)
        grpc_server, address = await _listen(config.listen, path, keys, engine, board, stack)
        event: dict[str, object] = {"event": "listening", "address": address, "worker_endpoint": executor.endpoint}
        report(event | _serve_metrics(config, metrics, engine, stack))
        loop_thread.start()
        await _start_task(board.run(), stack)
        await _start_task(end_when_stuck(lambda: engine.passed_at), stack)
        if config.alive_file:
            await _start_task(keep_touching(alive_file, lambda: engine.alive), stack)
        if keys is not None:
            metrics.certificate(keys.term.not_after)
            await _start_task(keys.tell_of_the_end(log), stack)
        await stop.wait()
        await _drain(engine, config.drain_timeout_s)
        await _hand_back(engine, board)
        await grpc_server.stop(SESSIONS_END_S)
    loop_thread.check()


class LoopThread:
    """The thread of the engine loop. If it fails, it sets `stop` to end the process."""

    def __init__(self, engine: EngineCore, stop: asyncio.Event) -> None:
        self._engine = engine
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._engine.run(self._stopping)
        except BaseException as error:
            log.critical("the engine loop has failed", exc_info=error)
            self._failure = error
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)

    async def end(self) -> None:
        """Stop the loop, waiting at most THREAD_ENDS_S; if it never started, close the engine core here."""
        self._stopping.set()
        if self._thread.ident is None:
            self._engine.close()
            return
        self._engine.call(lambda: None)
        await asyncio.to_thread(self._thread.join, THREAD_ENDS_S)
        if self._thread.is_alive():
            log.error("the engine loop did not end within %g s", THREAD_ENDS_S)

    def check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine loop has failed: {self._failure}") from self._failure


def _open_port(server: grpc.aio.Server, listen: str, keys: TlsKeys | None) -> str:
    """Open the port, with mutual TLS if there are `keys`. Returns the address with the actual port. Raises OSError if
    it is in use."""
    try:
        if keys is None:
            port = server.add_insecure_port(listen)
        else:
            pairs = [(keys.private_key, keys.certificate)]
            credentials = grpc.ssl_server_credentials(pairs, keys.ca, require_client_auth=True)
            port = server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen at {listen}: {error}") from error
    return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"


async def _listen(
    listen: str, path: Path | None, keys: TlsKeys | None, engine: EngineCore, board: LoadBoard, stack: AsyncExitStack
) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=GRPC_OPTIONS)
    pb_grpc.add_EngineServicer_to_server(EngineService(engine, board), server)
    pb_grpc.add_AdminServicer_to_server(AdminService(engine), server)
    healthy = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    address = _open_port(server, listen, keys)
    if path is not None:
        stack.callback(path.unlink, missing_ok=True)  # once the server has stopped
    await server.start()
    stack.push_async_callback(server.stop, 0)
    await _start_task(_tell_health(engine, healthy), stack)
    return server, address


async def _tell_health(engine: EngineCore, healthy: Any) -> None:
    """Report SERVING while the loop makes passes, a worker takes work, and this process is not draining."""
    told: dict[str, bool] = {}
    while True:
        load = engine.load()
        serving = engine.alive and load.num_workers > 0 and not load.draining
        for service, well in ((LIVE, engine.alive), *((service, serving) for service in SERVICES)):
            if told.get(service) is not well:
                told[service] = well
                status = health_pb2.HealthCheckResponse.SERVING if well else health_pb2.HealthCheckResponse.NOT_SERVING
                await healthy.set(service, status)
        await asyncio.sleep(PULSE_S)


def _serve_metrics(
    config: EngineConfig, metrics: Metrics, engine: EngineCore, stack: AsyncExitStack
) -> dict[str, object]:
    """Serve metrics, if configured. Returns the page's address under "metrics", or nothing."""
    metrics.watch(lambda: engine.call(engine.stats).result(SCRAPE_S))
    if config.metrics_port < 0:
        return {}
    try:
        page, thread = start_http_server(config.metrics_port, addr=config.metrics_host, registry=metrics.registry)
    except OSError as error:
        raise OSError(f"metrics_host {config.metrics_host[:64]!a}, port {config.metrics_port}: {error}") from error
    stack.callback(thread.join, 1.0)
    stack.callback(page.server_close)
    stack.callback(page.shutdown)
    host = f"[{config.metrics_host}]" if ":" in config.metrics_host else config.metrics_host
    return {"metrics": f"http://{host}:{page.server_port}/metrics"}


def _workers_report(report: Report) -> Callable[[Load], None]:
    told = 0

    def tell(load: Load) -> None:
        nonlocal told
        if load.num_workers != told:
            told = load.num_workers
            report({"event": "workers", "ready": told})

    return tell


async def _start_task(coroutine: Coroutine[Any, Any, None], stack: AsyncExitStack) -> None:
    task = asyncio.create_task(coroutine)

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)


async def _drain(engine: EngineCore, timeout_s: float) -> None:
    """Drain: gateways with another engine core move their requests there; the others let them end here."""
    log.info("stopping: %d requests open", engine.num_open)
    with contextlib.suppress(Exception):  # a loop that has ended has nothing to drain
        async with asyncio.timeout(HAND_BACK_S):
            await asyncio.wrap_future(engine.drain("the engine core is draining"))
    until = time.monotonic() + timeout_s
    while engine.num_open and engine.alive and time.monotonic() < until:  # noqa: ASYNC110 - asked about another thread
        await asyncio.sleep(DRAIN_LOOK_S)


async def _hand_back(engine: EngineCore, board: LoadBoard) -> None:
    """Hand open requests back to their gateways, then end the sessions."""
    try:
        async with asyncio.timeout(HAND_BACK_S):
            await asyncio.wrap_future(engine.hand_back("the engine core is shutting down"))
    except Exception as error:  # noqa: BLE001 - the way down goes on whatever is broken
        log.error("could not hand requests back: %s", error)
    for mailbox in board.sessions:
        mailbox.close()
