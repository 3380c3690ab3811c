"""A gateway's life: load the text side, connect, listen, serve; then unready, lame duck, drain, leave.

Every wait on the way out is bounded. Signals, printing and exit codes belong to the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagoda_gateway.adapters import named_adapters
from pagoda_gateway.app import Served, create_app
from pagoda_gateway.background.runner import BackgroundResponses
from pagoda_gateway.batches.batches import Batches
from pagoda_gateway.batches.runner import BatchRunner
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.engine.session import EngineAddress
from pagoda_gateway.engine.waits import Waits
from pagoda_gateway.health import Health, HealthTimes, canary_of
from pagoda_gateway.http.listening import is_private, url_of
from pagoda_gateway.http.memory import return_large_blocks
from pagoda_gateway.http.protocol import ConnectionGuard
from pagoda_gateway.http.server import LEAVE_S, HttpServer, uvicorn_config
from pagoda_gateway.keys.gate import Gate
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_gateway.routes.batch_service import batch_runner
from pagoda_gateway.store.guard import OUTCOMES, GuardedStore
from pagoda_gateway.store.opening import open_store
from pagoda_gateway.text.model_text import ModelText
from pagoda_gateway.tickets.tickets import WAYS, Tickets
from pagoda_proto import times
from pagoda_proto.errors import PagodaError
from pagoda_proto.keys import TlsKeys

Report = Callable[[dict[str, object]], None]


SWITCH_INTERVAL_S = 0.001  # how long the event loop waits for the GIL of a text thread

logger = logging.getLogger(__name__)

_kept: dict[GatewayConfig, ModelText] = {}  # filled by the process that we were forked from


async def serve(
    config: GatewayConfig,
    listener: socket.socket,
    report: Report,
    stop: asyncio.Event,
    *,
    health_times: HealthTimes | None = None,
) -> None:
    """Run a gateway until `stop` is set and its requests are done or `drain_timeout_s` is over.

    It listens on `listener`, which must be bound, and closes it.

    Reports {"event": "listening", "url": .., "kind": what the model is for}, then "ready" and "unready" as
    /health/ready changes; and "locked" if clients must present API keys.

    Raises:
        ValueError: the engine address, its keys, the store's or the model's files cannot be used.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with contextlib.closing(listener):
        text = _kept.pop(config, None)
        if text is None:
            text = await asyncio.to_thread(load_text, config)
        adapters = await asyncio.to_thread(named_adapters, config)
        metrics = GatewayMetrics(config.model_names[0])
        parts = _Parts.of(config, text, metrics, health_times)
        parts.ctx.adapters.name_all(adapters)
        guard = ConnectionGuard(config, metrics.slow_client, parts.engine.clock.now)
        app = create_app(Served(parts.ctx, parts.health, metrics, parts.background, parts.batches, parts.tickets))
        server = HttpServer(uvicorn_config(app, config, guard))
        parts.start(lambda ready: report({"event": "ready" if ready else "unready"}))
        return_large_blocks()
        telling = [asyncio.create_task(parts.tell_who_may_ask(listener, report), name="who-may-ask")]
        if parts.keys is not None:
            telling.append(asyncio.create_task(parts.keys.tell_of_the_end(logger), name="certificate"))
        try:
            await _run(server, listener, config, report, stop, parts)
        finally:
            for task in telling:
                task.cancel()
            await asyncio.gather(*telling, return_exceptions=True)
            await parts.aclose()
            server.cut_connections()


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The parts that run beside HTTP; `aclose` closes each before the parts that it needs."""

    ctx: GatewayContext
    engine: SessionClient
    health: Health
    background: BackgroundResponses
    tickets: Tickets
    batches: Batches
    runner: BatchRunner
    callers_known: asyncio.Event
    keys: TlsKeys | None

    @classmethod
    def of(
        cls, config: GatewayConfig, text: ModelText, metrics: GatewayMetrics, health_times: HealthTimes | None
    ) -> _Parts:
        """Raises ValueError for an address or keys that cannot be used."""
        addresses, waits = EngineAddress.several(config.engine, config.keys_dir), Waits(resume_s=config.resume_wait_s)
        keys = next((address.keys for address in addresses if address.keys is not None), None)
        if keys is not None:
            metrics.certificate(keys.term.not_after)
        engine = SessionClient(addresses, metrics, waits, log_requests=config.log_requests)
        store = GuardedStore(open_store(config.store), metrics.watch_store(OUTCOMES, lambda: store.failing))
        names, now, known = config.model_names, int(time.time()), asyncio.Event()
        ctx = GatewayContext.new(config, text, engine, names=names, created=now, store=store)
        batches = Batches(store)
        return cls(
            ctx=ctx,
            engine=engine,
            health=Health(engine, metrics, health_times, canary_of(text.reading.output), known.is_set),
            background=BackgroundResponses(ctx),
            tickets=Tickets(ctx, metrics.watch_tickets(WAYS)),
            batches=batches,
            runner=batch_runner(ctx, batches, metrics.batch_line),
            callers_known=known,
            keys=keys,
        )

    def start(self, on_ready: Callable[[bool], None]) -> None:
        self.engine.start()
        self.background.start()
        self.runner.start()
        self.health.start(on_ready)
        self.ctx.ledger.start()
        self.ctx.transcripts.start()

    async def tell_who_may_ask(self, listener: socket.socket, report: Report) -> None:
        """The gateway is not ready before this is known."""
        await tell_who_may_ask(self.ctx, listener, report)
        self.callers_known.set()

    async def hand_over(self) -> None:
        """Stop work that runs without a client where it is: another gateway may continue it. Safe to call twice."""
        await asyncio.gather(self.tickets.leave(), self.background.aclose(), self.runner.aclose())

    async def aclose(self) -> None:
        await self.hand_over()
        await self.tickets.aclose()
        await self.health.aclose()
        await self.engine.aclose()
        self.ctx.pool.close()
        await self.ctx.ledger.aclose()
        await self.ctx.transcripts.aclose()
        await self.ctx.gate.aclose()
        await self.ctx.store.aclose()


async def tell_who_may_ask(ctx: GatewayContext, listener: socket.socket, report: Report) -> None:
    """Wait until it is known whether clients need keys, and report it; from then on an open gate needs no store."""
    await _learn_who_may_ask(ctx.gate)
    if not await ctx.gate.is_open():
        report({"event": "locked"})
    elif not is_private(listener):
        why = "there is no API key (`pagoda keys create NAME` makes one, --api-key names some)"
        logger.warning("listening on %s: whoever reaches it may use it, for %s", ctx.config.host, why)


async def _learn_who_may_ask(gate: Gate) -> None:
    told = False
    while not gate.knows:
        try:
            await gate.learn()
        except PagodaError as error:
            if not told:
                logger.warning("no request is served until the store answers: API keys cannot be looked up")
            told = True
            await asyncio.sleep(error.retry_after_s or times.STORE_REST_S)


def load_text(config: GatewayConfig) -> ModelText:
    """Raises ValueError naming the file that cannot be used."""
    template = ""
    if config.chat_template:
        try:
            template = Path(config.chat_template).read_text("utf-8")
        except OSError as error:
            raise ValueError(f"chat_template: {error}") from error
    parsers = {"tool_parser": config.tool_call_parser, "reasoning_parser": config.reasoning_parser}
    return ModelText.load(config.model, template, task=config.task, **parsers)


def keep_text(config: GatewayConfig) -> None:
    """Load the text side for `serve` in forks of this process. Raises as `load_text`."""
    _kept[config] = load_text(config)


async def _run(
    server: HttpServer,
    listener: socket.socket,
    config: GatewayConfig,
    report: Report,
    stop: asyncio.Event,
    parts: _Parts,
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
    waiting = [asyncio.create_task(event.wait()) for event in (server.listening, stop)]
    listening, stopping = waiting
    try:
        await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            kind = next(iter(parts.ctx.catalogue)).text.reading.kind
            report({"event": "listening", "url": url_of(listener), "kind": kind})
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            handing_over = asyncio.create_task(parts.hand_over())
            await _leave(server, serving, config, parts)
            await asyncio.wait({handing_over}, timeout=LEAVE_S)
        await serving
    finally:
        for task in (*waiting, serving):
            task.cancel()
        await asyncio.gather(*waiting, serving, return_exceptions=True)


async def _leave(server: HttpServer, serving: asyncio.Task[None], config: GatewayConfig, parts: _Parts) -> None:
    """Become unready, keep accepting for the lame-duck time, then drain open requests and end those that are left."""
    engine = parts.engine
    logger.info("stopping: %d requests open", engine.num_open)
    parts.health.drain()
    await asyncio.sleep(config.lame_duck_s)
    server.should_exit = True
    done, _ = await asyncio.wait({serving}, timeout=config.drain_timeout_s)
    if done:
        return
    logger.warning("drain time is over: ending %d requests", engine.num_open)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(times.HAND_BACK_S):
            await parts.tickets.hand_over_all()
    engine.end_all("the gateway is shutting down")
    done, _ = await asyncio.wait({serving}, timeout=LEAVE_S)
    if not done:
        server.cut_connections()
        server.force_exit = True
