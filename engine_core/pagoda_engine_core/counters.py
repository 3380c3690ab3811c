"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True, kw_only=True)
class Totals:
    """Since the scheduler was made. `draft_tokens` were tried, `accepted_draft_tokens` of them became output."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


TOTALS = tuple(field.name for field in fields(Totals))


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals, and blocks of the moment."""

    totals: Totals
    blocks_total: int
    blocks_used: int
    blocks_cached: int
