"""In a beam search a choice is a beam, possibly a different one after each step.

It has one token to compute until its candidates are known, then none until all beams have theirs. Then each choice
takes over the computed state of its source beam. Blocks are shared, so a writer to a shared block gets a copy first, as
all choices do. A beam without a row waits like any preempted choice, and keeps the candidates already found.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from pagoda_engine_core.scheduling.beams import BeamSearch, Ended
from pagoda_engine_core.scheduling.blocks import BlockPool, HashChain, Table
from pagoda_engine_core.scheduling.kv_cache import KvCache
from pagoda_engine_core.scheduling.request import Choice, ChoiceState, Ending, Request
from pagoda_engine_core.scheduling.rows import Rows
from pagoda_proto.records import Delta, FinishReason, Tokens
from pagoda_proto.steps import RowOutput


class Computed(NamedTuple):
    """How much of a choice's tokens is computed, and in which blocks; see `Choice`."""

    num_computed: int = 0
    num_confirmed: int = 0
    num_registered: int = 0
    tables: Sequence[Table] = ()
    num_swapped: int = 0
    swapped: Sequence[Table] = ()
    chains: Sequence[HashChain] = ()

    @classmethod
    def of(cls, choice: Choice | None) -> Computed:
        if choice is None:
            return cls()
        chains = list(choice.chains.values())
        computed = choice.num_computed, choice.num_confirmed, choice.num_registered, choice.tables
        return cls(*computed, choice.num_swapped, choice.swapped, chains)

    def give(self, choice: Choice) -> None:
        """Hand this state to a choice whose tokens begin with the same ones."""
        choice.num_computed, choice.num_confirmed, choice.num_registered = self[:3]
        choice.tables = [table.copy() for table in self.tables]
        choice.swapped = [table.copy() for table in self.swapped]
        choice.num_swapped = self.num_swapped
        choice.chains = {chain.block_size: chain.copy() for chain in self.chains}


def go_on(choice: Choice, search: BeamSearch, output: RowOutput, kv: KvCache, rows: Rows, now: float) -> None:
    """Apply one beam's candidates. Once all beams have theirs, advance the search, which may end it."""
    choice.sampled(1, 0)
    choice.max_outputs = len(choice.output_ids)
    kv.commit(choice, choice.num_tokens)
    choice.request.note_progress(now)
    if output.logprobs and search.find(choice.index, output.logprobs[0]):
        search.advance()
        if not search.done:
            _advance(choice.request, search, kv, rows, now)


def _advance(request: Request, search: BeamSearch, kv: KvCache, rows: Rows, now: float) -> None:
    """Turn choices into the next beams; those whose source has a row get one, as long as rows are free."""
    seated = {choice.index for choice in request.choices if choice.state is ChoiceState.RUNNING}
    places = search.sources
    sources = [request.choices[place] for place in places]
    _pass_on(kv, request.choices, sources)
    for choice, beam in zip_longest(request.choices, search.running):
        choice.output_ids = list(beam.token_ids) if beam else []
        choice.max_outputs = len(choice.output_ids) + 1 if beam else 0
    heirs = [index for index, place in enumerate(places) if place in seated][: rows.num_free + len(seated)]
    for index in heirs:
        rows.renew(request.choices[index])
    for choice in request.choices:
        if choice.index not in heirs:
            kv.free(choice)
            rows.preempt(choice, now)


def _pass_on(kv: KvCache, choices: Sequence[Choice], sources: Sequence[Choice]) -> None:
    """Give each choice the state of its source, all at once; if there are fewer sources, the last choices get nothing.
    Blocks are shared, in swap space too; those that no choice takes over are freed."""
    taken = [(choice, Computed.of(source)) for choice, source in zip_longest(choices, sources)]
    for place, group in enumerate(kv.groups):
        left = [choice.tables[place] for choice in choices if choice.tables]
        found = [computed.tables[place] for _, computed in taken if computed.tables]
        _exchange(group.pool, left, found, _kept(left, found))
        swapped = [choice.swapped[place] for choice in choices if choice.swapped]
        _exchange(group.swap_pool, swapped, [one.swapped[place] for _, one in taken if one.swapped])
    for choice, computed in taken:
        computed.give(choice)


def _exchange(pool: BlockPool, left: Sequence[Table], taken: Sequence[Table], kept: int = 0) -> None:
    """Add a user to the blocks of tables taken and remove one from those of tables left, from place `kept` on."""
    for table in taken:
        pool.share(table.ids[max(kept, table.gone) :])
    for table in left:
        pool.free(table.ids[max(kept, table.gone) :])


def _kept(left: Sequence[Table], taken: Sequence[Table]) -> int:
    """Number of leading blocks common to all tables. Their user counts stay the same, so long prompts cost nothing."""
    tables = [table.ids for table in left]
    if len(left) != len(taken):
        return 0
    first, last = min(tables, default=[]), max(tables, default=[])  # tables between them share their common prefix
    return next((place for place, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))


def endings(request: Request, search: BeamSearch, now: float) -> list[Delta]:
    """End a finished search, whose choices have no rows any more: they become the ended sequences, the best first."""
    deltas = [_ending(choice, ended, now) for choice, ended in zip_longest(request.choices, search.best)]
    deltas[0].tokens.begun = request.begun
    return deltas


def _ending(choice: Choice, ended: Ended | None, now: float) -> Delta:
    request = choice.request
    choice.output_ids = list(ended.beam.token_ids) if ended else []
    told = list(ended.beam.told) if ended else []
    delta = request.delta(choice, 0)
    delta.result = Tokens(first_index=0, token_ids=list(choice.output_ids), logprobs=told or None)
    at_end = ended is not None and ended.at_end
    ending = Ending(FinishReason.STOP, choice.output_ids[-1]) if at_end else Ending(FinishReason.LENGTH)
    return request.finish(choice, ending, now, delta)
