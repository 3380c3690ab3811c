"""Memory that loading borrowed goes back to the system.

Loading makes copies of matrices, one after the other, and beside them small tensors that stay. Where glibc cuts these
from the hole that a copy has left, the next copy does not fit there any more, and in the end its heap has holes as
large as a small model: at times, for that depends on the order in which threads ask.
"""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """All whole pages of the C library's heap that nothing is in; without glibc it does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
