"""Without a GPU, or with --device cpu, Triton's interpreter runs the kernels; tests/conftest.py requests it before
Triton is imported.

Where Triton cannot be installed, the back end does not exist and nothing here is collected.
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
    """Import Triton only now: this file may be imported before options are parsed."""
    if find_spec("triton") is not None:
        from tests.worker.kernels.triton.interpreter import mend

        mend()


@pytest.fixture(autouse=True)
def _as_on_a_device() -> Iterator[None]:
    """Silence numpy: kernels divide by zero and overflow in unused lanes, and a device does not warn.

    Little work is left to torch: beside other processes, its threads would spin more than compute.
    """
    torch.manual_seed(1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode(), np.errstate(all="ignore"):
        yield
    torch.set_num_threads(threads)
