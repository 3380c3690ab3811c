"""How much is done, where time would say it badly: in calls, which no other process changes."""

from __future__ import annotations

import sys
from collections.abc import Callable


def num_calls(function: Callable[[], object]) -> int:
    """Of Python's and C's functions, while `function` runs."""
    events: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(before)
    return sum(event.endswith("call") for event in events)
