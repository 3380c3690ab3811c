"""The workloads of `compare.py`, and the one figure it takes from each load. Everything here is pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

RANDOM = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # explicit, because servers' defaults differ
COPY, CONTINUED = "copy", 256  # prompt tokens of a copied text


@dataclass(frozen=True)
class Workload:
    """A closed loop of `clients`. Prompts are random token ids, lengths are exact, end of sequence is ignored.

    `figure`: "output" (output tokens per second of all clients) or "prompt" (prompt tokens per second until the end of
    an answer of one token). Both are computed from when answers begin and end, not from when text arrives: a model with
    random weights may generate many tokens that are not text yet.
    `primed`: the load is sent twice and the second time counts, when the prompts are in every server's prefix cache
    (and the answers in the memory of one that drafts from them).
    `than`: another workload, with which this one is compared on the same server.
    `source`: COPY for prompts from `copying.py`.
    """

    clients: int
    requests: int
    input_len: int
    output_len: int
    figure: str = "output"
    primed: bool = False
    body: dict[str, Any] = field(default_factory=dict)
    than: str = ""
    source: str = ""

    @property
    def tokens_per_client(self) -> int:
        return self.input_len + self.output_len

    def flags(self, salt: str, rows: Path | None) -> list[str]:
        """Flags of `pagoda bench serve`. `rows` is the file of a workload with a `source`."""
        flags, body = ["--concurrency", str(self.clients), "--salt", salt], dict(self.body)
        if rows is not None:
            # The same prompts every time: nothing may be remembered of them, and no load's beginning is special.
            flags += ["--warmup", "0", "--workload", str(rows)]
            body |= {"cache_salt": salt.replace(" ", "-")}
        else:
            flags += ["--warmup", "1"]
            flags += ["--num-requests", str(self.requests)]
            flags += ["--input-len", str(self.input_len), "--output-len", str(self.output_len)]
        if body:
            flags += ["--extra-body", json.dumps(body)]
        return flags

    def value(self, report: dict[str, Any]) -> float:
        """The figure in a report of `pagoda bench serve`; higher is better."""
        if self.figure == "prompt":
            return 1000 * self.input_len / float(report["e2e_ms"]["p50"])
        return float(report["output_tokens_per_s"])


WORKLOADS = {
    "decode-1": Workload(1, 2, 32, 128, primed=True),
    "served-1": Workload(1, 3, 256, 128),
    "served-8": Workload(8, 16, 256, 128),
    "served-8-64": Workload(8, 16, 256, 64),
    "served-16": Workload(16, 32, 256, 64),
    "served-32": Workload(32, 32, 256, 128),
    "prefill-1024": Workload(1, 4, 1024, 1, "prompt"),
    "prefill-2048": Workload(1, 2, 2048, 1, "prompt"),
    "long-4k": Workload(4, 4, 3968, 64, primed=True),
    "greedy-8": Workload(8, 16, 64, 128),
    "top-p-8": Workload(8, 16, 64, 128, body=RANDOM | {"top_p": 0.9}, than="greedy-8"),
    "copy-1": Workload(1, 4, CONTINUED, 128, source=COPY),
    "random-1": Workload(1, 4, CONTINUED, 128, body=RANDOM | {"seed": 1}),
}
DEFAULT = "decode-1,served-16,served-32,prefill-2048"


def parse_workloads(text: str) -> dict[str, Workload]:
    """Workloads by name, NAME,NAME,..; includes those that they are compared with. Raises ValueError."""
    found: dict[str, Workload] = {}
    for name in filter(None, text.split(",")):
        if name not in WORKLOADS:
            raise ValueError(f"workloads are {', '.join(WORKLOADS)}; got {name!r}")
        if WORKLOADS[name].than:
            found[WORKLOADS[name].than] = WORKLOADS[WORKLOADS[name].than]
        found[name] = WORKLOADS[name]
    return found


class Ratio(NamedTuple):
    """The median over rounds of a/b, and the smallest and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, a: Sequence[float], b: Sequence[float]) -> Ratio:
        """`a` and `b` must be in the order of rounds: only figures of the same round are comparable."""
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


Figures = dict[str, dict[str, list[float]]]
"""Workload -> side -> one figure per round."""


def ratios_to_first(figures: Figures) -> dict[str, dict[str, Ratio]]:
    """Workload -> other side -> first side / other side."""
    found = {}
    for workload, sides in figures.items():
        first, *others = sides
        found[workload] = {other: Ratio.of(sides[first], sides[other]) for other in others}
    return found


def ratios_within(figures: Figures) -> dict[str, dict[str, Ratio]]:
    """Workload with a `than` -> side -> its figure / that of the workload it is compared with."""
    return {
        name: {side: Ratio.of(values, figures[WORKLOADS[name].than][side]) for side, values in sides.items()}
        for name, sides in figures.items()
        if WORKLOADS[name].than
    }


def turns(sides: Sequence[str], number: int) -> list[str]:
    """The order of sides in a round: each is first once before any is first again."""
    start = number % len(sides)
    return [*sides[start:], *sides[:start]]
