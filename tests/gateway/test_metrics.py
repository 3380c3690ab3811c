"""Time series are fixed in advance: nothing a client sends can add one, and the numbers match the requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pagoda_engine_core.metrics import Metrics
from pagoda_gateway.metrics import METHODS, STATUS_CLASSES, GatewayMetrics
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import FinishReason, Load, Usage

ROUTES = frozenset({"/v1/chat/completions", "/health"})


def labels_of(metrics: GatewayMetrics, name: str) -> set[tuple[tuple[str, str], ...]]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {tuple(sorted(sample.labels.items())) for sample in samples}


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8), st.text(max_size=4)), max_size=30))
def test_labels_come_from_closed_sets(requests: list[tuple[str, str, str]]) -> None:
    metrics = GatewayMetrics("m")
    metrics.know_routes(ROUTES)
    for route, method, status in requests:
        metrics.http(route, method, status, 0.1)
    for labels in labels_of(metrics, "pagoda_http_requests_total"):
        fields = dict(labels)
        assert fields["route"] in ROUTES | {"other"}
        assert fields["method"] in METHODS | {"other"}
        assert fields["status"] in STATUS_CLASSES | {"other"}


def test_calls_to_the_store_are_counted_by_outcome() -> None:
    metrics, failing = GatewayMetrics("m"), [False]
    count = metrics.watch_store(("good", "bad"), lambda: failing[0])
    count("bad")
    value = metrics.registry.get_sample_value
    for outcome, times in (("good", 0.0), ("bad", 1.0)):
        assert value("pagoda_store_calls_total", {"model_name": "m", "outcome": outcome}) == times
    assert value("pagoda_store_up", {"model_name": "m"}) == 1.0
    failing[0] = True
    assert value("pagoda_store_up", {"model_name": "m"}) == 0.0


def test_lines_of_batches_are_counted_by_what_became_of_them() -> None:
    metrics = GatewayMetrics("m")
    for failed in (True, False, False):
        metrics.batch_line(failed)
    value = metrics.registry.get_sample_value
    for result, times in (("answered", 2.0), ("failed", 1.0)):
        assert value("pagoda_batch_lines_total", {"model_name": "m", "result": result}) == times


def test_every_ending_and_code_has_a_series_from_the_start() -> None:
    metrics = GatewayMetrics("m")
    reasons = {dict(labels)["finished_reason"] for labels in labels_of(metrics, "pagoda_request_success_total")}
    assert reasons == {reason.value for reason in FinishReason}
    codes = {dict(labels)["reason"] for labels in labels_of(metrics, "pagoda_admission_rejections_total")}
    assert codes == {code.value for code in ErrorCode}


def test_numbers_of_a_request() -> None:
    metrics = GatewayMetrics("m")
    metrics.ended(FinishReason.STOP, Usage(prompt_tokens=5, cached_prompt_tokens=4, output_tokens=3), 1.5)
    metrics.ended(FinishReason.ABORT, None, 0.5)
    metrics.refused(ErrorCode.OVERLOADED)
    metrics.slow_client()

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"pagoda_{name}", {"model_name": "m"} | labels)

    assert value("request_success_total", finished_reason="stop") == 1
    assert value("prompt_tokens_total") == 5
    assert value("prefix_cache_queries_total") == 5
    assert value("prefix_cache_hits_total") == 4
    assert value("e2e_request_latency_seconds_sum") == 2.0
    assert value("admission_rejections_total", reason="overloaded") == 1
    assert value("slow_clients_total") == 1


def test_gauges_are_read_when_scraped() -> None:
    metrics = GatewayMetrics("m")
    loads = [Load(engine_id="e", num_running=1)]
    metrics.watch_engine(lambda: loads[-1], lambda: True, lambda: 7)
    loads.append(Load(engine_id="e", num_running=2, num_waiting=3, kv_usage=0.5, num_workers=4))
    text = metrics.exposition().decode()
    for line in (
        'pagoda_num_requests_running{model_name="m"} 2.0',
        'pagoda_num_requests_waiting{model_name="m"} 3.0',
        'pagoda_kv_cache_usage_perc{model_name="m"} 0.5',
        'pagoda_num_workers{model_name="m"} 4.0',
        'pagoda_open_requests{model_name="m"} 7.0',
        'pagoda_engine_connected{model_name="m"} 1.0',
    ):
        assert line in text


def test_no_name_has_two_meanings() -> None:
    """Both tiers are scraped into one place; if both exported a name, a sum over it would count everything twice."""
    gateway = GatewayMetrics("m")
    gateway.watch_engine(lambda: Load(engine_id="e"), lambda: True, lambda: 0)
    engine_core = Metrics()
    blocks = {f"{whose}_{kind}": 0 for whose in ("blocks", "swap_blocks") for kind in ("total", "used", "cached")}
    held = SimpleNamespace(**blocks)
    stats: Any = SimpleNamespace(load=Load(engine_id="e"), totals={}, worker_rss_bytes={"w": 1}, blocks=held)
    engine_core.watch(lambda: stats)
    names = [
        {family.name for family in text_string_to_metric_families(generate_latest(registry).decode())}
        for registry in (gateway.registry, engine_core.registry)
    ]
    assert len(names[1]) > 20
    assert names[0] & names[1] == set()
    assert all(name.startswith("pagoda_engine_core_") for name in names[1])
