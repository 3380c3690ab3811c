"""Draft tokens fill the room that a step has left: they never displace other work or keep it waiting.

A step of a few tokens costs little more than a step of one, because most of the cost is reading the weights. So drafts
are granted while the step stays that small, contains no prompt, and no request waits to start; they take only token
budget and blocks that nothing else wants. Rows are then planned together, one step at a time: a row can be planned only
once the number of its accepted drafts is known, and splitting rows over two steps would read the weights twice.
"""

from __future__ import annotations

from pagoda_engine_core.scheduling.kv_cache import Counts, KvCache, exceeds, less
from pagoda_engine_core.scheduling.plan import PlanBuilder
from pagoda_engine_core.scheduling.request import Choice
from pagoda_engine_core.scheduling.rows import OrderedChoices

ROWS_PER_DRAFT = 4
"""All rows wait for a step with drafts, which pays off if it may yield a quarter more tokens."""


def may_draft(running: OrderedChoices, waiting: OrderedChoices, max_tokens: int) -> bool:
    """Whether a step of all running rows leaves room for enough drafts to pay off, within `max_tokens` in all."""
    if waiting or len(running) >= max_tokens:
        return False
    room = sum(choice.draft_room for choice in running)
    return 0 < len(running) <= room * ROWS_PER_DRAFT and all(choice.distance <= 1 for choice in running)


def grant_drafts(builder: PlanBuilder, kv: KvCache, max_tokens: int) -> None:
    """Grant the planned rows drafts, in equal shares, until the step has `max_tokens`. No earlier plan is in flight."""
    decodes = builder.decodes
    spare = min(max_tokens - len(decodes), builder.budget.left)
    takers = [choice for choice in decodes if choice.draft_room]
    for index, choice in enumerate(takers):
        share = -(-spare // (len(takers) - index))
        reserved = [blocks + len(decodes) for blocks in builder.reserved_blocks]
        spare_blocks = [max(0, blocks) for blocks in less(kv.free_blocks, reserved)]
        count = _fitting(choice, min(choice.draft_room, share), kv, spare_blocks)
        if count > 0:
            builder.grow_row(choice, kv.grow(choice, _end(choice, count)))
            builder.allow_drafts(choice, count)
            spare -= count


def _fitting(choice: Choice, count: int, kv: KvCache, spare_blocks: Counts) -> int:
    """How many of `count` drafts fit into the row's blocks and spare ones; one block is left for each row."""
    while count > 0 and exceeds(kv.missing(choice, _end(choice, count)), spare_blocks):
        count -= 1
    return count


def _end(choice: Choice, num_drafts: int) -> int:
    return choice.num_computed + choice.distance + num_drafts
