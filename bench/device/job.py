"""What a section is given, and the two ways it makes a runner work: step by step, and through an engine core."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.device.hardware import Hardware

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.engine import EngineCore
from pagoda_engine_core.workers.executor import InprocExecutor
from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.errors import PagodaError
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import Delta, FinishReason, Generate, NextTokens, RequestRecord
from pagoda_proto.steps import PROTOCOL_VERSION, AppendBlocks, Chunk, Hello, NewRow, StepPlan
from pagoda_worker.step.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
# Larger steps than the defaults, which keep the answers of others coming while a long prompt is computed.
ENGINE = {"max_tokens_per_step": 8192, "chunk_size": 8192}


@dataclass(frozen=True)
class Job:
    """Attributes:
    copy: Bytes per second, read and written, of a copy; 0 where it could not be measured.
    flops: Of a large bfloat16 product, per second; likewise.
    until: When this section's time is over, by time.monotonic.
    """

    hardware: Hardware
    smoke: bool
    kernels: str
    block_size: int
    copy: float
    flops: float
    until: float

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def bar(self, value: float | None, *, holds: bool = True) -> float | None:
        """A figure to be reached, where it `holds`; a smoke test is measured against none."""
        return value if holds and not self.smoke else None

    def ceiling_s(self, num_bytes: float, flops: float = 0.0) -> float | None:
        """The least time in which so much can be moved and computed."""
        if not (self.copy and self.flops):
            return None
        return max(num_bytes / self.copy, flops / self.flops)


def prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Made-up token ids."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


class Steady:
    """Rows that decode together, two steps in flight, the way a worker's loop drives its runner.

    `launch_s` is the host's time in `launch` since the beginning. Rows have the `adapters` in turn.
    """

    WARM_UP = 3  # steps before those that count

    def __init__(
        self, runner: ModelRunner, prompts: Sequence[Sequence[int]], adapters: Sequence[Adapter | None] = (None,)
    ) -> None:
        self._runner = runner
        self._adapters = adapters
        self._block_size = runner.facts.block_size
        self._step = 0
        self._next_block = 0
        self._lengths: list[int] = []
        self._blocks: list[int] = []
        self._pending: deque[object] = deque()
        self.launch_s = 0.0
        runner.reset()
        for plan in self._prefill(prompts):
            self._launch(plan)
        self.settle()

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> Iterator[StepPlan]:
        """As many whole prompts in a step as may be."""
        most, new, used = self._runner.facts.max_tokens_per_step, list[NewRow](), 0
        for row_id, prompt in enumerate(prompts):
            if new and used + len(prompt) > most:
                yield self._first(new)
                new, used = [], 0
            count = -(-(len(prompt) + 1) // self._block_size)
            new.append(
                NewRow(
                    row_id=row_id,
                    token_ids=list(prompt),
                    num_prompt_tokens=len(prompt),
                    num_computed=0,
                    block_ids=self._take(count),
                    params=GREEDY,
                    seed=0,
                    adapter=self._adapters[row_id % len(self._adapters)],
                )
            )
            self._lengths.append(len(prompt))
            self._blocks.append(count)
            used += len(prompt)
        yield self._first(new)

    def _take(self, count: int) -> list[int]:
        first, self._next_block = self._next_block, self._next_block + count
        if self._next_block > self._runner.facts.num_blocks:
            raise RuntimeError(f"{self._next_block} blocks are needed, {self._runner.facts.num_blocks} are there")
        return list(range(first, self._next_block))

    def _first(self, new: list[NewRow]) -> StepPlan:
        self._step += 1
        return StepPlan(
            step=self._step, new_rows=new, chunks=[Chunk(row.row_id, 0, len(row.token_ids), True) for row in new]
        )

    def _decode(self) -> StepPlan:
        self._step += 1
        append = []
        for row_id, length in enumerate(self._lengths):
            if length // self._block_size == self._blocks[row_id]:
                append.append(AppendBlocks(row_id, self._take(1)))
                self._blocks[row_id] += 1
        chunks = [Chunk(row_id, length, 1, True) for row_id, length in enumerate(self._lengths)]
        self._lengths = [length + 1 for length in self._lengths]
        return StepPlan(step=self._step, append_blocks=append, chunks=chunks)

    def _launch(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        self._pending.append(self._runner.launch(plan))
        self.launch_s += time.perf_counter() - started
        if len(self._pending) == self._runner.depth:
            self._collect()

    def _collect(self) -> None:
        result = self._runner.collect(self._pending.popleft())  # type: ignore[arg-type]
        if result.errors:
            raise RuntimeError(f"a step failed: {result.errors[0].message}")

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._launch(self._decode())

    def settle(self) -> None:
        while self._pending:
            self._collect()

    def seconds_of(self, steps: int) -> float:
        """Of one step, host and device together, once the first few are over."""
        self.run(self.WARM_UP)
        self.settle()
        started = time.perf_counter()
        self.run(steps)
        self.settle()
        return (time.perf_counter() - started) / steps


class Collector:
    """The sink of a served job: the tokens of every request, by its id."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.num_ended = 0
        self.problem = ""

    def accepted(self, request_id: str, attempt: int, stream: int) -> None: ...

    def rejected(self, request_id: str, attempt: int, error: PagodaError, retry_after_s: float) -> None:
        self._end(error.message)

    def migrate(self, request_id: str, attempt: int, reason: str) -> None:
        self._end(reason)

    def next_tokens(self, tokens: NextTokens) -> None:
        self.deltas(tokens.deltas())

    def deltas(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.result.token_ids)
            if delta.ends_request:
                self._end("" if delta.finish_reason is FinishReason.LENGTH else f"{delta.finish_reason}: {delta}")

    def _end(self, problem: str) -> None:
        self.num_ended += 1
        self.problem = self.problem or problem


def hello_of(runner: ModelRunner) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        worker_id="bench",
        incarnation="0",
        registration=1,
        host_id="",
        pid=0,
        **asdict(runner.facts),
    )


def serve(
    runner: ModelRunner, prompts: Sequence[list[int]], output_len: int, steps: Mapping[str, int] = ENGINE
) -> tuple[list[list[int]], float]:
    """Greedy outputs of all prompts, given at once, by an engine core in this thread; and the seconds it took.

    `steps`: options of the engine core that say how large one may be.

    Raises:
        RuntimeError: a request did not end as it should.
    """
    runner.reset()
    no_limit = {"max_queued_requests": 2**31 - 1, "max_queued_tokens": 2**53, "queue_timeout_s": 1e9}
    config = EngineConfig(max_rows=runner.facts.max_rows, **steps, **no_limit)
    engine, collector = EngineCore(config, InprocExecutor(runner, hello_of(runner))), Collector()
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        task = Generate(params=params, seed=0)
        engine.submit(RequestRecord(request_id=str(index), prompt_token_ids=prompt, task=task), collector)
    while collector.num_ended < len(prompts):
        engine.step()
    took = time.perf_counter() - started
    engine.close()
    outputs = [collector.tokens.get(str(index), []) for index in range(len(prompts))]
    if collector.problem or any(len(output) != output_len for output in outputs):
        raise RuntimeError(collector.problem or "an output has the wrong length")
    return outputs, took
