"""What is left of a key's limits, as the response headers of each API."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from pagoda_gateway.keys.quota import NAMES, Left

Headers = list[tuple[bytes, bytes]]
QuotaHeaders = Callable[[Sequence[Left], float], Headers]
"""Takes what is left, and the time in Unix seconds."""

OPENAI = "x-ratelimit-{part}-{name}"
ANTHROPIC = "anthropic-ratelimit-{name}-{part}"
PARTS = ("limit", "remaining", "reset")


def all_names() -> list[str]:
    """The names of all these headers."""
    return [form.format(name=name, part=part) for form in (OPENAI, ANTHROPIC) for name in NAMES for part in PARTS]


def openai_quota_headers(left: Sequence[Left], now: float) -> Headers:
    """The reset time is a duration, such as 6m0.5s."""
    return _headers(OPENAI, left, lambda one: _span(one.reset_s))


def anthropic_quota_headers(left: Sequence[Left], now: float) -> Headers:
    """The reset time is a timestamp as in RFC 3339."""
    return _headers(ANTHROPIC, left, lambda one: _time(now + one.reset_s))


def _headers(form: str, left: Sequence[Left], reset: Callable[[Left], str]) -> Headers:
    found = []
    for one in left:
        for part, value in zip(PARTS, (one.limit, one.remaining, reset(one)), strict=True):
            found.append((form.format(name=one.name, part=part).encode(), str(value).encode()))
    return found


def _span(seconds: float) -> str:
    """In milliseconds, rounded up."""
    ms = math.ceil(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms"
    hours, rest = divmod(ms, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest / 1000:g}s"


def _time(at: float) -> str:
    return datetime.fromtimestamp(math.ceil(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
