from __future__ import annotations

import math
from dataclasses import fields

import pytest

from pagoda_engine_core.config import EngineConfig

NUMBERS = [
    field.name
    for field in fields(EngineConfig)
    if isinstance(getattr(EngineConfig(), field.name), int | float) and field.name != "prefix_cache"
]


@pytest.mark.parametrize("value", [-5, math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_bounds(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        EngineConfig(**{name: value})


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        EngineConfig(max_rows=0, metrics_port=70_000, policy="lottery", worker_dead_s=9.0, queue_timeout_s=math.nan)
    for name in ("max_rows", "metrics_port", "policy", "worker_dead_s must be below worker_lease_s", "queue_timeout_s"):
        assert name in str(raised.value)


def test_a_host_for_metrics_needs_their_port() -> None:
    with pytest.raises(ValueError, match=r"metrics_host needs a metrics_port, got '0\.0\.0\.0'"):
        EngineConfig(metrics_host="0.0.0.0")
    assert EngineConfig(metrics_host="0.0.0.0", metrics_port=7702).metrics_port == 7702


def test_a_model_length_that_no_request_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len must be 0 or between 2 and 2147483647, got 1"):
        EngineConfig(max_model_len=1)
