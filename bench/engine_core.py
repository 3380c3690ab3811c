"""Processor time of a scheduler pass, and of a token's way from the scheduler to the gateway.

    python bench/engine_core.py [--repeat 5] [--json FILE]

    pass      256 rows that only decode: `Scheduler.schedule` and `Scheduler.apply`, per step
    wire      the same rows between engine core and worker: bytes, and encoding and decoding, per row and step
    groups    `--workers` of 256 rows on one engine core: how long one that has answered waits for its next plan
    tokens    one token of 256 streams from the scheduler to the gateway's detokenizer, per token and process

All times are processor time of one thread, so other work on the machine matters little; for each figure, the smallest
of all repetitions is printed. `groups` runs in simulated time: a worker's step takes `--step-ms`, and the engine core's
thread takes its actual processor time, as if it had a core to itself.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from pagoda.processes.garbage import keep_out_of_collections
from pagoda.settings.numbers import number, whole
from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.dispatch.policy import POLICIES
from pagoda_engine_core.engine import EngineCore
from pagoda_engine_core.scheduling.decoding import News
from pagoda_engine_core.scheduling.request import Request
from pagoda_engine_core.scheduling.scheduler import Scheduler
from pagoda_engine_core.sessions.outbox import Outbox
from pagoda_engine_core.workers.executor import ExecutorEvent, StepDone, ToExecutor, WorkerInfo, WorkerJoined
from pagoda_gateway.engine.cores import Core
from pagoda_gateway.engine.model_view import ModelView
from pagoda_gateway.engine.request_meter import RequestMeter
from pagoda_gateway.engine.request_pool import RequestPool
from pagoda_gateway.engine.waits import Waits
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.channel import Envelope, decode_from_worker, decode_to_worker, encode
from pagoda_proto.decodes import DecodeList, packed
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import PagodaError
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import Delta, Generate, Load, NextTokens, RequestRecord
from pagoda_proto.steps import PROTOCOL_VERSION, Hello, KVGroup, RowOutput, StepPlan, StepResult
from pagoda_proto.times import LivedClock

ROWS, BLOCK_SIZE = 256, 16
WARM_UP_STEPS = 40
STEPS = 200
GROUP_STEPS = 100
TOKEN = 20_007
MAX_TOKENS = 900

Figures = dict[str, float]


def make_record(index: int) -> RequestRecord:
    """Prompts differ in length, so that blocks fill up in different steps."""
    prompt = [index % 251, *range(1, 2 + index % BLOCK_SIZE)]
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0)
    return RequestRecord(request_id=f"{index:032x}", prompt_token_ids=prompt, task=Generate(params=params, seed=index))


def make_hello(name: str) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION, worker_id=name, incarnation=name, registration=1, model_fingerprint="m",
        numerics_id="n", vocab_size=32_000, max_model_len=200_000, block_size=BLOCK_SIZE,
        kv_groups=(KVGroup(ROWS * 64),), device="cpu", host_id="h", pid=1, max_rows=ROWS,
    )  # fmt: skip


def config(most: int = ROWS) -> EngineConfig:
    return EngineConfig(max_rows=ROWS, speculation_tokens=0, max_queued_requests=most, worker_endpoint="ipc:///none")


class Worker:
    """Answers plans as a worker would, without computing anything."""

    def __init__(self) -> None:
        self._decodes = DecodeList()

    def answer(self, plan: StepPlan) -> StepResult:
        chunks = self._decodes.chunks(plan)
        outputs = [RowOutput(chunk.row_id, [TOKEN]) for chunk in chunks if chunk.sample]
        tokens, outputs = packed([chunk.row_id for chunk in chunks[: plan.decodes.count]], outputs)
        return StepResult(step=plan.step, tokens=tokens, outputs=outputs, elapsed_s=0.01, forward_s=0.01)


def timed(call: Callable[[], object], times: list[float]) -> object:
    began = time.thread_time()
    answer = call()
    times.append(time.thread_time() - began)
    return answer


def summary(times: Sequence[float], per: int = 1, unit: float = 1e3) -> Figures:
    values = [value * unit / per for value in times]
    return {"min": min(values), "median": statistics.median(values), "mean": statistics.fmean(values)}


# --- pass and wire ---------------------------------------------------------------------------------------------------


class Decoding:
    """A scheduler with all rows decoding, two steps in flight."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(config(), make_hello("w"), POLICIES["fcfs"], itertools.count(1))
        self.worker = Worker()
        self.plans: deque[StepPlan] = deque()
        for index in range(ROWS):
            self.scheduler.add(Request(make_record(index), max_output_tokens=MAX_TOKENS, now=0.0), 0.0)
        self.plan()
        for _ in range(WARM_UP_STEPS):
            self.plan()
            self.apply(self.worker.answer(self.plans.popleft()))

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule(0.0)
        if plan is None:
            raise RuntimeError("nothing to plan")
        self.plans.append(plan)
        return plan

    def apply(self, result: StepResult) -> News:
        news = News()
        self.scheduler.apply(result, 0.0, news)
        return news


