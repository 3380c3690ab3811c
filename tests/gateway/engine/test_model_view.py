"""On which models a request may continue, and what counts as progress."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_gateway.engine.model_view import EngineProgress, ModelView, protocol_problem
from pagoda_proto.records import SESSION_PROTOCOL, Begun, Load
from pagoda_proto.steps import Versions

BEGUN = Begun(model_fingerprint="m1", numerics_id="n1")


@pytest.mark.parametrize(
    ("view", "final"),
    [
        (ModelView(fingerprint="m1", numerics_id="n1"), None),
        (ModelView(), None),  # nothing is known yet: the engine core holds the request until it is
        (ModelView(fingerprint="m1"), None),
        (ModelView(fingerprint="m2", numerics_id="n1"), True),
        (ModelView(fingerprint="m2", numerics_id="n2"), True),
        (ModelView(fingerprint="m1", numerics_id="n2"), False),
    ],
)
def test_begun_requests_are_bound_to_weights_and_numerics(view: ModelView, final: bool | None) -> None:
    obstacle = view.obstacle(BEGUN, 512)
    assert (None if obstacle is None else obstacle.final) is final


@pytest.mark.parametrize(("had", "has", "fits"), [(512, 512, True), (0, 512, True), (512, 0, True), (512, 600, False)])
def test_a_prompt_is_bound_to_its_vocabulary(had: int, has: int, fits: bool) -> None:
    assert (ModelView(fingerprint="m2", vocab_size=has).obstacle(None, had) is None) is fits


def test_a_protocol_is_ours_or_named() -> None:
    assert protocol_problem(Load(engine_id="e", protocol=SESSION_PROTOCOL)) == ""
    old = protocol_problem(Load(engine_id="e"))
    assert "version 0" in old
    assert str(SESSION_PROTOCOL) in old


def test_an_engine_core_may_choose_any_version_that_is_spoken_here() -> None:
    spoken = Versions(4, 6)
    problems = {version: protocol_problem(Load(engine_id="e", protocol=version), spoken) for version in range(3, 8)}
    assert [version for version, problem in problems.items() if not problem] == [4, 5, 6]
    assert problems[7] == "speaks version 7 of the session's protocol, this gateway 4 to 6"


def load(seconds: float, engine_id: str = "e") -> Load:
    return Load(engine_id=engine_id, seconds_since_progress=seconds)


def test_a_first_load_is_no_progress() -> None:
    progress = EngineProgress()
    progress.on_load(load(0.0), 10.0)
    progress.on_load(load(1.0), 11.0)
    assert progress.at == -float("inf")


def test_a_step_is_when_it_was_and_not_when_it_was_told() -> None:
    progress = EngineProgress()
    progress.on_load(load(5.0), 10.0)
    progress.on_load(load(2.0), 14.0)
    assert progress.at == 12.0
    progress.on_load(load(32.0), 44.0)
    assert progress.at == 12.0


def test_another_life_begins_without_progress_of_its_own() -> None:
    progress = EngineProgress()
    progress.on_load(load(5.0), 10.0)
    progress.on_load(load(0.0), 11.0)
    progress.on_load(load(0.0, "other"), 50.0)
    assert progress.at == 11.0
    progress.on_token(60.0)
    assert progress.at == 60.0


@given(st.lists(st.tuples(st.floats(0.1, 5.0), st.booleans()), max_size=30))
def test_progress_is_never_later_than_the_last_step(moments: list[tuple[float, bool]]) -> None:
    progress, now, stepped_at, seen = EngineProgress(), 0.0, 0.0, False
    progress.on_load(load(0.0), now)
    for wait_s, steps in moments:
        now += wait_s
        if steps:
            stepped_at = now - 0.05
            seen = True
        progress.on_load(load(now - stepped_at), now)
        assert progress.at <= stepped_at + 1e-6
        assert seen or progress.at == -float("inf")
