"""What a scheduler counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from pagoda_engine_core.scheduling.blocks import BlockPool


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

    def add(self, other: Totals) -> None:
        for name in TOTALS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


TOTALS = tuple(field.name for field in fields(Totals))


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals, and blocks of the moment."""

    totals: Totals
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    swap_blocks_total: int
    swap_blocks_used: int

    @classmethod
    def of(cls, totals: Totals, pool: BlockPool, swapped: BlockPool) -> Counters:
        sizes = (pool.num_blocks, pool.num_used, pool.num_cached, swapped.num_blocks, swapped.num_used)
        return cls(replace(totals), *sizes)


BLOCKS = tuple(field.name for field in fields(Counters) if field.name != "totals")


def sum_blocks(counters: Sequence[Counters]) -> dict[str, int]:
    """Blocks of several workers together, by the names they have in Counters."""
    return {name: sum(getattr(one, name) for one in counters) for name in BLOCKS}
