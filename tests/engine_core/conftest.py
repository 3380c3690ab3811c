from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A private directory with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="pagoda-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
