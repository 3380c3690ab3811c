"""What is measured, and what a step may hold by it."""

from __future__ import annotations

import pytest
from tests.engine_core.harness import Harness
from tests.fakes import make_record

from pagoda_engine_core.scheduling.speed import LEAST_TOKENS, Speed
from pagoda_proto.steps import StepPlan


def step(*num_tokens: int) -> tuple[int, int]:
    return sum(num_tokens), len(num_tokens)


def test_only_steps_with_prompts_are_measurements() -> None:
    speed = Speed(2048, 0.1)
    for size, seconds in ((step(), 1.0), (step(*[1] * 256), 1.0), (step(1, 63), 1.0), (step(100), 5e-324)):
        speed.observe(*size, seconds)
        assert not speed.tokens_per_s
    speed.observe(*step(1, 99), 25.0)
    assert speed.tokens_per_s == 4.0
    for _ in range(20):  # the worker has become slower; later measurements count more
        speed.observe(*step(100), 100.0)
    assert speed.tokens_per_s == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    ("tokens_per_s", "limit_s", "num_decodes", "expected"),
    [
        (0.0, 0.1, 8, 2048),  # nothing is known
        (4000.0, 0.1, 0, 2048),  # nobody waits for a token
        (4000.0, 0.0, 8, 2048),  # not asked for
        (4000.0, 0.1, 8, 408),
        (10.0, 0.1, 8, 8 + LEAST_TOKENS),
        (1e9, 0.1, 8, 2048),
    ],
)
def test_prompts_beside_streams_take_no_longer_than_the_limit(
    tokens_per_s: float, limit_s: float, num_decodes: int, expected: int
) -> None:
    speed = Speed(2048, limit_s)
    speed.tokens_per_s = tokens_per_s
    assert speed.step_tokens(num_decodes) == expected


def prompt_tokens(plan: StepPlan) -> int:
    return sum(chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1)


@pytest.mark.parametrize("prompt_step_s", [0.1, 0.0])
def test_a_stream_does_not_wait_for_long_prompts(prompt_step_s: float) -> None:
    """At 2000 tokens a second, a tenth of a second is 200 tokens; without streams a step is full."""
    harness = Harness(num_blocks=2048, prompt_step_s=prompt_step_s)
    harness.add(make_record([1] * 100, max_tokens=50))
    harness.plan()
    harness.land(forward_s=0.05)
    for _ in range(3):
        harness.add(make_record([2] * 1000, max_tokens=2))
    harness.step()
    assert prompt_tokens(harness.plans[-1]) == (200 if prompt_step_s else 3 * harness.config.chunk_size)
    harness.drain()
    harness.check_all()


@pytest.mark.parametrize("num_long", [1, 3])
def test_a_short_prompt_beside_a_stream_does_not_wait_for_long_ones(num_long: int) -> None:
    harness = Harness(num_blocks=8192)
    harness.add(make_record([1] * 100, max_tokens=100))
    harness.plan()
    harness.land(forward_s=0.05)
    for _ in range(num_long):
        harness.add(make_record([2] * 4000, max_tokens=2))
    harness.step()
    harness.step()
    assert prompt_tokens(harness.plans[-1]) == 200, "nobody else waits: the step is theirs"
    short = harness.add(make_record([3] * 10, max_tokens=2))
    harness.step()
    harness.step()
    assert short.choices[0].output_ids
    harness.drain()
    harness.check_all()
