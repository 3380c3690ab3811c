"""Snapshots of an engine core for other threads, as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from pagoda_engine_core.dispatch.admission import Admission
from pagoda_engine_core.dispatch.router import Router
from pagoda_engine_core.scheduling.kv_cache import BlockCounts
from pagoda_engine_core.workers.executor import Executor, WorkerInfo, WorkerState
from pagoda_proto.records import SESSION_PROTOCOL, Load


class WorkerView(NamedTuple):
    """One life of a worker, and what the engine core has placed on it."""

    info: WorkerInfo
    num_free_blocks: int
    num_rows: int


class Stats(NamedTuple):
    """Current numbers, and totals since the engine core started."""

    load: Load
    blocks: BlockCounts  # of all workers together
    totals: dict[str, int]
    worker_rss_bytes: dict[str, int]  # resident memory, by the worker's name


def workers(executor: Executor, router: Router) -> list[WorkerView]:
    views = []
    for info in executor.workers():
        worker = router.workers.get(info.epoch)
        used = worker.scheduler.block_counts.blocks_used if worker else 0
        rows = worker.scheduler.num_rows if worker else 0
        if worker is not None and worker.leaving:
            info = info._replace(state=WorkerState.DRAINING)
        views.append(WorkerView(info, info.hello.num_blocks - used if info.state.alive else 0, rows))
    return views


def stats(load: Load, executor: Executor, router: Router, totals: Mapping[str, int]) -> Stats:
    blocks = zip(*(worker.scheduler.block_counts for worker in router.workers.values()), strict=True)
    everything = Counter(totals) + router.totals() + Counter(executor.counters())
    rss_bytes = {info.hello.worker_id: info.rss_bytes for info in executor.workers() if info.state.alive}
    return Stats(load, BlockCounts(*map(sum, blocks)), dict(everything), rss_bytes)


def load_of(engine_id: str, policy: str, router: Router, admission: Admission) -> Load:
    limits = admission.limits
    return Load(
        engine_id=engine_id,
        num_workers=sum(worker.ready for worker in router.workers.values()),
        num_waiting=router.num_waiting + admission.num_held,
        num_running=router.num_running,
        kv_usage=round(router.kv_usage, 3),
        draining=admission.closed,
        vocab_size=limits.vocab_size if limits else 0,
        max_model_len=limits.max_model_len if limits else 0,
        model_fingerprint=admission.model_fingerprint,
        numerics_id=next((worker.hello.numerics_id for worker in router.workers.values()), ""),
        protocol=SESSION_PROTOCOL,
        policy=policy,
    )
