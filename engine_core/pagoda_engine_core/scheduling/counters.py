"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, kw_only=True)
class Totals:
    """Since the scheduler was made. `draft_tokens` were tried, `accepted_draft_tokens` of them became output; of
    `preemptions` so many kept their K and V in swap blocks."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    swap_preemptions: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class BlockCounts(NamedTuple):
    """Of the moment."""

    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    swap_blocks_total: int = 0
    swap_blocks_used: int = 0
