"""Measuring a worker's speed, limiting step sizes by it, and choosing between swapping and recomputing; test_swapping
tests swapping itself."""

from __future__ import annotations

import pytest
from tests.engine_core.harness import Harness
from tests.fakes import make_record

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.scheduling.kv_cache import KvCache
from pagoda_engine_core.scheduling.request import Choice, Request
from pagoda_engine_core.scheduling.speed import LEAST_TOKENS, Preemption, Speed
from pagoda_proto import times
from pagoda_proto.steps import KVGroup, StepPlan

BLOCK_SIZE = 4


def speed(tokens_per_s: float = 0.0, limit_s: float = 0.1) -> Speed:
    """A Speed that has measured `tokens_per_s`; 0: nothing yet."""
    measured = Speed(2048, limit_s)
    if tokens_per_s:
        measured.observe(*step(1000), 1000 / tokens_per_s)
    return measured


def step(*num_tokens: int) -> tuple[int, int]:
    return sum(num_tokens), len(num_tokens)


def test_only_steps_with_prompts_are_measurements() -> None:
    speed = Speed(2048, 0.1)
    for size, seconds in ((step(), 1.0), (step(*[1] * 256), 1.0), (step(1, 63), 1.0), (step(100), 5e-324)):
        speed.observe(*size, seconds)
        assert not speed.tokens_per_s
    speed.observe(*step(1, 99), 25.0)
    assert speed.tokens_per_s == 4.0
    for _ in range(20):  # the worker has become slower; recent measurements weigh more
        speed.observe(*step(100), 100.0)
    assert speed.tokens_per_s == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    ("tokens_per_s", "limit_s", "num_decodes", "expected"),
    [
        (0.0, 0.1, 8, 8 + LEAST_TOKENS),  # nothing measured yet
        (4000.0, 0.1, 0, 2048),  # no stream waits for a token
        (4000.0, 0.0, 8, 2048),  # no limit set
        (4000.0, 0.1, 8, 408),
        (10.0, 0.1, 8, 8 + LEAST_TOKENS),
        (100.0, 0.1, 0, 100 * times.LONGEST_STEP_S),  # a longer step could count as hung
        (1e9, 0.1, 8, 2048),
    ],
)
def test_prompts_beside_streams_take_no_longer_than_the_limit(
    tokens_per_s: float, limit_s: float, num_decodes: int, expected: int
) -> None:
    assert speed(tokens_per_s, limit_s).step_tokens(num_decodes) == expected


def test_what_was_never_measured_comes_a_little_at_first() -> None:
    """Prompt log-probabilities cost more than prompt tokens; how much is unknown until a step has reported some."""
    measured = Speed(2048, 0.1)
    assert measured.step_tokens(8) == measured.step_tokens(8, reports=True) == 8 + LEAST_TOKENS
    measured.observe(*step(1000), 0.1)
    assert (measured.step_tokens(8), measured.step_tokens(8, reports=True)) == (1008, 8 + LEAST_TOKENS)
    measured.observe(*step(1000), 0.25, reports=True)
    assert (measured.step_tokens(8), measured.step_tokens(8, reports=True)) == (1008, 208)


def prompt_tokens(plan: StepPlan) -> int:
    return sum(chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1)


@pytest.mark.parametrize("prompt_step_s", [0.1, 0.0])
def test_a_stream_does_not_wait_for_long_prompts(prompt_step_s: float) -> None:
    """At 2000 tokens/s, 0.1 s allow 200 tokens; without a limit the step takes a full chunk of each prompt."""
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


def test_a_stream_does_not_wait_for_what_is_told_of_prompts() -> None:
    harness = Harness(num_blocks=2048)
    harness.add(make_record([1] * 100, max_tokens=50))
    harness.plan()
    harness.land(forward_s=0.05)
    harness.add(make_record([2] * 1000, max_tokens=2, prompt_logprobs=3))
    harness.plan()
    assert prompt_tokens(harness.plans[-1]) == LEAST_TOKENS
    harness.land(forward_s=0.043)  # 3000 tokens/s; only half the limit is used
    harness.plan()
    assert prompt_tokens(harness.plans[-1]) == 150
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


def make_kv(num_swap_blocks: int = 16, swap_block_s: float = 0.0) -> KvCache:
    return KvCache((KVGroup(32, 0, num_swap_blocks, swap_block_s),), BLOCK_SIZE, True)


def confirmed(kv: KvCache, num_tokens: int, num_prompt: int = 60, **params: int) -> Choice:
    """A choice with `num_tokens` computed, as confirmed by results."""
    choice = Request(make_record([1] * num_prompt, **params), max_output_tokens=8, now=0.0).choices[0]
    kv.grow(choice, num_tokens)
    choice.num_computed = num_tokens
    kv.commit(choice, num_tokens)
    return choice


def measured(tokens_per_s: float, mode: str = "auto") -> Preemption:
    return Preemption(mode, speed(tokens_per_s))


@pytest.mark.parametrize("swap_block_s", [0.9, 1.1])
def test_the_quicker_of_moving_and_computing(swap_block_s: float) -> None:
    """Computing 40 tokens at 2 tokens/s takes 20 s; swapping 10 blocks out and in takes 20 moves."""
    kv = make_kv(swap_block_s=swap_block_s)
    choice = confirmed(kv, 40)
    assert measured(2.0).swaps(choice, kv) == (swap_block_s < 1.0)
    assert measured(2.0, "swap").swaps(choice, kv)
    assert not measured(2.0, "recompute").swaps(choice, kv)


def test_what_others_share_need_not_come_back_nor_be_computed() -> None:
    """Of 10 blocks 9 are shared, so swapping takes 11 moves (10 out, 1 in) and saves computing 4 tokens."""
    for swap_block_s, swaps in ((0.17, True), (0.19, False)):  # 1.87 s of moving, 2 s of computing
        kv = make_kv(swap_block_s=swap_block_s)
        choice = confirmed(kv, 40)
        kv.groups[0].pool.share(choice.tables[0].ids[:9])
        assert measured(2.0).swaps(choice, kv) == swaps


def test_without_a_measurement_room_is_used() -> None:
    kv = make_kv()
    assert Preemption("auto", speed()).swaps(confirmed(kv, 40), kv)


def test_what_cannot_be_swapped_is_computed_again() -> None:
    preemption = Preemption("swap", speed())
    kv = make_kv(num_swap_blocks=10)
    assert preemption.swaps(confirmed(kv, 40), kv)
    assert not preemption.swaps(confirmed(kv, 41), kv), "eleven blocks do not fit"
    assert not preemption.swaps(confirmed(kv, 0), kv), "no result has confirmed anything"
    assert not preemption.swaps(confirmed(kv, 8, prompt_logprobs=1), kv), "its log-probabilities would be lost"
    assert not preemption.swaps(confirmed(make_kv(0), 8), make_kv(0))


def test_the_option_has_three_words() -> None:
    with pytest.raises(ValueError, match="preemption must be one of auto, swap, recompute, got 'never'"):
        EngineConfig(preemption="never")
