"""How many examples a property that is dear is tried with: few in the suite, a thousand by `--hypothesis-profile`."""

from __future__ import annotations

from hypothesis import settings

THOROUGH = "thorough"


def few(count: int) -> int:
    return settings().max_examples if settings.get_current_profile_name() == THOROUGH else count
