"""Every section measures something: it calls our own code, which changes."""

from __future__ import annotations

import pytest

from bench import engine_core


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("ROWS", 4), ("WORKERS", 2), ("WARM_UP_STEPS", 2), ("STEPS", 4)):
        monkeypatch.setattr(engine_core, name, size)


@pytest.mark.parametrize("section", ["pass", "wire", "tokens"])
def test_a_section_measures(section: str) -> None:
    measure = {"pass": engine_core.measure_pass, "wire": engine_core.measure_wire, "tokens": engine_core.measure_tokens}
    figures = measure[section]()
    assert figures
    assert all(value >= 0 for line in figures.values() for value in line.values())
