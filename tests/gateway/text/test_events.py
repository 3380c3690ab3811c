"""Adjacent events of one kind are merged without changing their content."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pagoda_gateway.text.events import CallArguments, CallBegun, CallEnded, Said, Text, Thought, merged

WORD = st.sampled_from(["a", "", "bc"])
INDEX = st.integers(0, 1)
SAID = st.one_of(
    st.builds(Text, WORD),
    st.builds(Thought, WORD),
    st.builds(CallBegun, INDEX, WORD),
    st.builds(CallArguments, INDEX, WORD),
    st.builds(CallEnded, INDEX),
)


def kind(event: Said) -> tuple[object, ...]:
    return type(event), getattr(event, "index", None)


def letters(events: list[Said]) -> list[tuple[object, ...]]:
    """One entry for each letter of mergeable events, and for each other event."""
    found: list[tuple[object, ...]] = []
    for event in events:
        whole = isinstance(event, CallBegun | CallEnded)
        found += [(event,)] if whole else [(*kind(event), letter) for letter in event.text]
    return found


@given(st.lists(SAID, max_size=12))
def test_nothing_is_lost_and_no_neighbours_are_left(events: list[Said]) -> None:
    found = merged(events)
    assert letters(found) == letters(events)
    alike = [one for one, other in pairwise(found) if kind(one) == kind(other)]
    assert all(isinstance(one, CallBegun | CallEnded) for one in alike)
