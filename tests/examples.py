"""How many examples an expensive property gets: few in the suite, a thousand with `--hypothesis-profile thorough`."""

from __future__ import annotations

from hypothesis import settings

THOROUGH = "thorough"


def few(count: int) -> int:
    return settings().max_examples if settings.get_current_profile_name() == THOROUGH else count
