"""Gives memory that loading borrowed back to the system.

Loading copies matrices one after the other, and also allocates small tensors that stay. If glibc carves these out of
the hole that a copy has left, the next copy no longer fits there, and the heap may end up with holes as large as a
small model. Whether that happens depends on the order in which threads allocate.
"""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Release all unused whole pages of the C library's heap; does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
