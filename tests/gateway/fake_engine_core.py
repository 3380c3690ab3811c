"""An engine core without workers: a real gRPC server whose tokens are a hash of the tokens before them.

Output token i of a choice depends only on (prompt, seed, choice, tokens before i), as in the real one, so a resumed
request must continue identically. Tests control it: `steps` limits progress, `script` misbehaves, `kill` breaks
streams.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc

from pagoda_proto.convert import delta_to_pb, load_to_pb, record_from_pb, resume_from_pb
from pagoda_proto.engine.frames import parted
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import SESSION_PROTOCOL, Begun, Delta, FinishReason, Load, RequestRecord, Tokens, Usage
from pagoda_proto.steps import TopLogprobs

VOCAB = 512


def next_token(record: RequestRecord, choice: int, tokens: list[int]) -> int:
    text = f"{record.prompt_token_ids}|{record.task.seed}|{choice}|{tokens}"
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0]


def expected_tokens(record: RequestRecord, choice: int = 0) -> list[int]:
    tokens: list[int] = []
    for _ in range(record.task.params.max_tokens or 16):
        tokens.append(next_token(record, choice, tokens))
    return tokens


async def until(condition: Callable[[], bool]) -> None:
    """Poll for a state that no event announces."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Run:
    """One attempt of one request on one session. `begun` is from the resume, or else this engine core's own."""

    def __init__(self, record: RequestRecord, submit: pb.Submit, begun: Begun) -> None:
        self.record = record
        resume = resume_from_pb(submit.resume)
        self.begun = resume.begun or begun
        self.attempt = submit.attempt
        self.tokens: list[list[int]] = [[] for _ in range(record.task.params.n)]
        self.finished = [False] * record.task.params.n
        for prior in resume.prior_outputs:
            self.tokens[prior.choice] = prior.token_ids
            self.finished[prior.choice] = prior.finished

    @property
    def ended(self) -> bool:
        return all(self.finished)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.record.prompt_token_ids),
            cached_prompt_tokens=self.begun.cached_prompt_tokens,
            output_tokens=sum(map(len, self.tokens)),
            replays=self.attempt,
        )

    def delta(self, choice: int, tokens: list[int], first_index: int, finish: FinishReason | None) -> Delta:
        params = self.record.task.params
        self.finished[choice] |= finish is not None
        first = first_index == 0
        entries = [TopLogprobs(-float(t), 1, [t], [-float(t)]) for t in tokens]
        prompt = [TopLogprobs(-float(t), 1, [], []) for t in self.record.prompt_token_ids[1:]]
        return Delta(
            request_id=self.record.request_id,
            attempt=self.attempt,
            choice=choice,
            result=Tokens(
                first_index=first_index,
                token_ids=list(tokens),
                logprobs=entries if params.logprobs is not None else None,
                prompt_logprobs=prompt if params.prompt_logprobs is not None and first else None,
                begun=self.begun if first and tokens else None,
            ),
            finish_reason=finish,
            usage=self.usage() if self.ended else None,
        )

    def step(self, choice: int) -> Delta:
        tokens = self.tokens[choice]
        tokens.append(next_token(self.record, choice, tokens))
        length = len(tokens) >= (self.record.task.params.max_tokens or 16)
        return self.delta(choice, tokens[-1:], len(tokens) - 1, FinishReason.LENGTH if length else None)


class Running(NamedTuple):
    """A request belongs to the session of its highest attempt: only that session can end it."""

    run: Run
    task: asyncio.Task[None]
    outbox: asyncio.Queue[Any]


Script = Callable[[Run, Delta], list[Any]]  # what to send instead of a delta: deltas, ServerFrames, exceptions


