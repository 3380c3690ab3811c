"""How many tokens of prompts a worker computes in a second, from the steps that held some; and what follows from it.

A step with few tokens of prompts tells how long a step takes, not how long its tokens do. A row that gives up its
blocks is swapped if moving them there and back is quicker than computing them again. Both are estimates from facts: the
worker's speed, and how long a block takes to move, which the worker measured when it started. What other rows share is
likely still there when the row comes back: then it need neither be moved back nor be computed again.
"""

from __future__ import annotations

from pagoda_engine_core.scheduling.kv_cache import KvCache, exceeds, less
from pagoda_engine_core.scheduling.request import Choice
from pagoda_proto import times

MEASURED_TOKENS = 64
"""Beyond one for each row."""
LEAST_TOKENS = 128
"""Fewer are computed hardly faster: what then counts is reading the weights. So many come first, and are measured."""
REPORTING_SHARE = 0.5
"""Of the limit, for a step that reports: what it tells is then written and read by others, on the same processors."""
SHORTEST_S = 1e-6
"""Nothing takes less; a worker that tells so has not measured."""
WEIGHT = 0.25
"""Of the newest measurement in the average."""


class Speed:
    """One worker's; what it says decides how work is cut up and moved, never what comes of it. A step that `reports`
    has a speed of its own."""

    def __init__(self, max_tokens: int, limit_s: float) -> None:
        self._max_tokens = max_tokens  # of a step
        self._limit_s = limit_s
        self._by_kind = {False: 0.0, True: 0.0}  # tokens a second, of steps that report; 0: not measured yet

    @property
    def tokens_per_s(self) -> float:
        """Of steps that report nothing."""
        return self._by_kind[False]

    def step_tokens(self, num_decodes: int, *, reports: bool = False) -> int:
        """Tokens of the next step. Beside streams, prompts get what takes no longer than the limit; without, what
        takes so little that nobody thinks the worker has hung."""
        if not self._limit_s:
            return self._max_tokens
        limit_s = self._limit_s * (REPORTING_SHARE if reports else 1.0) if num_decodes else times.LONGEST_STEP_S
        return min(self._max_tokens, num_decodes + max(LEAST_TOKENS, int(self._by_kind[reports] * limit_s)))

    def chunk_tokens(self, chunk_size: int, tokens: int, num_decodes: int, num_prompts: int) -> int:
        """Most tokens of one prompt in a step of so many. One that is cut short for streams is shared by as many
        prompts as a full one, so that a short prompt does not wait for the whole of a long one."""
        if tokens == self._max_tokens or num_prompts < 2:
            return chunk_size
        left = tokens - num_decodes
        return min(chunk_size, max(1, -(-left // num_prompts), left * chunk_size // self._max_tokens))

    def observe(self, num_tokens: int, num_rows: int, forward_s: float, *, reports: bool = False) -> None:
        """A step of so many tokens, of so many rows, took so long in model and sampler."""
        if num_tokens - num_rows < MEASURED_TOKENS or forward_s < SHORTEST_S:
            return
        rate, known = num_tokens / forward_s, self._by_kind[reports]
        self._by_kind[reports] += (rate - known) * (WEIGHT if known else 1.0)


class Preemption:
    """The decision for the rows of one worker. `mode` is the option's."""

    def __init__(self, mode: str, speed: Speed) -> None:
        self._mode = mode
        self._speed = speed

    def swaps(self, choice: Choice, kv: KvCache) -> bool:
        """Whether to swap this running choice out. Without a measurement it is: room was set aside for that.

        Not while it owes prompt log-probabilities: those would be lost with the steps that told them.
        """
        moved = kv.to_swap(choice) if choice.num_confirmed else []
        counts = [len(block_ids) for block_ids in moved]
        possible = any(counts) and not exceeds(counts, kv.free_swap_blocks) and not choice.owes_prompt_logprobs
        if not possible or self._mode == "recompute":
            return False
        if self._mode == "swap" or not self._speed.tokens_per_s:
            return True
        shared = kv.num_shared(moved)
        trips = less([2 * count for count in counts], shared)
        swap_s = sum(count * group.swap_block_s for count, group in zip(trips, kv.groups, strict=True))
        return swap_s < (choice.num_confirmed - min(shared) * kv.block_size) / self._speed.tokens_per_s