def measure_pass() -> dict[str, Figures]:
    decoding = Decoding()
    planned: list[float] = []
    applied: list[float] = []
    for _ in range(STEPS):
        timed(decoding.plan, planned)
        result = decoding.worker.answer(decoding.plans.popleft())
        timed(lambda result=result: decoding.apply(result), applied)
    both = [one + other for one, other in zip(planned, applied, strict=True)]
    return {"schedule, ms": summary(planned), "apply, ms": summary(applied), "both, ms": summary(both)}


def measure_wire() -> dict[str, Figures]:
    decoding = Decoding()
    envelope = Envelope("0" * 32, "worker", 1, 1)
    sizes: dict[str, list[float]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(STEPS):
        plan = decoding.plan()
        parts = timed(lambda plan=plan: encode(envelope, plan)[-1], times["encode plan, us/row"])
        timed(lambda parts=parts: decode_to_worker(parts), times["decode plan, us/row"])
        result = decoding.worker.answer(decoding.plans.popleft())
        answer = timed(lambda result=result: encode(envelope, result)[-1], times["encode result, us/row"])
        timed(lambda answer=answer: decode_from_worker(answer), times["decode result, us/row"])
        decoding.apply(result)
        sizes["plan, bytes/row"].append(len(parts))
        sizes["result, bytes/row"].append(len(answer))
    measured = {name: summary(values, ROWS, 1e6) for name, values in times.items()}
    return measured | {name: summary(values, ROWS, 1) for name, values in sizes.items()}


# --- groups ----------------------------------------------------------------------------------------------------------


class NoSink:
    """Discards what it is given."""

    def accepted(self, request_id: str, attempt: int, stream: int) -> None: ...

    def rejected(self, request_id: str, attempt: int, error: PagodaError, retry_after_s: float) -> None:
        sys.exit(f"{request_id} was refused: {error}")

    def next_tokens(self, tokens: NextTokens) -> None: ...

    def deltas(self, deltas: list[Delta]) -> None: ...

    def migrate(self, request_id: str, attempt: int, reason: str) -> None:
        raise RuntimeError(reason)


class Groups:
    """An Executor in simulated time: workers' steps take `step_s`, and time without events is skipped.

    `waits` is the time from each answer to the worker's next plan; `idle` the time it had nothing to compute.
    """

    concurrent = False  # the delay of plans is measured, so none may be delayed on purpose

    def __init__(self, step_s: float, workers: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._step_s = step_s
        self._skipped_s = -time.thread_time()
        self._events: list[ExecutorEvent] = []
        self._due: list[tuple[float, int, StepResult]] = []
        self._workers = {epoch: Worker() for epoch in range(1, workers + 1)}
        self._free_at = {epoch: step_s * self._random.random() for epoch in self._workers}
        self._answered_at: dict[int, deque[float]] = {epoch: deque() for epoch in self._workers}
        self.own_s = 0.0  # processor time of the simulation itself
        self.waits: list[float] = []
        self.idle: list[float] = []
        self._events += [WorkerJoined(epoch, make_hello(f"w{epoch}")) for epoch in self._workers]

    def now(self) -> float:
        return time.thread_time() + self._skipped_s - self.own_s

    def send(self, epoch: int, message: ToExecutor, deadline_s: float = math.inf) -> None:
        began = time.thread_time()
        now = self.now()
        if not isinstance(message, StepPlan):
            raise TypeError(f"worker {epoch} was sent {message}")
        if self._answered_at[epoch]:
            self.waits.append(now - self._answered_at[epoch].popleft())
            self.idle.append(max(0.0, now - self._free_at[epoch]))
        jitter = 0.9 + 0.2 * self._random.random()
        self._free_at[epoch] = max(now, self._free_at[epoch]) + self._step_s * jitter
        heapq.heappush(self._due, (self._free_at[epoch], epoch, self._workers[epoch].answer(message)))
        self.own_s += time.thread_time() - began

    def wait(self, timeout_s: float) -> list[ExecutorEvent]:
        began = time.thread_time()
        now = self.now()
        if not self._events and self._due and self._due[0][0] > now:
            skipped_s = min(timeout_s, self._due[0][0] - now)
            self._skipped_s += skipped_s
            now += skipped_s
        while self._due and self._due[0][0] <= now and (self._step_s or not self._events):
            due, epoch, result = heapq.heappop(self._due)
            self._answered_at[epoch].append(due)
            self._events.append(StepDone(epoch, result))
        events, self._events = self._events, []
        self.own_s += time.thread_time() - began
        return events

    def hold(self, numerics_id: str) -> str:
        return ""

    def wake(self) -> None: ...

    def workers(self) -> Sequence[WorkerInfo]:
        return []

    def counters(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None: ...


def measure_groups(step_s: float, workers: int, seed: int) -> dict[str, Figures]:
    groups = Groups(step_s, workers, seed)
    engine = EngineCore(config(workers * ROWS), groups, groups.now)
    engine.step(0.0)
    sink = NoSink()
    for index in range(workers * ROWS):
        engine.submit(make_record(index), sink)
        if index % workers == 0:
            engine.step()
    while engine.load().num_running < workers * ROWS:
        engine.step()
    groups.waits.clear()
    while len(groups.waits) < WARM_UP_STEPS * workers:
        engine.step()
    groups.waits.clear()
    groups.idle.clear()
    began, answers = time.thread_time() - groups.own_s, len(groups.waits)
    while len(groups.waits) < GROUP_STEPS * workers:
        engine.step()
    spent_s = time.thread_time() - groups.own_s - began
    per_step = spent_s / (len(groups.waits) - answers)
    waits, idle = sorted(groups.waits), sorted(groups.idle)
    percentile = {name: 1e3 * waits[int(share * len(waits))] for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {
        "wait for a plan, ms": percentile | {"max": 1e3 * waits[-1]},
        "worker idle, ms": {"p99": 1e3 * idle[int(0.99 * len(idle))], "max": 1e3 * idle[-1]},
        "loop thread, ms/step of a worker": {"mean": 1e3 * per_step},
    }


# --- tokens ----------------------------------------------------------------------------------------------------------


class Session:
    """Both ends of a session: turns an engine core's answers into frames, bytes, and a gateway's deltas."""

    def __init__(self) -> None:
        self.outbox = Outbox()

    def accepted(self, request_id: str, attempt: int, stream: int) -> None:
        self.outbox.accepted(request_id, attempt, stream)

    def rejected(self, request_id: str, attempt: int, error: PagodaError, retry_after_s: float) -> None:
        sys.exit(f"{request_id} was refused: {error}")

    def next_tokens(self, tokens: NextTokens) -> None:
        self.outbox.next_tokens(tokens)

    def deltas(self, deltas: list[Delta]) -> None:
        self.outbox.deltas(deltas)

    def migrate(self, request_id: str, attempt: int, reason: str) -> None:
        raise RuntimeError(reason)

    def frames(self) -> list[bytes]:
        return [frame.SerializeToString() for frame in self.outbox.take()]


class Instant(Groups):
    """One worker whose steps take no time."""

    def __init__(self) -> None:
        super().__init__(0.0, 1, 0)


def make_pool() -> tuple[RequestPool, Core]:
    metrics = GatewayMetrics("m")
    meter = RequestMeter(metrics, log_requests=False)
    pool = RequestPool(LivedClock(1e9, time.monotonic), Waits(), metrics, meter, lambda now: 0.0)
    load = Load(engine_id="e", num_workers=1)
    core = Core(name="e", send=lambda frame: None, usable=True, load=load)
    pool.add(core)
    pool.meet(core, ModelView(fingerprint="m", numerics_id="n", vocab_size=32_000))
    return pool, core


def measure_tokens() -> dict[str, Figures]:
    session, (pool, core), executor = Session(), make_pool(), Instant()
    engine = EngineCore(config(), executor, time.monotonic)
    engine.step(0.0)
    generations = []
    for index in range(ROWS):
        record = make_record(index)
        generations.append(pool.open(record, counted=True))
        engine.submit(record, session)
    times: dict[str, list[float]] = defaultdict(list)
    sizes: list[float] = []
    for _ in range(WARM_UP_STEPS + STEPS):
        own_s = executor.own_s
        timed(lambda: engine.step(0.0), times["engine core's loop"])
        times["engine core's loop"][-1] -= executor.own_s - own_s
        frames = timed(session.frames, times["engine core's frames"])
        sizes.append(sum(map(len, frames)))
        timed(lambda frames=frames: take(pool, core, frames), times["gateway's frames"])
        timed(lambda: [generation.request.drain() for generation in generations], times["gateway's deltas"])
    figures = {f"{name}, us/token": summary(values[WARM_UP_STEPS:], ROWS, 1e6) for name, values in times.items()}
    return figures | {"frame, bytes/token": summary(sizes[WARM_UP_STEPS:], ROWS, 1)}


def take(pool: RequestPool, core: Core, frames: list[bytes]) -> None:
    for data in frames:
        frame = pb.ServerFrame.FromString(data)
        if frame.HasField("accepted"):
            pool.on_accepted(core, frame.accepted)
        elif frame.HasField("outputs"):
            pool.on_outputs(core, frame.outputs)


# --- all of it -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=whole(1), default=3, help="[%(default)s]")
    parser.add_argument("--step-ms", type=number(0.1, 1e4), default=20.0, help="of `groups` [%(default)s]")
    parser.add_argument("--workers", type=whole(1, 1000), default=32, help="of `groups` [%(default)s]")
    parser.add_argument("--sections", default="pass,wire,groups,tokens", help="[%(default)s]")
    parser.add_argument("--json", help="write everything there")
    args = parser.parse_args()
    sections: dict[str, Callable[[int], dict[str, Figures]]] = {
        "pass": lambda turn: measure_pass(),
        "wire": lambda turn: measure_wire(),
        "groups": lambda turn: measure_groups(args.step_ms / 1e3, args.workers, turn),
        "tokens": lambda turn: measure_tokens(),
    }
    if unknown := set(args.sections.split(",")) - sections.keys():
        parser.error(f"--sections: {', '.join(sorted(unknown))}")
    keep_out_of_collections()  # as an engine core does
    chosen = {name: sections[name] for name in args.sections.split(",")}
    runs: dict[str, list[dict[str, Figures]]] = defaultdict(list)
    for turn, (name, measure) in itertools.product(range(args.repeat), chosen.items()):
        gc.collect()
        runs[name].append(measure(turn))
    for name, repeated in runs.items():
        print(name)
        for line in repeated[0]:
            columns = (f"{key} {min(run[line][key] for run in repeated):.4g}" for key in repeated[0][line])
            print(f"    {line:36} {', '.join(columns)}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(runs, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
