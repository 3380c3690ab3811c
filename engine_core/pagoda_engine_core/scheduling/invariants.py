"""Invariants of rows and blocks that hold between any two calls, checked from scratch.

The checks are expensive; they run in tests and while an engine core is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from pagoda_engine_core.scheduling.blocks import BlockPool, Group, Table, require
from pagoda_engine_core.scheduling.kv_cache import KvCache
from pagoda_engine_core.scheduling.ledger import Cause
from pagoda_engine_core.scheduling.plan import Flight
from pagoda_engine_core.scheduling.request import NO_ROW, Choice, ChoiceState, Request
from pagoda_engine_core.scheduling.rows import OrderedChoices, Rows
from pagoda_proto.steps import NO_BLOCK


def check_books(kv: KvCache, requests: Collection[Request], rows: Rows, flights: Iterable[Flight]) -> None:
    """Check everything. Raises BrokenInvariant."""
    waiting, running = rows.waiting, rows.running
    for group in kv.groups:
        group.pool.check_invariants()
        group.swap_pool.check_invariants()
    _check_references(kv, waiting, running)
    _check_queues(requests, waiting, running)
    for choice in running:
        _check_row(choice, kv)
        _check_marks(choice, kv)
    for choice in waiting:
        if choice.swapped or choice.num_swapped:
            _check_swapped(choice, kv)
    _check_flights(flights, running)
    for request in requests:
        _check_search(request)
    idle = [request for request in requests if not request.num_rows]
    counts = rows.num_requests, rows.queued_tokens
    expected = len(requests) - len(idle), sum(request.num_prompt_tokens for request in idle)
    require(counts == expected, f"active requests and queued tokens are {expected}, but counted as {counts}")
    require(len(running) <= rows.max_rows, "more rows than allowed")


def _check_references(kv: KvCache, waiting: OrderedChoices, running: OrderedChoices) -> None:
    for place, group in enumerate(kv.groups):
        tables = [choice.tables[place].held for choice in running if choice.tables]
        require(_counts(group.pool) == _users(group.pool, tables), "ref counts != block tables")
        require(all(len(set(table)) == len(table) for table in tables), "a block appears twice in one table")
        kept = [choice.swapped[place].held for choice in waiting if choice.swapped]
        agree = _counts(group.swap_pool) == _users(group.swap_pool, kept)
        require(agree, "ref counts of swap blocks != what is swapped")


def _counts(pool: BlockPool) -> list[int]:
    return pool.ref_counts[pool.first :]


def _users(pool: BlockPool, tables: Iterable[list[int]]) -> list[int]:
    users = Counter(block for table in tables for block in table)
    return [users[block] for block in range(pool.first, pool.end)]


def _check_queues(requests: Collection[Request], waiting: OrderedChoices, running: OrderedChoices) -> None:
    queued = [*waiting, *running]
    live = [choice for request in requests for choice in request.live_choices]
    require({id(choice) for choice in queued} == {id(choice) for choice in live}, "queues != live choices")
    require(len(queued) == len(live), "a choice is queued twice")
    for queue in (waiting, running):
        orders = [choice.order for choice in queue]
        require(orders == sorted(set(orders)), "a queue is out of order")
    for choice in waiting:
        require(choice.state in (ChoiceState.WAITING, ChoiceState.PREEMPTED), "a waiting choice has another state")
        require(choice.row_id == NO_ROW and not choice.tables and not choice.num_computed, "it holds something")
    for request in requests:
        num_rows = sum(choice.state is ChoiceState.RUNNING for choice in request.choices)
        require(request.num_rows == num_rows, "number of rows of a request is wrong")
        require(bool(request.live_choices), "an ended request is kept")


def _check_row(choice: Choice, kv: KvCache) -> None:
    block_size = kv.block_size
    require(choice.state is ChoiceState.RUNNING and choice.row_id != NO_ROW, "a running choice has no row")
    require(not kv.keeps or choice.num_computed <= kv.capacity(choice), "computed beyond the block table")
    require(len({len(table.ids) for table in choice.tables}) <= 1, "tables of one row are not as long as each other")
    for group, table in zip(kv.groups, choice.tables, strict=False):
        _check_window(choice, group, table)
    require(choice.num_computed < choice.num_tokens + max(1, choice.num_pending), "computed beyond the tokens")
    require(choice.num_registered * block_size <= choice.num_computed, "registered before computed")
    require(choice.num_confirmed <= choice.num_computed, "confirmed before computed")
    require(not choice.swapped and not choice.num_swapped, "a running choice is swapped out")


def _check_window(choice: Choice, group: Group, table: Table) -> None:
    """The table has all blocks that tokens not yet confirmed can read, and NO_BLOCK where blocks are gone."""
    read = 0 if group.keeps_all else max(0, choice.num_confirmed - group.kept)
    there = table.ids[read // group.pool.block_size :]
    require(NO_BLOCK not in there or not choice.num_confirmed, "a block is gone that is still to be read")
    require(table.ids[: table.gone] == [NO_BLOCK] * table.gone, "a block is gone and in a table")
    require(NO_BLOCK not in table.held, "a block is gone and held")
    require(table.num_held <= group.most(len(table.ids)), "a row holds more than its window and what is in flight")


def _check_swapped(choice: Choice, kv: KvCache) -> None:
    for group, kept in zip(kv.groups, choice.swapped or [Table() for _ in kv.groups], strict=True):
        gone = group.first_kept(choice.num_swapped)
        fits = (len(kept.ids), kept.gone) == (kv.blocks_for(choice.num_swapped), gone)
        require(fits, "swap blocks != swapped tokens")
    require(not choice.num_swapped or choice.state is ChoiceState.PREEMPTED, "swapped, but not preempted")
    require(choice.num_swapped < choice.num_tokens or not choice.distance, "nothing is left to compute")


def _check_search(request: Request) -> None:
    search = request.search
    if search is None:
        return
    beams = search.running[: len(request.choices)]
    require(len(beams) == len(search.running) and not search.done, "a search has no choices for its beams")
    require(not all(search.is_found(place) for place in range(len(beams))), "all is found, and nobody goes on")
    for choice in request.choices:
        tokens = list(beams[choice.index].token_ids) if choice.index < len(beams) else []
        computes = choice.index < len(beams) and not search.is_found(choice.index)
        require(choice.output_ids == tokens, "a choice is not the beam in its place")
        require(choice.max_outputs == len(tokens) + computes or not beams, "a beam has another token to compute")


def _check_marks(choice: Choice, kv: KvCache) -> None:
    if choice.num_computed < choice.quiet_until:
        require(choice.distance == 1, "a quiet row has more to compute than a token, or nothing")
        missing = kv.missing(choice, choice.num_computed + 1)
        require(not any(missing), "a quiet row has no block of its own for its token")
    index, request = len(choice.output_ids), choice.request
    require(choice.heed_at <= choice.plain_until, "a token needs no thought, but is not plain")
    if index < choice.heed_at:
        require(choice.num_tokens < kv.next_full(choice), "a token needs no thought, but fills a block")
    if index < choice.plain_until:
        wants = request.params.logprobs is not None or choice.owes_prompt_logprobs or choice.num_drafts
        require(not wants, "a token is plain, but there is more to say")
        require(index + 1 < request.max_output_tokens, "a token is plain, but the last one")
        require(choice.num_confirmed == choice.num_tokens - 1, "a token is plain, but the first one")
        begun = request.begun is not None and request.ledger.cause is Cause.DECODE
        require(begun and not request.deaths, "a token is plain, but the request has to begin")


def _check_flights(flights: Iterable[Flight], running: OrderedChoices) -> None:
    pending: Counter[int] = Counter()
    drafting: Counter[int] = Counter()
    for flight in flights:
        pending.update(flight.rows.row_ids)
        require(not any(drafting[row_id] for row_id in flight.rows.row_ids), "a row decodes, its drafts not judged")
        for choice, chunk in flight.chunks:
            if choice.row_id == chunk.row_id:
                require(not drafting[chunk.row_id], "a row was planned before its drafts were judged")
                pending[chunk.row_id] += chunk.sample
                drafting[chunk.row_id] += chunk.num_drafts
    require(
        all(choice.num_pending == pending[choice.row_id] for choice in running), "pending tokens != plans in flight"
    )
    require(all(choice.num_drafting == drafting[choice.row_id] for choice in running), "drafts != plans in flight")
