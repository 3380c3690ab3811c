"""Rows that decode usually continue, so both ends keep a list of them and a plan carries only its changes.

`changes` computes a plan's Decodes from two such lists; `DecodeList.chunks` applies Decodes to the first list to get
the second. Nothing is computed if the ends disagree: checksums show whether their lists are equal, and each start is
checked against the row itself, like that of any chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagoda_proto.steps import NO_TOKEN, Chunk, Decodes, RowOutput, StepPlan


class DecodesDiffer(ValueError):
    """A plan was made for a different list of rows than the one kept here."""


def changes(before: Sequence[int], after: Sequence[int], starts: Sequence[int]) -> Decodes:
    """The changes from row ids `before` to `after`, which have these starts. Rows in both have the same order, and
    their starts have grown by one."""
    sums = len(after), sum(after), sum(starts)
    if before == after:
        return Decodes(*sums)
    known, kept = set(before), set(after)
    left = [row_id for row_id in before if row_id not in kept]
    news = zip(range(len(after)), after, starts, strict=True)
    return Decodes(*sums, left, [new for new in news if new[1] not in known])


class DecodeList:
    """The worker's list. Every plan of a life must pass through `chunks`, in order."""

    def __init__(self) -> None:
        self._row_ids: list[int] = []
        self._starts: list[int] = []

    def clear(self) -> None:
        self._row_ids, self._starts = [], []

    def chunks(self, plan: StepPlan) -> list[Chunk]:
        """All chunks of a plan, those of decoding rows first.

        Raises:
            DecodesDiffer: the plan was made for a different list than this one.
        """
        decodes = plan.decodes
        if decodes.left or decodes.joined:
            self._change(decodes)
        row_ids, starts = self._row_ids, self._starts
        here, there = (len(row_ids), sum(row_ids), sum(starts)), (decodes.count, decodes.row_id_sum, decodes.start_sum)
        if here != there:
            raise DecodesDiffer(f"count and sums of the decoding rows are {here} here, but {there} in the plan")
        self._starts = [start + 1 for start in starts]
        return [Chunk(row_id, start, 1, True) for row_id, start in zip(row_ids, starts, strict=True)] + plan.chunks

    def _change(self, decodes: Decodes) -> None:
        left = set(decodes.left)
        stay = [place for place, row_id in enumerate(self._row_ids) if row_id not in left]
        if len(stay) + len(decodes.left) != len(self._row_ids):
            raise DecodesDiffer("a row that should leave was not decoding")
        self._row_ids = [self._row_ids[place] for place in stay]
        self._starts = [self._starts[place] for place in stay]
        for place, row_id, start in decodes.joined:
            self._row_ids.insert(place, row_id)
            self._starts.insert(place, start)


def packed(row_ids: Sequence[int], outputs: Sequence[RowOutput]) -> tuple[list[int], list[RowOutput]]:
    """`StepResult.tokens` and `.outputs` of a step with these decoding rows and all these outputs."""
    plain = {output.row_id: output.token_ids[0] for output in outputs if _is_plain(output)}
    tokens = [plain.get(row_id, NO_TOKEN) for row_id in row_ids]
    said = {row_id for row_id in row_ids if row_id in plain}
    return tokens, [output for output in outputs if output.row_id not in said]


def _is_plain(output: RowOutput) -> bool:
    more = output.logprobs is not None or output.prompt_logprobs is not None or output.num_drafted or output.num_drafts
    return len(output.token_ids) == 1 and not more
