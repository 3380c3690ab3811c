"""A row that gives up its blocks is swapped if moving them there and back is quicker than computing them again.

Both are estimates from facts: how long a block takes to move, which the worker measured when it started, and its speed
with prompts. What other rows share is likely still there when the row
comes back: then it need neither be moved back nor be computed again.
"""

from __future__ import annotations

from pagoda_engine_core.scheduling.kv_cache import KvCache
from pagoda_engine_core.scheduling.request import Choice
from pagoda_engine_core.scheduling.speed import Speed


class Preemption:
    """The decision for the rows of one worker. `mode` is the option's, `swap_block_s` as in Hello."""

    def __init__(self, mode: str, swap_block_s: float, speed: Speed) -> None:
        self._mode = mode
        self._swap_block_s = swap_block_s
        self._speed = speed

    def swaps(self, choice: Choice, kv: KvCache) -> bool:
        """Whether to swap this running choice out. Without a measurement it is: room was set aside for that.

        Not while it owes prompt log-probabilities: those would be lost with the steps that told them.
        """
        num_blocks = kv.blocks_for(choice.num_confirmed)
        possible = 0 < num_blocks <= kv.swap_pool.num_free and not choice.owes_prompt_logprobs
        if not possible or self._mode == "recompute":
            return False
        if self._mode == "swap" or not self._speed.tokens_per_s:
            return True
        num_shared = kv.num_shared(choice, num_blocks)
        swap_s = (2 * num_blocks - num_shared) * self._swap_block_s
        return swap_s < (choice.num_confirmed - num_shared * kv.pool.block_size) / self._speed.tokens_per_s
