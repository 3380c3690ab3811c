"""Values that make no sense are refused by name, all at once."""

from __future__ import annotations

from dataclasses import fields

import pytest

from pagoda_gateway.config import GatewayConfig
from pagoda_proto import times

TIMES = [field.name for field in fields(GatewayConfig) if field.name.endswith("_s")]
OFF_AT_0 = {"resume_wait_s", "ping_interval_s", "drain_timeout_s", "lame_duck_s", "ticket_grace_s"}


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://Chat.example", "https://*.example"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="allowed_origins: an origin is") as caught:
        GatewayConfig(allowed_origins=f"https://fine.example,{origin}")
    assert origin in str(caught.value)


def test_streams_wait_as_long_as_the_ladder_says() -> None:
    assert GatewayConfig().resume_wait_s == times.RESUME_WAIT_S


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_every_time_is_one(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*, got {value}"):
        GatewayConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TIMES)
def test_zero_is_taken_where_it_means_something(name: str) -> None:
    if name in OFF_AT_0:
        GatewayConfig(**{name: 0.0})  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=rf"{name} must be between 0\.1 and"):
        GatewayConfig(**{name: 0.0})  # type: ignore[arg-type]


def test_pings_are_no_flood() -> None:
    with pytest.raises(ValueError, match=r"ping_interval_s must be 0 or at least 0\.1, got 0\.001"):
        GatewayConfig(ping_interval_s=0.001)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ValueError) as error:
        GatewayConfig(port=-1, max_prompts=0, body_timeout_s=0.0, drain_timeout_s=-1.0)
    for name in ("port", "max_prompts", "body_timeout_s", "drain_timeout_s"):
        assert name in str(error.value)
