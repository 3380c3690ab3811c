"""The gateway's Prometheus metrics, in their own registry; labels come from closed sets, so no client can add series.

Names are vLLM's where they mean the same, with the prefix `pagoda_`; an engine core's own metrics have another prefix,
so no name has two meanings. Metrics of generation are observed once per delta (a step's tokens of one choice), never
per token; gauges are read when scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from pagoda_proto import buckets
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import FinishReason, Load, Usage

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)

HTTP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600)

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
STATUS_CLASSES = frozenset({"2xx", "3xx", "4xx", "5xx", "disconnected"})
OTHER = "other"


class GatewayMetrics:
    """`model_name` labels the metrics of generation, as dashboards expect; it has one value per process."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self._routes: frozenset[str] = frozenset()
        self.num_open: Callable[[], int] = lambda: 0
        self._create_generation_metrics()
        self._create_stream_metrics()
        self._create_batch_metrics()
        self._create_http_metrics()

    def _create_generation_metrics(self) -> None:
        self.ttft = self._histogram("time_to_first_token_seconds", "Submission to first token", buckets.FIRST_TOKEN_S)
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Between two deltas of a choice, per token", buckets.BETWEEN_TOKENS_S
        )
        self.latency = self._histogram("e2e_request_latency_seconds", "Submission to ending", buckets.LATENCY_S)
        self.prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request", buckets.TOKENS)
        self.output_size = self._histogram("request_generation_tokens", "Output tokens of a request", buckets.TOKENS)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests")
        self.looked_up_tokens = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.cached_tokens = self._counter("prefix_cache_hits", "Prompt tokens served from the prefix cache")
        self.output_tokens = self._counter("generation_tokens", "Output tokens received from engine cores")
        names = ("model_name", "finished_reason")
        success = Counter("pagoda_request_success", "Requests, by how they ended", names, registry=self.registry)
        self._success = {reason: success.labels(self.model_name, reason.value) for reason in FinishReason}
        names = ("model_name", "reason")
        refused = Counter("pagoda_admission_rejections", "Requests refused, by code", names, registry=self.registry)
        self._refused = {code: refused.labels(self.model_name, code.value) for code in ErrorCode}

    def _create_stream_metrics(self) -> None:
        self.resumed = self._counter("requests_resumed", "Requests submitted again after a loss or a move")
        self.gaps = self._counter("protocol_gaps", "Deltas that left a hole in their choice")
        self.sessions_lost = self._counter("engine_sessions_lost", "Sessions to the engine core that broke")
        self.slow_clients = self._counter("slow_clients", "Connections ended because their client read nothing")
        canary = Counter("pagoda_canary_requests", "Health requests, by outcome", ("result",), registry=self.registry)
        self.canary = {result: canary.labels(result) for result in ("success", "failure", "overtaken")}

    def _create_batch_metrics(self) -> None:
        names = ("model_name", "result")
        lines = Counter("pagoda_batch_lines", "Batch lines, by outcome", names, registry=self.registry)
        results = {False: "answered", True: "failed"}
        self._batch_lines = {failed: lines.labels(self.model_name, result) for failed, result in results.items()}

    def _create_http_metrics(self) -> None:
        self._http = Counter(
            "pagoda_http_requests", "HTTP requests", ("route", "method", "status"), registry=self.registry
        )
        self._http_duration = Histogram(
            "pagoda_http_request_duration_seconds",
            "Request head to end of the response",
            ("route",),
            buckets=HTTP_BUCKETS,
            registry=self.registry,
        )

    def _labelled(self, metric: _Metric) -> _Metric:
        return metric.labels(self.model_name)

    def _counter(self, stem: str, text: str) -> Counter:
        return self._labelled(Counter(f"pagoda_{stem}", text, ("model_name",), registry=self.registry))

    def _histogram(self, stem: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        name = f"pagoda_{stem}"
        return self._labelled(Histogram(name, text, ("model_name",), buckets=bounds, registry=self.registry))

    def _gauge(self, stem: str, text: str, read: Callable[[], float]) -> None:
        self._labelled(Gauge(f"pagoda_{stem}", text, ("model_name",), registry=self.registry)).set_function(read)

    def watch_engine(
        self, load: Callable[[], Load], connected: Callable[[], bool], num_open: Callable[[], int]
    ) -> None:
        """Register gauges, read when scraped; those about the engine core come from its own `load`. Call once."""
        self.num_open = num_open
        self._gauge("num_requests_running", "Running in the engine core, of all gateways", lambda: load().num_running)
        self._gauge("num_requests_waiting", "Waiting in the engine core, of all gateways", lambda: load().num_waiting)
        self._gauge("kv_cache_usage_perc", "KV blocks in use, 0 to 1", lambda: load().kv_usage)
        self._gauge("num_workers", "Workers of the engine core", lambda: load().num_workers)
        self._gauge("engine_connected", "1 while the session to the engine core stands", connected)
        self._gauge("open_requests", "Requests of this gateway without an ending", num_open)

    def certificate(self, not_after: float) -> None:
        """Register when the certificate of the links to engine cores expires, in seconds since the epoch. Call once."""
        name, text = "pagoda_certificate_not_after_seconds", "End of the links' certificate, since the epoch"
        Gauge(name, text, registry=self.registry).set(not_after)

    def ended(self, reason: FinishReason, usage: Usage | None, seconds: float) -> None:
        """`usage` is None if the request ended before the model had seen its prompt."""
        self._success[reason].inc()
        self.latency.observe(seconds)
        if usage is not None:
            self.prompt_tokens.inc(usage.prompt_tokens)
            self.looked_up_tokens.inc(usage.prompt_tokens)
            self.cached_tokens.inc(usage.cached_prompt_tokens)
            self.prompt_size.observe(usage.prompt_tokens)
            self.output_size.observe(usage.output_tokens)

    def refused(self, code: ErrorCode) -> None:
        self._refused[code].inc()

    def slow_client(self) -> None:
        self.slow_clients.inc()

    def watch_store(self, outcomes: Iterable[str], failing: Callable[[], bool]) -> Callable[[str], None]:
        """Return a function to call with the outcome of every call to the store. Call once."""
        self._gauge("store_up", "0 while the store cannot be used", lambda: not failing())
        names = ("model_name", "outcome")
        calls = Counter("pagoda_store_calls", "Calls to the store, by outcome", names, registry=self.registry)
        counted = {outcome: calls.labels(self.model_name, outcome) for outcome in outcomes}
        return lambda outcome: counted[outcome].inc()

    def watch_tickets(self, ways: Iterable[str]) -> Callable[[str], None]:
        """Return a function to call with the way each request with a ticket was answered. Call once."""
        names = ("model_name", "way")
        answered = Counter(
            "pagoda_tickets",
            "Requests with an Idempotency-Key, by how they were answered",
            names,
            registry=self.registry,
        )
        counted = {way: answered.labels(self.model_name, way) for way in ways}
        return lambda way: counted[way].inc()

    def batch_line(self, failed: bool) -> None:
        """Count a finished line of a batch."""
        self._batch_lines[failed].inc()

    def know_routes(self, templates: frozenset[str]) -> None:
        """Set the closed set of route templates; anything else is counted as `other`."""
        self._routes = templates

    def http(self, route: str, method: str, status: str, seconds: float) -> None:
        """`status` is a class such as 2xx, or `disconnected` if no response was begun."""
        route = route if route in self._routes else OTHER
        method = method if method in METHODS else OTHER
        status = status if status in STATUS_CLASSES else OTHER
        self._http.labels(route, method, status).inc()
        self._http_duration.labels(route).observe(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
