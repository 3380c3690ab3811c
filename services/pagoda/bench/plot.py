"""Plots the roofline: ceilings as lines, operations as points, on logarithmic axes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from pagoda.settings.problems import ConfigError

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")
CEILINGS = {"bf16": "black", "int8": "dimgray"}
PER_BYTE = (0.05, 2000.0)  # operations per byte; the axis covers at least this range


def require() -> None:
    """Raises ConfigError, which says what to do, if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError:
        raise ConfigError(["--plot needs matplotlib: pip install 'pagoda-serve[bench]'"]) from None


def drawable(points: list[dict[str, Any]]) -> dict[str, list[tuple[float, float, str]]]:
    """(operations per byte, operations per second, shape) of the points that do arithmetic, by operation."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for point in points:
        if point["operations"]:
            place = (point["operations"] / point["num_bytes"], point["operations_per_s"], point["shape"])
            found.setdefault(point["op"], []).append(place)
    return found


def draw(report: dict[str, Any], path: Path) -> None:
    """Plot a report of `pagoda bench kernels` to a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="operations per second")
    axes.set_title(f"{report['shape']}, {report['level']}, {report['threads']} threads")
    axes.grid(visible=True, which="major", alpha=0.3)
    series = drawable(report["points"])
    _draw_ceilings(axes, report["ceilings"], [x for places in series.values() for x, _, _ in places])
    for (op, places), colour in zip(series.items(), COLOURS * (1 + len(series) // len(COLOURS)), strict=False):
        axes.scatter([x for x, _, _ in places], [y for _, y, _ in places], s=22, color=colour, label=op)
        for x, y, shape in places:
            axes.annotate(shape, (x, y), textcoords="offset points", xytext=(4, -3), fontsize=5, color=colour)
    if series:
        axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=160, format="png")


def _draw_ceilings(axes: Any, ceilings: list[dict[str, float]], intensities: list[float]) -> None:
    low, high = min([PER_BYTE[0], *intensities]), max([PER_BYTE[1], *intensities])
    read = statistics.median(one["read"] for one in ceilings)
    for unit, colour in CEILINGS.items():
        peak = statistics.median(one[unit] for one in ceilings)
        knee = peak / read
        axes.plot([low, knee, high], [low * read, peak, peak], color=colour, linewidth=1)
        text = f"{unit} {peak / 1e9:.0f} G operations/s"
        axes.annotate(text, (high, peak), ha="right", va="bottom", fontsize=8, color=colour)
    axes.annotate(f"read {read / 1e9:.1f} GB/s", (low, low * read), rotation=35, va="bottom", fontsize=8)
