"""Estimates a worker's prefill speed from steps with prompt tokens, and uses it to size steps and choose swapping.

Steps with few prompt tokens are ignored: they measure the cost of a step, not of its tokens. A preempted row is swapped
if moving its blocks out and back is estimated to be quicker than recomputing them, from the worker's speed and the time
to move a block, which the worker measured at startup. Blocks shared with other rows will probably still be there when
the row resumes, so they need neither moving back nor recomputing.
"""

from __future__ import annotations

from pagoda_engine_core.scheduling.kv_cache import KvCache, exceeds, less
from pagoda_engine_core.scheduling.request import Choice
from pagoda_proto import times

MEASURED_TOKENS = 64
"""Fewest tokens, beyond one for each row, for which a step is measured."""
LEAST_TOKENS = 128
"""Fewer take hardly less time: reading the weights dominates. Steps get this many until the speed is measured."""
REPORTING_SHARE = 0.5
"""Share of the limit for a step that reports: writing and reading its report then takes the same processors' time."""
SHORTEST_S = 1e-6
"""No step takes less; a worker that says so has not measured."""
WEIGHT = 0.25
"""Weight of the newest measurement in the moving average."""


class Speed:
    """One worker's speed. It decides how work is divided and moved, never its results. Steps that report prompt
    log-probabilities (`reports`) are measured separately."""

    def __init__(self, max_tokens: int, limit_s: float) -> None:
        self._max_tokens = max_tokens  # per step
        self._limit_s = limit_s
        self._by_kind = {False: 0.0, True: 0.0}  # tokens/s, by whether steps report; 0: not measured yet

    @property
    def tokens_per_s(self) -> float:
        """Speed of steps that report nothing."""
        return self._by_kind[False]

    def step_tokens(self, num_decodes: int, *, reports: bool = False) -> int:
        """Token budget of the next step. With streams running, prompts get what fits into the time limit; without, what
        is computed before the worker could be taken for hung."""
        if not self._limit_s:
            return self._max_tokens
        limit_s = self._limit_s * (REPORTING_SHARE if reports else 1.0) if num_decodes else times.LONGEST_STEP_S
        return min(self._max_tokens, num_decodes + max(LEAST_TOKENS, int(self._by_kind[reports] * limit_s)))

    def chunk_tokens(self, chunk_size: int, tokens: int, num_decodes: int, num_prompts: int) -> int:
        """Most tokens of one prompt in a step of `tokens`. A step limited for streams is shared by as many prompts as a
        full one, so that a short prompt does not wait for all of a long one."""
        if tokens == self._max_tokens or num_prompts < 2:
            return chunk_size
        left = tokens - num_decodes
        return min(chunk_size, max(1, -(-left // num_prompts), left * chunk_size // self._max_tokens))

    def observe(self, num_tokens: int, num_rows: int, forward_s: float, *, reports: bool = False) -> None:
        """Record that a step of `num_tokens` in `num_rows` spent `forward_s` in model and sampler."""
        if num_tokens - num_rows < MEASURED_TOKENS or forward_s < SHORTEST_S:
            return
        rate, known = num_tokens / forward_s, self._by_kind[reports]
        self._by_kind[reports] += (rate - known) * (WEIGHT if known else 1.0)


class Preemption:
    """Decides how one worker's rows are preempted. `mode` is the value of the option."""

    def __init__(self, mode: str, speed: Speed) -> None:
        self._mode = mode
        self._speed = speed

    def swaps(self, choice: Choice, kv: KvCache) -> bool:
        """Whether to swap this running choice out. Without a measurement it is, since swap space was configured.

        A choice that owes prompt log-probabilities is not: it must recompute those that its steps have reported.
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
