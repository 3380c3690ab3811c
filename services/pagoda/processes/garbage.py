"""Python's search for garbage in cycles holds up every thread of its process for as long as it looks."""

from __future__ import annotations

import gc

STARTING = (1_000_000, 5, 100)  # new objects: more than a start makes, and yet a limit
COLLECTED_AFTER = (20_000, 5, 100)  # new objects, and times: what a large body is made of is looked through but once


def put_off_collections() -> None:
    """What a start imports stays, so looking for garbage in it, a tenth of the time of a start, would find none."""
    gc.set_threshold(*STARTING)


def keep_out_of_collections() -> None:
    """What there is now stays, so no collection looks through it again: that takes 100 ms, in which no stream gets
    a token."""
    gc.collect()
    gc.freeze()
    gc.collect()  # of the rest, by whose size the next full collection is put off
    gc.set_threshold(*COLLECTED_AFTER)
