from __future__ import annotations

import math
from dataclasses import fields

import pytest

from pagoda_engine_core.config import EngineConfig

NUMBERS = [field for field in fields(EngineConfig) if isinstance(getattr(EngineConfig(), field.name), int | float)]
FLOATS = [field.name for field in NUMBERS if isinstance(getattr(EngineConfig(), field.name), float)]
WHOLE = [field.name for field in NUMBERS if type(getattr(EngineConfig(), field.name)) is int]


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0, -math.inf])
@pytest.mark.parametrize("name", FLOATS)
def test_no_time_is_negative_or_not_a_number(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0, got {value}"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("name", WHOLE)
def test_no_count_is_negative(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least -?[01], got -5"):
        EngineConfig(**{name: -5})


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        EngineConfig(max_rows=0, metrics_port=70_000, policy="lottery", worker_dead_s=9.0, queue_timeout_s=math.nan)
    for name in ("max_rows", "metrics_port", "policy", "worker_dead_s must be below worker_lease_s", "queue_timeout_s"):
        assert name in str(raised.value)


def test_what_the_offline_way_needs_is_allowed() -> None:
    EngineConfig(queue_timeout_s=math.inf, max_queued_requests=2**62, max_queued_tokens=2**62)
