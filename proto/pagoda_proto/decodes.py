"""Rows that decode go on decoding: both ends keep the list, and a plan says what is different from the one before.

`changes` makes a plan's Decodes of two such lists, `DecodeList.chunks` makes the second list of the first and the
Decodes. Nothing is computed that the two ends see differently: sums tell whether the lists are the same, and each
start is held against the row itself, as that of any chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagoda_proto.steps import NO_TOKEN, Chunk, Decodes, RowOutput, StepPlan


class DecodesDiffer(ValueError):
    """A plan speaks of another list of rows than the one that is here."""


def changes(before: Sequence[int], after: Sequence[int], starts: Sequence[int]) -> Decodes:
    """What leads from the row ids `before` to those `after`, which have these starts. Rows in both stand in one order,
    and their starts are one more than they were."""
    sums = len(after), sum(after), sum(starts)
    if before == after:
        return Decodes(*sums)
    known, kept = set(before), set(after)
    left = [row_id for row_id in before if row_id not in kept]
    news = zip(range(len(after)), after, starts, strict=True)
    return Decodes(*sums, left, [new for new in news if new[1] not in known])


class DecodeList:
    """The worker's end. Every plan of a life must pass through `chunks`, in order."""

    def __init__(self) -> None:
        self._row_ids: list[int] = []
        self._starts: list[int] = []

    def clear(self) -> None:
        self._row_ids, self._starts = [], []

    def chunks(self, plan: StepPlan) -> list[Chunk]:
        """All chunks of a plan, those of the rows that decode first.

        Raises:
            DecodesDiffer: the plan was made for another list than the one that is here.
        """
        decodes = plan.decodes
        if decodes.left or decodes.joined:
            self._change(decodes)
        row_ids, starts = self._row_ids, self._starts
        here, there = (len(row_ids), sum(row_ids), sum(starts)), (decodes.count, decodes.row_id_sum, decodes.start_sum)
        if here != there:
            raise DecodesDiffer(f"count, ids and starts of the rows that decode add up to {here} here, {there} there")
        self._starts = [start + 1 for start in starts]
        return [Chunk(row_id, start, 1, True) for row_id, start in zip(row_ids, starts, strict=True)] + plan.chunks

    def _change(self, decodes: Decodes) -> None:
        left = set(decodes.left)
        stay = [place for place, row_id in enumerate(self._row_ids) if row_id not in left]
        if len(stay) + len(decodes.left) != len(self._row_ids):
            raise DecodesDiffer("a row is to leave that did not decode")
        self._row_ids = [self._row_ids[place] for place in stay]
        self._starts = [self._starts[place] for place in stay]
        for place, row_id, start in decodes.joined:
            self._row_ids.insert(place, row_id)
            self._starts.insert(place, start)


def packed(row_ids: Sequence[int], outputs: Sequence[RowOutput]) -> tuple[list[int], list[RowOutput]]:
    """`StepResult.tokens` and `.outputs`, when these rows decode and the step has all these outputs."""
    plain = {output.row_id: output.token_ids[0] for output in outputs if _is_plain(output)}
    tokens = [plain.get(row_id, NO_TOKEN) for row_id in row_ids]
    said = {row_id for row_id in row_ids if row_id in plain}
    return tokens, [output for output in outputs if output.row_id not in said]


def _is_plain(output: RowOutput) -> bool:
    more = output.logprobs is not None or output.prompt_logprobs is not None or output.num_drafted or output.num_drafts
    return len(output.token_ids) == 1 and not more
