"""How long a decode step takes, recorded and launched operation by operation, and whether the device ever waits."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bench.device.adapters import MadeUpAdapters, adapt, slot_options
from bench.device.job import Job, Steady, prompts
from bench.device.models import load, records_steps, runner_of, shapes, spec_of, weight_bytes
from bench.device.report import Line, attempt, say

from pagoda_proto.adapters.identity import Adapter
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.step.runner import ModelRunner

BATCHES, SMOKE_BATCHES = (1, 8, 32, 128, 256), (1, 3)
PROMPT, SMOKE_PROMPT = 128, 8
LEAST_S, LEAST_STEPS, MOST_STEPS, SMOKE_STEPS = 0.4, 20, 300, 2
BAR_MS = {"0.6B": 1.1, "8B": 4.4}
OVERHEAD_BAR_MS = {"1B": 1.0}  # on top of reading the weights
RECORDED, LAUNCHED = "recorded", "launched"


@dataclass(frozen=True)
class Replayed:
    """Which recorded steps: of so many rows; and of `adapted` rows, without and with `adapters` of this rank."""

    batches: tuple[int, ...] = ()
    adapted: int = 0
    adapters: int = 0
    rank: int = 0

    @property
    def max_rows(self) -> int:
        return max((*self.batches, self.adapted))


REPLAYED = {"OLMoE": Replayed((1, 8, 32)), "0.6B": Replayed(adapted=16, adapters=4, rank=16)}
SMOKE_REPLAYED = {"OLMoE": Replayed((1,), adapted=2, adapters=2, rank=4)}  # one load for all of it
NOTHING: Mapping[str, Any] = {}
ROUNDS = 3
ADAPTED_BAR = 0.95

WATCHED = {"0.6B": (1, 32), "8B": (1, 32)}
SMOKE_WATCHED = {"0.6B": (3,)}
WATCHED_STEPS = 40
BUSY_BAR = 97.0


def run(job: Job) -> None:
    for name in ("0.6B",) if job.smoke else ("0.6B", "8B", "1B"):
        attempt(f"decode step {name}", _both_ways, job, name)
        free(job)
    for name, wanted in (SMOKE_REPLAYED if job.smoke else REPLAYED).items():
        attempt(_what(name, 0, RECORDED), _replayed, job, name, wanted)
        free(job)


def _both_ways(job: Job, name: str) -> None:
    """Over the same weights."""
    batches = SMOKE_BATCHES if job.smoke else BATCHES
    loaded, config = _loaded(job, name, batches[-1])
    attempt(_what(name, 0, RECORDED), _one_way, job, name, loaded, config, batches)
    free(job)
    eager = replace(config, enforce_eager=True)
    attempt(_what(name, 0, LAUNCHED), _one_way, job, name, loaded, eager, (batches[0], batches[-1]))


def _replayed(job: Job, name: str, wanted: Replayed) -> None:
    loaded, config = _loaded(job, name, wanted.max_rows, slot_options(wanted.adapters, wanted.rank))
    if not _records(loaded, config, _what(name, 0, RECORDED)):
        return
    adapters = adapt(loaded, wanted.adapters, wanted.rank)
    runner = runner_of(job.hardware, replace(loaded, adapters=adapters), config)
    for batch in wanted.batches:
        attempt(_what(name, batch, RECORDED), _time, job, name, runner, batch, RECORDED)
    if wanted.adapted:
        what = f"decode step {name}, {wanted.adapted} rows, without / with adapters"
        attempt(what, _compare, job, what, runner, wanted, adapters)


def _records(loaded: LoadedModel, config: WorkerConfig, what: str) -> bool:
    """Whether it does; says so if not."""
    recorded = records_steps(loaded, config)
    if not recorded:
        say(Line(what=what, value=None, unit="", note=f"{loaded.ops.name} kernels record no steps"))
    return recorded


def _loaded(job: Job, name: str, max_rows: int, more: Mapping[str, Any] = NOTHING) -> tuple[LoadedModel, WorkerConfig]:
    fields = shapes(job.smoke)[name]
    tokens = SMOKE_PROMPT + 64 if job.smoke else PROMPT + MOST_STEPS + 2 * WATCHED_STEPS
    loaded, config, _ = load(job.hardware, fields, **options(job, spec_of(fields), max_rows, tokens), **more)
    return loaded, config


def options(job: Job, spec: DecoderSpec, max_rows: int, tokens_per_row: int) -> dict[str, Any]:
    """Worker options whose cache holds these rows, and one of the longest that the model takes."""
    tokens = max(max_rows * (tokens_per_row + job.block_size), spec.max_positions)
    blocks = -(-tokens // job.block_size)
    return {"kernels": job.kernels, "block_size": job.block_size, "max_rows": max_rows, "num_blocks": blocks}


def _one_way(job: Job, name: str, loaded: LoadedModel, config: WorkerConfig, batches: tuple[int, ...]) -> None:
    how = LAUNCHED if config.enforce_eager else RECORDED
    if how == RECORDED and not _records(loaded, config, _what(name, 0, how)):
        return
    runner = runner_of(job.hardware, loaded, config)
    for batch in batches:
        attempt(_what(name, batch, how), _time, job, name, runner, batch, how)


def _what(name: str, batch: int, how: str) -> str:
    return f"decode step {name}, {f'{batch} rows, ' if batch else ''}{how}"


def _time(job: Job, name: str, runner: ModelRunner, batch: int, how: str) -> Iterator[Line]:
    spec = spec_of(shapes(job.smoke)[name])
    steady = _steady(job, runner, batch)
    steps = SMOKE_STEPS if job.smoke else max(LEAST_STEPS, min(MOST_STEPS, int(LEAST_S / steady.seconds_of(5))))
    steady.launch_s = 0.0
    took = 1e3 * steady.seconds_of(steps)
    launching = 1e3 * steady.launch_s / (steps + steady.WARM_UP)
    floor = _floor_ms(job, spec, batch, PROMPT + steps // 2)
    bar = BAR_MS.get(name)
    if name in OVERHEAD_BAR_MS and floor is not None:
        bar = OVERHEAD_BAR_MS[name] + floor
    yield Line(
        what=_what(name, batch, how),
        value=took,
        unit="ms",
        ceiling=floor,
        bar=job.bar(bar, holds=batch == 1 and how == RECORDED),
        note=f"of which the host launches for {launching:.2f} ms",
    )


def _compare(job: Job, what: str, runner: ModelRunner, wanted: Replayed, adapters: MadeUpAdapters) -> Iterator[Line]:
    """In turn, because a device's clock wanders. At best adapters cost no more than reading them."""
    rounds = []
    for _ in range(1 if job.smoke else ROUNDS):
        both = (_steady(job, runner, wanted.adapted, one) for one in ((None,), adapters.known))
        rounds.append([1e3 * steady.seconds_of(1 if job.smoke else MOST_STEPS) for steady in both])
    without, adapted = map(median, zip(*rounds, strict=True))
    reading = job.ceiling_s(adapters.num_bytes)
    yield Line(
        what=what,
        value=median(one / other for one, other in rounds),
        unit="times",
        ceiling=None if reading is None else without / (without + 1e3 * reading),
        bar=job.bar(ADAPTED_BAR),
        note=f"{without:.3g} ms without, {adapted:.3g} ms with {adapters.count} of rank {wanted.rank} for every layer",
    )


