"""An engine client that plays a script, of batches of deltas or of errors, and records what it was asked."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from httpx import ASGITransport, AsyncClient
from starlette.types import Receive, Scope, Send
from tests.fakes import make_delta
from tests.gateway.model_dir import MAX_MODEL_LEN, write_model_dir

from pagoda_gateway.api.error_body import set_shape
from pagoda_gateway.api.schemas import ChatRequest
from pagoda_gateway.app import Served, api_of, routers_of
from pagoda_gateway.background.runner import BackgroundResponses
from pagoda_gateway.batches.batches import Batches
from pagoda_gateway.clients import NOBODY, Caller
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects.chat import chat_job
from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.engine.recent import RecentRequests
from pagoda_gateway.engine.refusals import Refusals
from pagoda_gateway.engine.report import EngineReport
from pagoda_gateway.engine.session import EngineAddress
from pagoda_gateway.health import Health
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_gateway.routes import generating
from pagoda_gateway.store.interface import Store
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore
from pagoda_gateway.text.model_text import ModelText
from pagoda_gateway.tickets.tickets import Tickets
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Begun, Delta, FinishReason, Load, Pooled, RequestRecord, Usage
from pagoda_proto.steps import TopLogprobs

Batch = list[Delta] | Exception | asyncio.Event
Script = Callable[[RequestRecord], Sequence[Batch]]
MODEL = "tiny"
NUM_CACHED = 2


class FakeGeneration:
    """Gives one batch of the script per `next`, and waits for an Event in it. Aborted choices end at once."""

    def __init__(self, record: RequestRecord, script: Sequence[Batch]) -> None:
        self.record = record
        self.aborted: list[int] = []
        self.closed = asyncio.Event()
        self.waiting = asyncio.Event()  # the reader has reached an Event of the script
        self._script = list(script)
        self._ended = False

    async def next(self) -> list[Delta]:
        while self._script and not self._ended:
            item = self._script.pop(0)
            if isinstance(item, asyncio.Event):
                self.waiting.set()
                await item.wait()
            elif isinstance(item, Exception):
                raise item
            else:
                batch = [delta for delta in item if delta.choice not in self.aborted]
                if len(set(self.aborted)) == self.record.task.params.n:
                    batch = [self._ending()]
                self._ended = any(delta.ends_request for delta in batch)
                if batch:
                    return batch
        return []

    def _ending(self) -> Delta:
        usage = Usage(prompt_tokens=len(self.record.prompt_token_ids), cached_prompt_tokens=NUM_CACHED)
        request_id, reason = self.record.request_id, FinishReason.ABORT
        return make_delta(request_id=request_id, finish_reason=reason, usage=usage)

    async def abort(self, choices: Sequence[int] = ()) -> None:
        self.aborted += choices or range(self.record.task.params.n)

    async def aclose(self) -> None:
        self.closed.set()


class FakeEngine:
    """`script` makes the batches for a record, or raises to refuse it."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.generations: list[FakeGeneration] = []
        self.submitted = asyncio.Event()
        self.recent = RecentRequests()
        self.refusals = Refusals(lambda code: None)
        self.num_counted = 0
        self.priors: list[list[Delta]] = []
        self.load = Load(engine_id="fake", num_workers=1, max_model_len=MAX_MODEL_LEN, model_fingerprint="fp-tiny")

    async def submit(
        self, record: RequestRecord, *, counted: bool = True, prior: Sequence[Delta] = ()
    ) -> FakeGeneration:
        generation = FakeGeneration(record, _behind(prior, self.script(record)))
        self.priors.append(list(prior))
        self.num_counted += counted
        self.generations.append(generation)
        self.submitted.set()
        return generation

    async def report(self) -> EngineReport | None:
        return None

    @property
    def record(self) -> RequestRecord:
        """The record of the only request."""
        (generation,) = self.generations
        return generation.record


def _behind(prior: Sequence[Delta], script: Sequence[Batch]) -> Sequence[Batch]:
    """The rest of a script of one choice, after `prior`."""
    num_known = sum(len(delta.tokens.token_ids) for delta in prior)
    if not num_known:
        return script
    begins = [item[0].tokens.first_index if isinstance(item, list) else -1 for item in script]
    return script[begins.index(num_known) :]


