"""The report of a load test: percentiles, rates, and the client's own cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pagoda.bench.load import LoadResult, Sent
from pagoda.tools.timing import Timing

TIMES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "stall_ms")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie, interpolated."""
    position = (len(values) - 1) * share
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def distribution_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles, minimum and maximum in milliseconds; None if there are no values."""
    if not seconds:
        return None
    values = sorted(1000 * value for value in seconds)
    points = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {
        "mean": sum(values) / len(values),
        **{name: percentile(values, share) for name, share in points.items()},
        "count": len(values),
    }


def tpot_s(timing: Timing) -> float | None:
    """Seconds per output token after the first; None if there is at most one token."""
    if timing.first is None or timing.last is None or not timing.output_tokens or timing.output_tokens < 2:
        return None
    return (timing.last - timing.first) / (timing.output_tokens - 1)


def summarise(result: LoadResult, *, exact_prompts: bool, limits_ms: dict[str, float]) -> dict[str, Any]:
    """The report as plain data. `limits_ms` (ttft, tpot, e2e) adds the share of requests within all of them."""
    sent = [one for one in result.sent if one.timing.error is None]
    good = [one.timing for one in sent]
    prompt_tokens = sum(_prompt_tokens(one) for one in sent)
    output_tokens = sum(timing.output_tokens or 0 for timing in good)
    wall_s = result.wall_s
    errors = Counter(one.timing.error for one in result.sent if one.timing.error is not None)
    report = {
        "requests": len(result.sent),
        "completed": len(good),
        "errors": dict(errors),
        "wrong_output_length": sum(one.timing.output_tokens != one.row.output_tokens for one in sent),
        "wrong_prompt_length": sum(map(_wrong_prompt, sent)) if exact_prompts else 0,
        "wall_s": wall_s,
        "peak_in_flight": result.peak_in_flight,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": len(good) / wall_s,
        "output_tokens_per_s": output_tokens / wall_s,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / wall_s,
        **_times(good),
        "late_starts_ms": distribution_ms(result.late_starts_s),
        "client_cpu_s": result.client_cpu_s,
        "client_cpu_percent_of_a_core": 100 * result.client_cpu_s / wall_s,
        "client_cpu_us_per_output_token": 1e6 * result.client_cpu_s / max(1, output_tokens),
    }
    if limits_ms:
        kept = sum(_keeps(timing, limits_ms) for timing in good)
        report |= {"goodput_requests_per_s": kept / wall_s, "share_within_limits": kept / max(1, len(result.sent))}
    return report


def _times(good: list[Timing]) -> dict[str, Any]:
    return {
        "ttft_ms": distribution_ms([t.first - t.started for t in good if t.first is not None]),
        "itl_ms": distribution_ms([gap for t in good for gap in t.gaps]),
        "tpot_ms": distribution_ms([value for t in good if (value := tpot_s(t)) is not None]),
        "e2e_ms": distribution_ms([t.ended - t.started for t in good]),
        "stall_ms": distribution_ms([max(t.gaps) for t in good if t.gaps]),
    }


def _prompt_tokens(one: Sent) -> int:
    """As counted by the server; the row's own number if the server did not report it."""
    return one.row.prompt_tokens if one.timing.prompt_tokens is None else one.timing.prompt_tokens


def _wrong_prompt(one: Sent) -> bool:
    return one.row.prompt is None and _prompt_tokens(one) != one.row.prompt_tokens


def _keeps(timing: Timing, limits_ms: dict[str, float]) -> bool:
    measured = {
        "ttft": None if timing.first is None else timing.first - timing.started,
        "tpot": tpot_s(timing),
        "e2e": timing.ended - timing.started,
    }
    return all(1000 * (measured[name] or 0.0) <= limit for name, limit in limits_ms.items())


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"requests {report['requests']}  completed {report['completed']}  wall {report['wall_s']:.2f} s  "
        f"peak in flight {report['peak_in_flight']}"
    ]
    lines += [f"  {count} x {error}" for error, count in list(report["errors"].items())[:5]]
    if report["wrong_output_length"] or report["wrong_prompt_length"]:
        lines.append(
            f"  warning: {report['wrong_output_length']} outputs and {report['wrong_prompt_length']} prompts "
            "do not have the requested length"
        )
    lines.append(
        f"requests/s {report['requests_per_s']:.2f}  output tokens/s {report['output_tokens_per_s']:.1f}  "
        f"total tokens/s {report['total_tokens_per_s']:.1f}"
    )
    for name in TIMES:
        values = report[name]
        if values:
            points = "  ".join(f"{point} {values[point]:9.2f}" for point in ("mean", "p50", "p90", "p99", "max"))
            lines.append(f"  {name.removesuffix('_ms'):5} ms  {points}")
    if "share_within_limits" in report:
        goodput, share = report["goodput_requests_per_s"], report["share_within_limits"]
        lines.append(f"goodput {goodput:.2f} requests/s, {share:.0%} within the limits")
    lines.append(
        f"client: {report['client_cpu_s']:.2f} s of processor time "
        f"({report['client_cpu_percent_of_a_core']:.1f} % of a core, "
        f"{report['client_cpu_us_per_output_token']:.1f} us per output token)"
    )
    for process in report.get("processes", []):
        lines.append(
            f"  pid {process['pid']}: {process['cpu_s']} s ({process['cpu_percent']} %)  "
            f"RSS {process['rss_mib']} MiB, peak {process['rss_peak_mib']} MiB  {process['name']}"
        )
    return "\n".join(lines)
