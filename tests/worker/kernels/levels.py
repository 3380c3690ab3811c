"""The instruction set levels of the C++ kernels that this machine can run."""

from __future__ import annotations

import ctypes

from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.kernels.cpu.library import LEVELS


def levels() -> list[str]:
    if not LIBRARY.exists():
        return []
    handle = ctypes.CDLL(str(LIBRARY))
    return [name for index, name in enumerate(LEVELS) if handle.pagoda_supports(index)]
