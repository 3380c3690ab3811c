"""Tunes Python's cyclic garbage collector, which stops every thread of its process while it runs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STARTING = (1_000_000, 5, 100)  # thresholds; the first is in new objects: more than a start makes, but still a limit
COLLECTED_AFTER = (20_000, 5, 100)  # likewise, so that the objects of a large body are examined only once


def put_off_collections() -> None:
    """What a start imports stays alive, so collecting it would find nothing but take a tenth of the startup time."""
    gc.set_threshold(*STARTING)


def keep_out_of_collections() -> None:
    """Exempt all current objects, which stay alive: to examine them takes 100 ms, in which no stream gets a token."""
    gc.collect()
    gc.freeze()
    gc.collect()  # the size of the rest determines how long the next full collection is deferred
    gc.set_threshold(*COLLECTED_AFTER)


_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []  # the thresholds found by each `fewer_collections` that has not ended


@contextmanager
def fewer_collections() -> Iterator[None]:
    """For a time in which many objects are made and stay alive: each would be examined again and again."""
    with _lock:
        _before.append(gc.get_threshold())
        if 0 < _before[-1][0] < COLLECTED_AFTER[0]:  # else collections are off, or rare already
            gc.set_threshold(*COLLECTED_AFTER)
    try:
        yield
    finally:
        with _lock:
            found = _before.pop()
            if not _before:  # else it is what another one set
                gc.set_threshold(*found)
