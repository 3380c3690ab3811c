"""Steps with experts and adapters in bench/gpu.py: what is counted, and which adapter each row has."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench.device import correctness, steps
from bench.device.adapters import adapt, slot_options
from bench.device.hardware import Host
from bench.device.job import Job, prompts, serve
from bench.device.models import SHAPES, load, runner_of, shapes, spec_of, weight_bytes
from bench.device.report import MISSED
from bench.device.steps import REPLAYED, Replayed
from tests.bench.steady import outputs_of

from pagoda_worker.kernels.ops import Needs
from pagoda_worker.kernels.reference import ReferenceOps

OUTPUTS = 12


def job(**changes: Any) -> Job:
    facts = {"smoke": False, "kernels": "torch", "block_size": 16, "copy": 1e9, "flops": 1e15, "until": 0.0}
    return Job(Host(), **(facts | {"until": time.monotonic() + 100} | changes))  # type: ignore[arg-type]


def test_the_shape_with_experts_has_the_size_it_is_named_after() -> None:
    spec = spec_of(SHAPES["OLMoE"])
    assert [weight_bytes(spec) / 2e9, weight_bytes(spec, 1) / 2e9] == pytest.approx([6.814, 1.177], rel=1e-3)


def test_a_step_reads_the_experts_that_its_rows_are_expected_to_choose() -> None:
    """One row chooses 8 of 64; of a second row's 8, seven in eight are new on average."""
    spec = spec_of(SHAPES["OLMoE"])
    expert = 16 * 2 * 3 * 2048 * 1024  # bytes of one expert over all layers
    read = [weight_bytes(spec, rows) for rows in (1, 2, 10_000)]
    assert [weight_bytes(spec) - one for one in read] == [56 * expert, 49 * expert, 0]
    dense = spec_of(SHAPES["8B"])
    assert weight_bytes(dense, 1) == weight_bytes(dense)


def test_the_floor_of_a_step_is_in_what_it_reads_or_in_what_it_multiplies() -> None:
    """A row is multiplied by the experts that it chose, and by no others."""
    spec = spec_of(SHAPES["OLMoE"])
    kv = 8 * 100 * 16 * 16 * 128 * 2 * 2
    reading = steps._floor_ms(job(), spec, 8, 100)
    multiplying = steps._floor_ms(job(copy=1e15, flops=1e9), spec, 8, 100)
    assert reading == pytest.approx((weight_bytes(spec, 8) + kv) / 1e6)
    assert multiplying == pytest.approx(8 * weight_bytes(spec, 1) / 1e6)


def test_rows_have_the_made_up_adapters_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceOps, "capturable", True)  # so that the model itself is what is loaded
    options = {"kernels": "reference", "dtype": "float32", "num_blocks": 40, "block_size": 16, "max_rows": 4}
    options |= {"enforce_eager": True}
    loaded, config, _ = load(Host(), shapes(smoke=True)["8B"], **options, **slot_options(2, 32))
    given = prompts(1, 20, 512)
    plain = serve(runner_of(Host(), loaded, config), given, OUTPUTS)[0][0]
    adapters = adapt(loaded, 2, 32)
    runner = runner_of(Host(), replace(loaded, adapters=adapters), config)
    (one, other, none, again), _ = outputs_of(runner, given * 4, OUTPUTS, [*adapters.known, None])
    assert (none, again) == (plain, one)
    assert len({tuple(tokens) for tokens in (one, other, none)}) == 3
    sizes = [(64, 128), (64, 64), (64, 64), (128, 64), (64, 96), (64, 96), (96, 64)]
    assert adapters.num_bytes == 2 * 32 * 4 * sum(map(sum, sizes))


def test_every_replayed_shape_has_room_for_its_rows() -> None:
    assert {name: one.max_rows for name, one in REPLAYED.items()} == {"OLMoE": 32, "0.6B": 16}
    assert set(REPLAYED) <= set(SHAPES)


def test_adapters_are_held_against_the_same_step_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio is the median of rounds; the ceiling assumes that adapters cost only the time to read them."""
    took = {None: iter([2e-3, 4e-3, 1e-3]), "a": iter([4e-3, 5e-3, 1e-3])}

    class Timed:
        def __init__(self, one: str | None) -> None:
            self.one = one

        def seconds_of(self, count: int) -> float:
            return next(took[self.one])

    class Some:
        known, count, num_bytes = ("a",), 1, 10**6

    monkeypatch.setattr(steps, "_steady", lambda job, runner, batch, adapters: Timed(adapters[0]))
    wanted: Any = Replayed(adapted=2, adapters=1, rank=8)
    (line,) = steps._compare(job(), "ratio", None, wanted, Some())  # type: ignore[arg-type]
    assert (line.value, line.bar, line.verdict) == (0.8, 0.95, MISSED)
    assert line.ceiling == pytest.approx(2 / 3)


def test_a_self_check_asks_for_experts_and_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Needs] = []

    class Checked:
        numerics = "as it is"

    def load_ops(device: torch.device, choice: str, needs: Needs) -> tuple[Checked, list[str]]:
        asked.append(needs)
        return Checked(), []

    monkeypatch.setattr(correctness, "load_ops", load_ops)
    assert len(list(correctness._self_check(job()))) == len(asked) == 3
    assert all(needs.adapters and needs.experts for needs in asked)
