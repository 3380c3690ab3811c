"""What adapters add beside the layers of this back end."""

from __future__ import annotations

import pytest
from tests.worker.kernels.test_low_rank import CALLS, compare
from tests.worker.kernels.triton.support import walking


@pytest.mark.parametrize("call", CALLS)
def test_adapters_add_what_they_should(call: str) -> None:
    compare(walking, call)
