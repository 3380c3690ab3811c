"""Prometheus metrics of an engine core: prefix `pagoda_engine_core_`, and vLLM's names where the meaning is the same.

A gateway's metrics have the prefix `pagoda_` alone, so the two never share a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pagoda_engine_core.scheduling.ledger import QUEUED, Cause
from pagoda_engine_core.views import Stats
from pagoda_proto import buckets
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import Delta, FinishReason

PREFIX = "pagoda_engine_core_"
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)

_TOTALS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that began"),
    "cached_prompt_tokens": ("prefix_cache_hits", "Prompt tokens served from the prefix cache"),
    "output_tokens": ("generation_tokens", "Tokens generated"),
    "draft_tokens": ("spec_decode_num_draft_tokens", "Draft tokens that were verified"),
    "accepted_draft_tokens": ("spec_decode_num_accepted_tokens", "Draft tokens that became output"),
    "swapped_out_blocks": ("swapped_out_blocks", "KV blocks copied to host memory"),
    "swapped_in_blocks": ("swapped_in_blocks", "KV blocks copied back from host memory"),
    "replays": ("requests_replayed", "Requests that lost their worker after they had begun"),
    "worker_deaths": ("worker_deaths", "Workers that died or hung"),
    "workers_refused": ("workers_refused", "Registrations that were refused"),
    "handshakes_refused": ("zmq_auth_rejected", "Connections to the workers' port refused for want of a listed key"),
    "steps": ("steps", "Steps computed"),
    "scheduler_failures": ("scheduler_failures", "Times a scheduler failed and its worker began anew"),
    "requests_abandoned": ("requests_abandoned", "Requests that ended because their session did"),
}
_DROPPED = "frames_dropped_"


class Metrics:
    """The engine core's Observer, with its own registry. Each scrape calls `stats`, from another thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ended = self._counter("request_success", "Requests with an ending, probes too", "finished_reason")
        self._rejected = self._counter("admission_rejections", "Requests refused", "reason")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Submission to first token", buckets.FIRST_TOKEN_S
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "Submission to ending", buckets.LATENCY_S)
        self._queue = self._histogram("request_queue_time_seconds", "Time not yet begun", buckets.LATENCY_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "Time in prefill", buckets.LATENCY_S)
        self._decode = self._histogram("request_decode_time_seconds", "Time in decode", buckets.LATENCY_S)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request", buckets.TOKENS)
        self._generation = self._histogram(
            "request_generation_tokens", "Tokens generated for a request", buckets.TOKENS
        )
        self._step_s = self._counter("step_seconds", "Time workers spent on steps")
        self._forward_s = self._counter("forward_seconds", "Of it, time in model and sampler")
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens computed in a step", STEP_TOKEN_BUCKETS)

    def certificate(self, not_after: float) -> None:
        """Export when the certificate of the link to gateways expires, in seconds since the epoch. Call once."""
        name, text = f"{PREFIX}certificate_not_after_seconds", "End of the link's certificate, since the epoch"
        Gauge(name, text, registry=self.registry).set(not_after)

    def watch(self, stats: Callable[[], Stats]) -> None:
        self.registry.register(_StatsCollector(stats))

    def ended(self, delta: Delta, first_token_s: float | None, latency_s: float) -> None:
        self._ended.labels(delta.finish_reason or FinishReason.ERROR).inc()
        self._latency.observe(latency_s)
        if first_token_s is not None:
            self._first_token.observe(first_token_s)
        spent = {entry.cause: entry.seconds for entry in delta.ledger or ()}
        self._queue.observe(sum(seconds for cause, seconds in spent.items() if cause in QUEUED))
        self._prefill.observe(spent.get(Cause.PREFILL, 0.0))
        self._decode.observe(spent.get(Cause.DECODE, 0.0))
        if delta.usage is not None:
            self._prompt.observe(delta.usage.prompt_tokens)
            self._generation.observe(delta.usage.output_tokens)

    def rejected(self, code: ErrorCode) -> None:
        self._rejected.labels(code).inc()

    def planned(self, num_tokens: int) -> None:
        self._step_tokens.observe(num_tokens)

    def stepped(self, elapsed_s: float, forward_s: float) -> None:
        self._step_s.inc(elapsed_s)
        self._forward_s.inc(forward_s)

    def _counter(self, stem: str, help: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{stem}", help, labels, registry=self.registry)

    def _histogram(self, stem: str, help: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}{stem}", help, buckets=bounds, registry=self.registry)


class _StatsCollector(Collector):
    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        """Nothing: registration must not query an engine core that is not running yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        load = stats.load
        yield GaugeMetricFamily(f"{PREFIX}num_requests_running", "Requests on a worker", value=load.num_running)
        yield GaugeMetricFamily(f"{PREFIX}num_requests_waiting", "Requests without a row", value=load.num_waiting)
        yield GaugeMetricFamily(
            f"{PREFIX}kv_cache_usage_perc",
            "KV blocks in use, of the fullest group, 0..1",
            value=load.kv_usage,
        )
        yield GaugeMetricFamily(f"{PREFIX}num_workers", "Workers that accept work", value=load.num_workers)
        yield GaugeMetricFamily(
            f"{PREFIX}seconds_since_progress",
            "Seconds since a step last made progress",
            value=load.seconds_since_progress,
        )
        for kind in ("total", "used", "cached"):
            value = getattr(stats.blocks, f"blocks_{kind}")
            yield GaugeMetricFamily(f"{PREFIX}kv_blocks_{kind}", f"KV blocks of all groups: {kind}", value=value)
        for kind in ("total", "used"):
            value = getattr(stats.blocks, f"swap_blocks_{kind}")
            yield GaugeMetricFamily(f"{PREFIX}swap_blocks_{kind}", f"Blocks of host memory: {kind}", value=value)
        yield _preemptions(stats)
        yield _worker_memory(stats)
        for key, (stem, help_text) in _TOTALS.items():
            yield CounterMetricFamily(f"{PREFIX}{stem}", help_text, value=stats.totals.get(key, 0))
        yield CounterMetricFamily(
            f"{PREFIX}prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache",
            value=stats.totals.get("prompt_tokens", 0),
        )
        dropped = CounterMetricFamily(
            f"{PREFIX}frames_dropped", "Frames from workers that were dropped", labels=["reason"]
        )
        for key, count in stats.totals.items():
            if key.startswith(_DROPPED):
                dropped.add_metric([key.removeprefix(_DROPPED)], count)
        yield dropped


def _worker_memory(stats: Stats) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}worker_rss_bytes", "Resident memory of a worker", labels=["worker_id"])
    for worker_id, rss_bytes in stats.worker_rss_bytes.items():
        if rss_bytes:
            family.add_metric([worker_id], rss_bytes)
    return family


def _preemptions(stats: Stats) -> Metric:
    swapped = stats.totals.get("swap_preemptions", 0)
    family = CounterMetricFamily(
        f"{PREFIX}num_preemptions", "Rows preempted, which gave up their KV blocks", labels=["kind"]
    )
    family.add_metric(["swap"], swapped)
    family.add_metric(["recompute"], stats.totals.get("preemptions", 0) - swapped)
    return family
