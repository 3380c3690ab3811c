"""Every section measures something: it calls our own code, which changes."""

from __future__ import annotations

import pytest

from bench import engine_core


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("ROWS", 4), ("WARM_UP_STEPS", 2), ("STEPS", 4)):
        monkeypatch.setattr(engine_core, name, size)


@pytest.mark.parametrize("section", ["pass", "wire", "tokens"])
def test_a_section_measures(section: str) -> None:
    measure = {"pass": engine_core.measure_pass, "wire": engine_core.measure_wire, "tokens": engine_core.measure_tokens}
    figures = measure[section]()
    assert figures
    assert all(value >= 0 for line in figures.values() for value in line.values())


def test_groups_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "GROUP_STEPS", 4)
    figures = engine_core.measure_groups(0.02, 3, seed=0)
    waits = figures["wait for a plan, ms"]
    assert 0 <= waits["p50"] <= waits["p99"] <= waits["max"]
    assert figures["loop thread, ms/step of a worker"]["mean"] > 0
