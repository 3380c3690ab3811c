"""When the kernel library is recompiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda_worker.kernels.cpu import build


def test_a_library_is_current_that_is_younger_than_all_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, library = tmp_path / "csrc", tmp_path / "library.so"
    source.mkdir()
    for name in ("one.h", "two.cpp"):
        (source / name).touch()
    monkeypatch.setattr(build, "SOURCE", source)
    assert not build.is_current(library)
    library.touch()
    born = library.stat().st_mtime_ns
    for seconds, current in ((-1, False), (10, True)):
        os.utime(library, ns=(born, born + seconds * 10**9))
        assert build.is_current(library) == current
    os.utime(source / "two.cpp", ns=(born, born + 20 * 10**9))
    assert not build.is_current(library)