class FakeEngineCore(EngineServicer):
    """`steps` is None to run freely, or a semaphore that every step of every request acquires."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.boots = 0
        self.num_messages = 0  # received
        self.load = Load(
            engine_id="none",
            num_workers=1,
            vocab_size=VOCAB,
            max_model_len=4096,
            model_fingerprint="m1",
            numerics_id="n1",
            protocol=SESSION_PROTOCOL,
        )
        self.cached_prompt_tokens = 0  # what new requests find in the prefix cache
        self.metadata: list[dict[str, str]] = []  # one per session
        self.steps: asyncio.Semaphore | None = None
        self.script: Script | None = None
        self.on_submit: Callable[[pb.Submit], pb.ServerFrame | None] | None = None
        self.submits: list[pb.Submit] = []
        self.aborts: list[pb.Abort] = []
        self.aborted = asyncio.Event()
        self.running: dict[str, Running] = {}
        self.pulse_s = 1.0  # longest time between two load reports
        self.silent = False  # like a suspended process: connected, but sends nothing
        self.num_sent = 0
        self.sent = asyncio.Condition()
        self._outboxes: list[asyncio.Queue[pb.ServerFrame | Exception]] = []
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self.boots += 1
        self.set_load(engine_id=f"{self.address}, life {self.boots}")
        options = [("grpc.http2.max_ping_strikes", 0), ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(options=options)
        add_EngineServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def kill(self) -> None:
        """As kill -9: streams break, state is lost, nothing listens."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace=0)
        for outbox in self._outboxes:
            self._forget(outbox)

    def _forget(self, outbox: asyncio.Queue[Any]) -> None:
        """Drop the requests of a session that has ended."""
        for request_id, running in list(self.running.items()):
            if running.outbox is outbox:
                running.task.cancel()
                del self.running[request_id]

    def set_load(self, **fields: Any) -> None:
        self.load = Load(**{name: fields.get(name, getattr(self.load, name)) for name in Load.__struct_fields__})
        for outbox in self._outboxes:
            outbox.put_nowait(pb.ServerFrame(load=load_to_pb(self.load)))

    def break_streams(self) -> None:
        """End sessions with an error; the process survives."""
        for outbox in self._outboxes:
            outbox.put_nowait(ConnectionError("told to"))

    def migrate_all(self) -> None:
        for request_id, (run, task, outbox) in list(self.running.items()):
            task.cancel()
            del self.running[request_id]
            outbox.put_nowait(pb.ServerFrame(migrate=pb.Migrate(request_id=request_id, attempt=run.attempt)))

    async def wait_sent(self, count: int) -> None:
        """Wait until this many deltas were sent, over all requests and restarts."""
        async with self.sent:
            await self.sent.wait_for(lambda: self.num_sent >= count)

    async def Session(self, requests: AsyncIterator[pb.ClientFrame], context: Any) -> AsyncIterator[pb.ServerFrame]:
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        outbox: asyncio.Queue[pb.ServerFrame | Exception] = asyncio.Queue()
        outbox.put_nowait(pb.ServerFrame(load=load_to_pb(self.load)))
        self._outboxes.append(outbox)
        reader = asyncio.create_task(self._read(requests, outbox))
        try:
            while True:
                frame = await self._next_frame(outbox)
                if isinstance(frame, Exception):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, str(frame))
                elif not self.silent:
                    yield frame
        finally:
            reader.cancel()
            self._outboxes.remove(outbox)
            self._forget(outbox)

    async def _next_frame(self, outbox: asyncio.Queue[pb.ServerFrame | Exception]) -> pb.ServerFrame | Exception:
        try:
            async with asyncio.timeout(self.pulse_s):
                return await outbox.get()
        except TimeoutError:
            return pb.ServerFrame(load=load_to_pb(self.load))

    async def _read(self, requests: AsyncIterator[pb.ClientFrame], outbox: asyncio.Queue[Any]) -> None:
        async for message in requests:
            self.num_messages += 1
            for frame in parted(message):
                if frame.HasField("submit"):
                    self._on_submit(frame.submit, outbox)
                else:
                    self._on_abort(frame.abort, outbox)

    def _on_submit(self, submit: pb.Submit, outbox: asyncio.Queue[Any]) -> None:
        self.submits.append(submit)
        answer = self.on_submit(submit) if self.on_submit is not None else None
        if answer is not None:
            outbox.put_nowait(answer)
            return
        record = record_from_pb(submit.record)
        if (old := self.running.get(record.request_id)) is not None:
            if old.run.attempt >= submit.attempt:
                outbox.put_nowait(_already_here(submit))
                return
            old.task.cancel()
        outbox.put_nowait(pb.ServerFrame(accepted=pb.Accepted(request_id=record.request_id, attempt=submit.attempt)))
        begun = Begun(
            model_fingerprint=self.load.model_fingerprint,
            numerics_id=self.load.numerics_id,
            cached_prompt_tokens=self.cached_prompt_tokens,
        )
        run = Run(record, submit, begun)
        self.running[record.request_id] = Running(run, asyncio.create_task(self._run(run, outbox)), outbox)

    def _on_abort(self, abort: pb.Abort, outbox: asyncio.Queue[Any]) -> None:
        self.aborts.append(abort)
        self.aborted.set()
        entry = self.running.get(abort.request_id)
        if entry is None or entry.outbox is not outbox:
            return
        run = entry.run
        deltas = [
            run.delta(i, [], len(run.tokens[i]), FinishReason.ABORT)
            for i in (abort.choices or range(run.record.task.params.n))
            if not run.finished[i]
        ]
        outbox.put_nowait(pb.ServerFrame(outputs=pb.StepOutputs(deltas=[delta_to_pb(delta) for delta in deltas])))
        if run.ended:
            entry.task.cancel()
            del self.running[abort.request_id]

    async def _run(self, run: Run, outbox: asyncio.Queue[Any]) -> None:
        while not run.ended:
            if self.steps is not None:
                await self.steps.acquire()
            for choice in range(run.record.task.params.n):
                if not run.finished[choice]:
                    await self._send(run, run.step(choice), outbox)
            await asyncio.sleep(0)
        self.running.pop(run.record.request_id, None)

    async def _send(self, run: Run, delta: Delta, outbox: asyncio.Queue[Any]) -> None:
        items = [delta] if self.script is None else self.script(run, delta)
        for item in items:
            if isinstance(item, Delta):
                item = pb.ServerFrame(outputs=pb.StepOutputs(deltas=[delta_to_pb(item)]))
            outbox.put_nowait(item)
        async with self.sent:
            self.num_sent += 1
            self.sent.notify_all()


def _already_here(submit: pb.Submit) -> pb.ServerFrame:
    rejected = pb.Rejected(request_id=submit.record.request_id, attempt=submit.attempt, code=ErrorCode.INVALID_ARGUMENT)
    return pb.ServerFrame(rejected=rejected)


@asynccontextmanager
async def running_engine(address: str) -> AsyncIterator[FakeEngineCore]:
    engine = FakeEngineCore(address)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.kill()