def _steady(job: Job, runner: ModelRunner, batch: int, adapters: Sequence[Adapter | None] = (None,)) -> Steady:
    length = SMOKE_PROMPT if job.smoke else PROMPT
    return Steady(runner, prompts(batch, length, runner.facts.vocab_size), adapters)


def _floor_ms(job: Job, spec: DecoderSpec, batch: int, context: int) -> float | None:
    """Reading every weight once, of experts those that are chosen, and every row's keys and values; or multiplying
    each row by the weights that it passes."""
    kept = sum(layer.attention.num_kv_heads * layer.attention.head_dim for layer in spec.layers)
    kv = 2 * 2 * kept * batch * context
    floor = job.ceiling_s(weight_bytes(spec, batch) + kv, weight_bytes(spec, 1) * batch)
    return None if floor is None else 1e3 * floor


def watch(job: Job) -> None:
    """In a process of its own, because whatever was watched once stays slower."""
    for name, batches in (SMOKE_WATCHED if job.smoke else WATCHED).items():
        attempt(f"device busy {name}", _watch_model, job, name, batches)
        free(job)


def _watch_model(job: Job, name: str, batches: tuple[int, ...]) -> None:
    loaded, config = _loaded(job, name, batches[-1])
    runner = runner_of(job.hardware, loaded, config)
    how = RECORDED if records_steps(loaded, config) else LAUNCHED
    for batch in batches:
        attempt(f"device busy {name}, {batch} rows", _watch, job, name, runner, batch, how)


def _watch(job: Job, name: str, runner: ModelRunner, batch: int, how: str) -> Iterator[Line]:
    steady, steps = _steady(job, runner, batch), SMOKE_STEPS if job.smoke else WATCHED_STEPS
    steady.run(steps)
    seen = job.hardware.activity(lambda: (steady.run(steps), steady.settle()))
    if not seen.operations:
        raise RuntimeError("the profiler saw nothing of the device")
    note = f"{how}; {seen.operations / steps:.0f} operations a step, which run {100 * seen.computing:.0f} % of the time"
    yield Line(
        what=f"device busy {name}, {batch} rows", value=100 * seen.busy, unit="%", bar=job.bar(BUSY_BAR), note=note
    )


def free(job: Job) -> None:
    """Give back the memory of what was measured before."""
    gc.collect()
    job.hardware.empty_cache()
