"""Without a GPU, or with --device cpu, Triton's interpreter runs the kernels: tests/conftest.py has asked for it before
Triton is imported.

Where Triton cannot be installed there is no such back end and nothing here to collect.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure() -> None:
    """Triton is imported here, and not with this file, which may be read before options are."""
    if find_spec("triton") is not None:
        from tests.worker.kernels.triton.interpreter import mend

        mend()


@pytest.fixture(autouse=True)
def _as_on_a_device() -> Iterator[None]:
    """Kernels divide by zero and overflow in lanes nobody reads; a device says nothing about it.

    The work that is left to torch is small: threads would spin more than they compute, where others compute, too.
    """
    torch.manual_seed(1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode(), np.errstate(all="ignore"):
        yield
    torch.set_num_threads(threads)
