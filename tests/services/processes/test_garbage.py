from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pagoda.processes.garbage import COLLECTED_AFTER, fewer_collections

OWN = (901, 11, 12)


@pytest.fixture
def own_thresholds() -> Iterator[None]:
    found = gc.get_threshold()
    gc.set_threshold(*OWN)
    yield
    gc.set_threshold(*found)


@pytest.mark.usefixtures("own_thresholds")
def test_thresholds_are_those_found_again_afterwards() -> None:
    with pytest.raises(KeyError), fewer_collections():
        assert gc.get_threshold() == COLLECTED_AFTER
        raise KeyError
    assert gc.get_threshold() == OWN


@pytest.mark.usefixtures("own_thresholds")
@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_that_overlap_end_in_any_order(first_to_end: int) -> None:
    both = [fewer_collections(), fewer_collections()]
    for one in both:
        one.__enter__()
    both.pop(first_to_end).__exit__(None, None, None)
    assert gc.get_threshold() == COLLECTED_AFTER
    both.pop().__exit__(None, None, None)
    assert gc.get_threshold() == OWN


@pytest.mark.usefixtures("own_thresholds")
@pytest.mark.parametrize("size", [0, COLLECTED_AFTER[0] + 1])
def test_collections_that_are_off_or_rarer_stay_so(size: int) -> None:
    gc.set_threshold(size)
    with fewer_collections():
        assert gc.get_threshold()[0] == size
