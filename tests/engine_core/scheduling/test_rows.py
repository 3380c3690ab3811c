from __future__ import annotations

import pytest
from tests.fakes import make_record

from pagoda_engine_core.scheduling.request import Choice, Request
from pagoda_engine_core.scheduling.rows import OrderedChoices


def placed(place: float) -> Choice:
    choice = Request(make_record(), max_output_tokens=8, now=0.0).choices[0]
    choice.order = (place,)
    return choice


def test_ordered_choices_stay_in_order() -> None:
    queue = OrderedChoices()
    first, second, third = map(placed, range(3))
    for choice in (second, third, first):
        queue.add(choice)
    assert list(queue) == [first, second, third]
    queue.remove(second)
    assert list(queue) == [first, third]
    assert (len(queue), queue[0]) == (2, first)


def test_removing_what_is_not_there_is_an_error() -> None:
    queue = OrderedChoices()
    here, same_place, last = map(placed, (1, 1, 2))
    queue.add(here)
    for absent in (same_place, last):
        with pytest.raises(ValueError, match="not here"):
            queue.remove(absent)
    assert list(queue) == [here]
