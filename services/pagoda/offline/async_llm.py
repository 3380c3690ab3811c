"""Generation inside an asyncio program: the engine core runs in a thread, requests are async generators.

The thread only posts deltas to the event loop that made the request; only that loop touches the request. Any number of
event loops may use one model, concurrently or one after another.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

from pagoda.offline.local import Local, LoRARequest, Prompt
from pagoda.offline.outputs import OfflineRequest, RequestOutput
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import Delta, NextTokens

log = logging.getLogger(__name__)


class AsyncLLM:
    """A model for use inside event loops; options as for `LLM`.

    Raises:
        TypeError: an unknown option.
        ConfigError: options or model files that cannot be used.
    """

    def __init__(self, model: str | Local = "", **options: Any) -> None:
        self._local = Local.load(model, options)
        self._stop = threading.Event()
        self._sinks: dict[asyncio.AbstractEventLoop, _LoopSink] = {}
        self._sinks_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        lora_request: LoRARequest | str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the growing output: each item holds everything so far, the last is `finished`. Steps that arrive faster
        than the caller reads are merged. Leaving the iteration early aborts the request.

        Raises:
            PagodaError: prompt or parameters are not valid, the request failed, or this model was closed.
        """
        if self._stop.is_set() or not self._thread.is_alive():
            raise PagodaError(ErrorCode.UNAVAILABLE, "this AsyncLLM is closed, or its engine loop has failed")
        adapter = self._local.adapter(lora_request)
        request = self._local.open(prompt, sampling_params or self._local.default_params(), request_id, adapter)
        name = request.record.request_id
        sink = self._sink_of_this_loop()
        news = sink.add(request)
        self._local.engine.submit(request.record, sink)
        try:
            while not request.ended:
                await news.wait()
                news.clear()
                if request.error is not None:
                    raise request.error
                yield _snapshot(request.output)
        finally:
            sink.remove(name)
            if not request.output.finished:
                self._local.engine.abort(name, sink=sink)

    def abort(self, request_id: str) -> None:
        """End a request; its generator yields a last output whose choices have finish_reason "abort"."""
        self._local.engine.abort(request_id)

    def default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's author recommends (generation_config.json)."""
        return self._local.default_params()

    async def close(self) -> None:
        """End running requests and release the model."""
        self._stop.set()
        self._local.engine.call(lambda: None)
        await asyncio.to_thread(self._thread.join, times.OFFLINE_STOPS_S)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _sink_of_this_loop(self) -> _LoopSink:
        loop = asyncio.get_running_loop()
        with self._sinks_lock:
            self._sinks = {one: sink for one, sink in self._sinks.items() if not one.is_closed()}
            return self._sinks.setdefault(loop, _LoopSink(loop, self._local))

    def _run(self) -> None:
        try:
            self._local.engine.run(self._stop)
        except Exception:
            log.exception("the engine loop has failed")
            with self._sinks_lock:
                sinks = list(self._sinks.values())
            for sink in sinks:
                sink.fail_all(PagodaError(ErrorCode.INTERNAL, "the engine loop has failed"))


class _LoopSink:
    """Passes the engine thread's answers to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, local: Local) -> None:
        self._loop = loop
        self._engine = local.engine
        self._open: dict[str, tuple[OfflineRequest, asyncio.Event]] = {}

    def add(self, request: OfflineRequest) -> asyncio.Event:
        """Raises PagodaError if a request of this name is open."""
        name = request.record.request_id
        if name in self._open:
            raise PagodaError(ErrorCode.INVALID_ARGUMENT, f"request {name!r} is already running", "request_id")
        news = asyncio.Event()
        self._open[name] = request, news
        return news

    def remove(self, name: str) -> None:
        self._open.pop(name, None)

    # Called in the engine's thread.

    def accepted(self, request_id: str, attempt: int, stream: int) -> None: ...

    def rejected(self, request_id: str, attempt: int, error: PagodaError, retry_after_s: float) -> None:
        self._post(partial(self._fail, request_id, error))

    def migrate(self, request_id: str, attempt: int, reason: str) -> None:
        self._post(partial(self._fail, request_id, PagodaError(ErrorCode.UNAVAILABLE, reason)))

    def next_tokens(self, tokens: NextTokens) -> None:
        self.deltas(tokens.deltas())

    def deltas(self, deltas: list[Delta]) -> None:
        self._post(partial(self._take, deltas))

    def fail_all(self, error: PagodaError) -> None:
        for name in list(self._open):
            self._post(partial(self._fail, name, error))

    def _post(self, call: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed, so nobody waits any more
            while self._open:
                self._engine.abort(self._open.popitem()[0], sink=self)

    # Run in the event loop.

    def _take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.request_id in self._open:
                request, news = self._open[delta.request_id]
                stopped = request.take(delta)
                if stopped is not None:
                    self._engine.abort(delta.request_id, (stopped,))
                news.set()

    def _fail(self, request_id: str, error: PagodaError) -> None:
        if request_id in self._open:
            request, news = self._open[request_id]
            request.error = error
            news.set()


def _snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that later tokens do not change."""
    choices = [
        replace(choice, token_ids=list(choice.token_ids), logprobs=copy.copy(choice.logprobs))
        for choice in output.outputs
    ]
    return replace(output, outputs=choices)
