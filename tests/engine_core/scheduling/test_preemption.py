"""When a row that gives up its blocks is swapped; what then becomes of it is in test_swapping."""

from __future__ import annotations

import pytest
from tests.fakes import make_record

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.scheduling.blocks import BlockPool
from pagoda_engine_core.scheduling.kv_cache import KvCache
from pagoda_engine_core.scheduling.preemption import Preemption
from pagoda_engine_core.scheduling.request import Choice, Request
from pagoda_engine_core.scheduling.speed import Speed

BLOCK_SIZE = 4


def make_kv(num_swap_blocks: int = 16) -> KvCache:
    return KvCache(BlockPool(32, BLOCK_SIZE, prefix_cache=True), num_swap_blocks)


def confirmed(kv: KvCache, num_tokens: int, num_prompt: int = 60, **params: int) -> Choice:
    """A choice with so many tokens computed, according to results."""
    choice = Request(make_record([1] * num_prompt, **params), max_output_tokens=8, now=0.0).choices[0]
    kv.grow(choice, num_tokens)
    choice.num_computed = num_tokens
    kv.commit(choice, num_tokens)
    return choice


def speed(tokens_per_s: float = 0.0) -> Speed:
    measured = Speed(2048, 0.1)
    measured.tokens_per_s = tokens_per_s
    return measured


def measured(tokens_per_s: float, swap_block_s: float, mode: str = "auto") -> Preemption:
    return Preemption(mode, swap_block_s, speed(tokens_per_s))


@pytest.mark.parametrize("swap_block_s", [0.9, 1.1])
def test_the_quicker_of_moving_and_computing(swap_block_s: float) -> None:
    """40 tokens at 2 a second take 20 s; 10 blocks there and back are 20 moves."""
    kv = make_kv()
    choice = confirmed(kv, 40)
    assert measured(2.0, swap_block_s).swaps(choice, kv) == (swap_block_s < 1.0)
    assert measured(2.0, swap_block_s, "swap").swaps(choice, kv)
    assert not measured(2.0, swap_block_s, "recompute").swaps(choice, kv)


def test_what_others_share_need_not_come_back_nor_be_computed() -> None:
    """Of 10 blocks 9 have another user: 11 moves for the sake of 4 tokens."""
    kv = make_kv()
    choice = confirmed(kv, 40)
    kv.pool.share(choice.block_ids[:9])
    assert measured(2.0, 0.17).swaps(choice, kv)  # 1.87 s of moving, 2 s of computing
    assert not measured(2.0, 0.19).swaps(choice, kv)


def test_without_a_measurement_room_is_used() -> None:
    kv = make_kv()
    assert Preemption("auto", 1e9, speed()).swaps(confirmed(kv, 40), kv)


def test_what_cannot_be_swapped_is_computed_again() -> None:
    preemption = Preemption("swap", 0.0, speed())
    kv = make_kv(num_swap_blocks=10)
    assert preemption.swaps(confirmed(kv, 40), kv)
    assert not preemption.swaps(confirmed(kv, 41), kv), "eleven blocks do not fit"
    assert not preemption.swaps(confirmed(kv, 0), kv), "no result has confirmed anything"
    assert not preemption.swaps(confirmed(kv, 8, prompt_logprobs=1), kv), "its log-probabilities would be lost"
    assert not preemption.swaps(confirmed(make_kv(0), 8), make_kv(0))


def test_the_option_has_three_words() -> None:
    with pytest.raises(ValueError, match="preemption must be one of auto, swap, recompute, got 'never'"):
        EngineConfig(preemption="never")
