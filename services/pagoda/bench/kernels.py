"""`pagoda bench kernels`: every operation of the native kernels against this machine's ceilings (a roofline).

The speed of a shared machine drifts, so the ceilings are measured again after every operation, and an operation is
compared with the mean of the ceilings before and after it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pagoda.bench import plot
from pagoda.settings.numbers import whole, wholes
from pagoda.settings.problems import ConfigError

if TYPE_CHECKING:
    from pagoda_worker.kernels.measure import Roofline
    from pagoda_worker.kernels.roofline import Ceilings, Point

MIB = 2**20
LEAST_WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what")
    group.add_argument(
        "--shape", default="b600m",
        help="b135m, b600m, b1b, 8b or hidden=N,middle=N,heads=N,kv_heads=N,head_dim=N,vocab=N [%(default)s]",
    )  # fmt: skip
    group.add_argument(
        "--instruction-set", default="", metavar="NAME,NAME,..",
        help="kernel levels, or all for each that runs here; default: the best one",
    )  # fmt: skip
    group.add_argument("--threads", type=whole(), default=0, help="default: one per usable core")
    group.add_argument("--formats", type=_words, help="formats of linear layers, NAME,NAME,..; default: all")
    group.add_argument(
        "--only", type=_words, default=(), metavar="TEXT,TEXT,..", help="only operations with one of these in the name"
    )
    group.add_argument(
        "--rows", type=wholes, default=(), metavar="N,..", help="rows of linear layers; default: up to 512"
    )
    group.add_argument("--ceilings", action="store_true", help="measure only the ceilings")
    group = parser.add_argument_group("how")
    group.add_argument(
        "--repeats", type=whole(1), default=5, help="runs per case; the median is reported [%(default)s]"
    )
    group.add_argument("--cold-mib", type=whole(), default=256, help="least MiB that a run moves [%(default)s]")
    group.add_argument(
        "--max-tokens", type=whole(1), default=2**20, help="leave out cases with more tokens [%(default)s]"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, help="write the report to this file")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the roofline (needs matplotlib)")


def main(arguments: argparse.Namespace) -> int:
    levels = _levels(arguments.instruction_set)
    if arguments.plot is not None:
        plot.require()
        if len(levels) > 1:
            raise ConfigError([f"--plot needs a single instruction set, got {', '.join(levels)}"])
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, LEAST_WIDTH)  # output to a file may be as wide as needed
    reports = []
    for level in levels:
        report = measure(arguments, level)
        reports.append(report)
        console.print(heading(report))
        if report["points"]:
            console.print(table(report["points"]))
    if arguments.json is not None:
        written = reports[0] if len(reports) == 1 else reports
        arguments.json.write_text(json.dumps(written, indent=1), encoding="utf-8")
    if arguments.plot is not None:
        plot.draw(reports[0], arguments.plot)
    return 0


def _levels(text: str) -> Sequence[str]:
    """Names of instruction sets; "" stands for the best one."""
    if text != "all":
        return _words(text) or ("",)
    from pagoda_worker.kernels.measure import runnable_levels

    try:
        return runnable_levels()
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def measure(arguments: argparse.Namespace, level: str) -> dict[str, Any]:
    """The report of one instruction set as plain data.

    Raises:
        ConfigError: the shape is invalid, or the kernels cannot run here.
    """
    from pagoda_worker.kernels.measure import PLAIN, Roofline
    from pagoda_worker.kernels.quantized import FORMATS
    from pagoda_worker.kernels.roofline import Limits, parse_shape

    formats = arguments.formats or (PLAIN, *FORMATS)
    if unknown := set(formats) - {PLAIN, *FORMATS}:
        raise ConfigError([f"--formats must be of {', '.join((PLAIN, *FORMATS))}, got {', '.join(sorted(unknown))}"])
    limits = Limits(
        cold_bytes=arguments.cold_mib * MIB, repeats=arguments.repeats, max_tokens=arguments.max_tokens,
        only=arguments.only, rows=arguments.rows,
    )  # fmt: skip
    try:
        shape = parse_shape(arguments.shape)
        roofline = Roofline(shape, limits, arguments.threads, level)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    ceilings, points = _measure(roofline, () if arguments.ceilings else formats)
    return {
        "shape": shape.name,
        "level": roofline.ops.library.level,
        "threads": roofline.ops.library.num_threads,
        "ceilings": ceilings,
        "points": points,
    }


def _measure(roofline: Roofline, formats: Sequence[str]) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """All ceilings in the order in which they were measured, and the points between them."""
    probe = roofline.ceiling_probe(max(roofline.limits.cold_bytes, MIB))
    ceilings, points = [probe.measure()], []
    measured: Iterator[Point] = roofline.points(formats) if formats else iter(())
    for point in measured:
        ceilings.append(probe.measure())
        points.append(_plain(point, ceilings[-2].mean(ceilings[-1])))
    if not points:
        ceilings.append(probe.measure())
    return [vars(one) for one in ceilings], points


def _plain(point: Point, ceilings: Ceilings) -> dict[str, Any]:
    return {
        **vars(point),
        "bytes_per_s": point.num_bytes / point.seconds,
        "operations_per_s": point.operations / point.seconds,
        "share": point.share(ceilings),
    }


def heading(report: dict[str, Any]) -> str:
    """The first and last ceilings, and the range in which they varied."""
    lines = [f"{report['shape']} at level {report['level']}, {report['threads']} threads"]
    for name, text, unit in (
        ("read", "read bandwidth", "GB/s"), ("bf16", "bf16 peak", "GFLOP/s"), ("int8", "int8 peak", "GOP/s"),
    ):  # fmt: skip
        values = [ceilings[name] / 1e9 for ceilings in report["ceilings"]]
        lines.append(
            f"  {text:15} {values[0]:8.1f} before, {values[-1]:8.1f} {unit} after "
            f"(drift {values[-1] / values[0] - 1:+.1%}; {min(values):.1f} .. {max(values):.1f} of {len(values)})"
        )
    return "\n".join(lines)


def table(points: list[dict[str, Any]]) -> Table:
    found = Table()
    found.add_column("operation")
    found.add_column("shape")
    for name in ("time us", "GB/s", "GFLOP/s", "of ceiling"):
        found.add_column(name, justify="right")
    for point in points:
        operations = f"{point['operations_per_s'] / 1e9:.0f}" if point["operations"] else ""
        found.add_row(
            point["op"], point["shape"], f"{point['seconds'] * 1e6:.1f}", f"{point['bytes_per_s'] / 1e9:.1f}",
            operations, f"{point['share']:.0%}",
        )  # fmt: skip
    return found


def _words(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)
