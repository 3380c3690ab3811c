from __future__ import annotations

from prometheus_client import generate_latest
from tests.engine_core.bench import Bench
from tests.engine_core.fake_worker import make_hello

from pagoda_engine_core.metrics import Metrics
from pagoda_engine_core.workers.executor import WorkerInfo, WorkerState


def test_the_memory_of_a_worker_is_told_while_it_lives_and_has_said_it() -> None:
    bench, metrics = Bench(), Metrics()
    metrics.watch(bench.engine.stats)
    states = {"w0": (WorkerState.READY, 4096), "silent": (WorkerState.READY, 0), "late": (WorkerState.DEAD, 8192)}
    bench.executor.lives = [
        WorkerInfo(epoch, make_hello(name), state, 0, rss_bytes)
        for epoch, (name, (state, rss_bytes)) in enumerate(states.items(), 1)
    ]
    page = generate_latest(metrics.registry).decode()
    told = [line for line in page.splitlines() if line.startswith("pagoda_engine_core_worker_rss_bytes")]
    assert told == ['pagoda_engine_core_worker_rss_bytes{worker_id="w0"} 4096.0']