def logprobs_for(record: RequestRecord, token_ids: Sequence[int], top: int | None) -> list[TopLogprobs] | None:
    """Token t has logprob -t/1000 and rank 1; its runners-up are t+1, t+2, .. (without wrap-around)."""
    if top is None:
        return None
    return [
        TopLogprobs(-token / 1000, 1, [token + i for i in range(top)], [-(token + i) / 1000 for i in range(top)])
        for token in token_ids
    ]


def play(
    *choices: Sequence[int],
    batch: int = 1,
    reason: FinishReason = FinishReason.LENGTH,
    stop_token_id: int | None = None,
) -> Script:
    """Every prompt's choices get these tokens, `batch` at a time, in parallel; then each ends with `reason`."""

    def script(record: RequestRecord) -> list[Batch]:
        batches: list[Batch] = []
        n, params = record.task.params.n, record.task.params
        streams = [list(choices[i % len(choices)]) for i in range(n)]
        longest = max(map(len, streams))
        for start in range(0, max(1, longest), batch):
            deltas = []
            for i, tokens in enumerate(streams):
                part = tokens[start : start + batch]
                last = start < max(1, len(tokens)) <= start + batch
                if part or last:
                    deltas.append(
                        make_delta(
                            start,
                            part,
                            request_id=record.request_id,
                            choice=i,
                            logprobs=logprobs_for(record, part, params.logprobs),
                            finish_reason=reason if last else None,
                            stop_token_id=stop_token_id if last else None,
                        )
                    )
            batches.append(deltas)
        first, final = batches[0], batches[-1]
        assert isinstance(first, list)
        assert isinstance(final, list)
        prompt = record.prompt_token_ids
        first[0].tokens.begun = Begun(model_fingerprint="fp-tiny", numerics_id="any", cached_prompt_tokens=NUM_CACHED)
        first[0].tokens.prompt_logprobs = logprobs_for(record, prompt[1:], params.prompt_logprobs)
        final[-1].usage = Usage(
            prompt_tokens=len(prompt), cached_prompt_tokens=NUM_CACHED, output_tokens=sum(map(len, streams))
        )
        return batches

    return script


def held_up(gateway: Gateway, num_batches: int = 3) -> asyncio.Event:
    """Make the gateway's script stop after this many batches until the returned event is set."""
    go, whole = asyncio.Event(), gateway.engine.script

    def script(record: RequestRecord) -> list[Batch]:
        batches = list(whole(record))
        return [*batches[:num_batches], go, *batches[num_batches:]]

    gateway.engine.script = script
    return go


def failing(code: ErrorCode = ErrorCode.OVERLOADED, retry_after_s: float = 0.0) -> Script:
    """Refuse every record."""

    def script(record: RequestRecord) -> list[Batch]:
        raise PagodaError(code, "no", retry_after_s=retry_after_s)

    return script


def reads(*vectors: Sequence[float], fail_at: int | None = None, hold: asyncio.Event | None = None) -> Script:
    """The i-th record gets the i-th vector, cyclically; the one at `fail_at` fails, and all wait for `hold`."""
    counter = itertools.count()

    def script(record: RequestRecord) -> list[Batch]:
        index, usage = next(counter), Usage(prompt_tokens=len(record.prompt_token_ids), cached_prompt_tokens=NUM_CACHED)
        data = array("f", vectors[index % len(vectors)]).tobytes()
        delta = Delta(request_id=record.request_id, choice=0, result=Pooled(data=data), finish_reason=FinishReason.STOP)
        if index == fail_at:
            delta.result, delta.finish_reason = Pooled(), FinishReason.ERROR
            delta.error_code, delta.error_message = ErrorCode.NUMERICAL_ERROR, "no number"
        delta.usage = usage
        return [[delta]] if hold is None else [hold, [delta]]

    return script


