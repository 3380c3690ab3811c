from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.worker.kernels.backends import BACKENDS
from tests.worker.kernels.levels import levels

from pagoda_worker.kernels.cpu.library import Library
from pagoda_worker.kernels.cpu.native import NativeOps


@pytest.fixture(scope="module", params=levels())
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    """The C++ library at every level."""
    opened = Library([-1, -1], request.param)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def ops(library: Library) -> NativeOps:
    """The C++ back end at every level."""
    return NativeOps(library)


@pytest.fixture(params=BACKENDS, ids=lambda one: f"{one[0]}-{one[1]}".replace("torch.", ""))
def backend(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """Name and dtype of a back end: see `ops_of`."""
    name, dtype = request.param
    return name, dtype


@pytest.fixture
def inference() -> Iterator[None]:
    """The same random numbers for each test, and no gradients."""
    torch.manual_seed(1)
    with torch.inference_mode():
        yield
