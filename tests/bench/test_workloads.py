"""What bench/compare.py sends and what it concludes: pure functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.workloads import COPY, WORKLOADS, Ratio, Workload, parse_workloads, ratios_to_first, ratios_within, turns

from pagoda.bench import command
from pagoda.cli import parser_of

REPORT = {
    "e2e_ms": {"p50": 500.0}, "output_tokens_per_s": 321.0,
}  # fmt: skip


def workload(figure: str) -> Workload:
    return Workload(clients=4, requests=8, input_len=100, output_len=10, figure=figure)


@pytest.mark.parametrize(("figure", "value"), [("prompt", 200.0), ("output", 321.0)])
def test_figures_are_rates(figure: str, value: float) -> None:
    assert workload(figure).value(REPORT) == value


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_load_generator_understands_every_workload(name: str) -> None:
    chosen = WORKLOADS[name]
    rows = Path("rows.jsonl") if chosen.source == COPY else None
    arguments = parser_of("bench").parse_args(["bench", "serve", *chosen.flags("salt 1", rows)])
    assert arguments.concurrency == chosen.clients
    assert arguments.salt == "salt 1"
    assert arguments.extra_body == chosen.body | ({} if rows is None else {"cache_salt": "salt-1"})
    assert arguments.workload == rows
    assert rows is not None or len(command._rows(arguments)) == chosen.requests


def test_every_client_has_a_request_at_once() -> None:
    assert all(one.requests >= one.clients for one in WORKLOADS.values())
    assert all(one.than == "" or one.than in WORKLOADS for one in WORKLOADS.values())


def test_what_a_workload_is_compared_with_comes_along() -> None:
    assert list(parse_workloads("top-p-8,decode-1")) == ["greedy-8", "top-p-8", "decode-1"]
    with pytest.raises(ValueError, match=r"workloads are decode-1, .*got 'decode-2'"):
        parse_workloads("decode-2")


def test_a_ratio_is_the_median_of_the_rounds_with_its_spread() -> None:
    ratio = Ratio.of([2.0, 30.0, 4.0], [1.0, 10.0, 4.0])
    assert ratio == (2.0, 1.0, 3.0)
    assert str(ratio) == "2.00 (1.00-3.00)"
    with pytest.raises(ValueError):
        Ratio.of([1.0], [1.0, 2.0])


def test_ratios_between_sides_and_within_one() -> None:
    figures = {"greedy-8": {"a": [4.0], "b": [8.0]}, "top-p-8": {"a": [3.0], "b": [2.0]}}
    assert ratios_to_first(figures) == {"greedy-8": {"b": (0.5, 0.5, 0.5)}, "top-p-8": {"b": (1.5, 1.5, 1.5)}}
    assert ratios_within(figures) == {"top-p-8": {"a": (0.75, 0.75, 0.75), "b": (0.25, 0.25, 0.25)}}


def test_each_side_is_first_in_its_turn() -> None:
    rounds = [turns(["a", "b", "c"], number) for number in range(4)]
    assert [order[0] for order in rounds] == ["a", "b", "c", "a"]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)


def test_bodies_are_json_whatever_they_hold() -> None:
    body: dict[str, Any] = {"temperature": 1.0, "stop": ['"']}
    flags = Workload(1, 1, 1, 1, body=body).flags("", None)
    assert json.loads(flags[flags.index("--extra-body") + 1]) == body