def breaking(*token_ids: int, code: ErrorCode = ErrorCode.STREAM_INTERRUPTED) -> Script:
    """Some tokens, then the request fails."""

    def script(record: RequestRecord) -> list[Batch]:
        request_id = record.request_id
        error = make_delta(
            len(token_ids),
            request_id=request_id,
            finish_reason=FinishReason.ERROR,
            error_code=code,
            error_message="worker lost",
            usage=Usage(prompt_tokens=1),
        )
        tokens = [make_delta(i, [t], request_id=request_id) for i, t in enumerate(token_ids)]
        return [*[[delta] for delta in tokens], [error]]

    return script


SCRATCH: list[SqliteStore] = []


def scratch() -> SqliteStore:
    """A store in memory that is closed when the test is over; see conftest."""
    SCRATCH.append(SqliteStore(MEMORY))
    return SCRATCH[-1]


def text_of(model_dir: Path) -> ModelText:
    """A separate object for each caller, since tests set its fields. What is read from equal files is made only once:
    compiling a template takes longer than most requests."""
    files = sorted(path for path in model_dir.iterdir() if path.is_file())
    return copy.copy(_text_of(model_dir.name, tuple((path.name, path.read_bytes()) for path in files)))


@functools.cache
def _text_of(name: str, files: tuple[tuple[str, bytes], ...]) -> ModelText:
    with TemporaryDirectory() as root:
        model_dir = Path(root) / name
        model_dir.mkdir()
        for file, content in files:
            (model_dir / file).write_bytes(content)
        return ModelText.load(model_dir)


class Gateway:
    """The app's routes with a fake engine and without the middleware around them, and a client."""

    def __init__(self, model_dir: Path, script: Script, kept_in: Store | None = None, **config: object) -> None:
        self.text = text_of(model_dir)
        self.engine = FakeEngine(script)
        self.context = GatewayContext.new(
            GatewayConfig(**config),  # type: ignore[arg-type]
            self.text,
            self.engine,
            names=[MODEL],
            created=1_700_000_000,
            store=scratch() if kept_in is None else kept_in,
        )
        self.metrics = GatewayMetrics(MODEL)
        self.health = Health(SessionClient([EngineAddress("unix:none")], self.metrics), self.metrics)
        self.background, self.tickets = BackgroundResponses(self.context), Tickets(self.context)
        self.batches = Batches(self.context.store)
        self.app = api_of(routers_of(self.served()))
        self.error_shapes = dict(generating.ERROR_SHAPES)
        transport = ASGITransport(self.asgi, raise_app_exceptions=False)
        self.client = AsyncClient(transport=transport, base_url="http://gateway")

    def served(self) -> Served:
        return Served(self.context, self.health, self.metrics, self.background, self.batches, self.tickets)

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        set_shape(scope, self.error_shapes)
        await self.app(scope, receive, send)

    def ids(self, text: str) -> list[int]:
        return self.text.encode(text, add_special_tokens=False)


def make_gateway(root: Path, script: Script | None = None, kept_in: Store | None = None, **config: object) -> Gateway:
    return Gateway(write_model_dir(root / "model"), script or play([]), kept_in, **config)


def saying(
    root: Path, *texts: str, batch: int = 1, reason: FinishReason = FinishReason.LENGTH, **config: object
) -> Gateway:
    """A gateway whose engine answers every prompt with these texts; see `play`."""
    gateway = make_gateway(root, **config)
    gateway.engine.script = play(*(gateway.ids(text) for text in texts), batch=batch, reason=reason)
    return gateway


saying_all = functools.partial(saying, reason=FinishReason.STOP)
"""The same, where the model itself stops after the text."""


async def call_app(
    gateway: Gateway, path: str, body: dict[str, Any], send: Send, left: asyncio.Event | None = None
) -> None:
    """Call the app as a server does, with a client that leaves when `left` is set."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "state": {}}
    scope |= {"http_version": "1.1", "scheme": "http", "raw_path": path.encode(), "root_path": "", "asgi": {}}
    async with asyncio.timeout(60):
        await gateway.asgi(scope, receive, send)


async def chat_record(ctx: GatewayContext, body: ChatRequest, caller: Caller = NOBODY) -> RequestRecord:
    """The only record of the body's job."""
    (record,) = (await chat_job(ctx, body, caller)).records
    return record
