"""Each choice's computed tokens chase its total tokens; a step lets rows catch up.

Prefill, chunked prefill, prefix hit, fork, decode and recomputation after preemption differ only in the distance. Total
tokens include those that steps in flight will sample, so step n+1 can be planned before result n arrives.

The scheduler maps data to data: integers, lists and `now`; no clock, no I/O, no tensors. One scheduler owns the rows
and blocks of one worker; only the engine loop calls it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.scheduling.beams import BeamSearch
from pagoda_engine_core.scheduling.decoding import NOBODY, News, mark_heed, mark_quiet, restless
from pagoda_engine_core.scheduling.invariants import check_books
from pagoda_engine_core.scheduling.kv_cache import BlockCounts, KvCache, Prefix, awaits_sibling
from pagoda_engine_core.scheduling.ledger import Cause, Totals
from pagoda_engine_core.scheduling.plan import Budget, Flight, PlanBuilder, reports
from pagoda_engine_core.scheduling.request import NO_ROW, Choice, ChoiceState, Request
from pagoda_engine_core.scheduling.room import Need, Room
from pagoda_engine_core.scheduling.rows import Policy, Rows
from pagoda_engine_core.scheduling.searching import endings, go_on
from pagoda_engine_core.scheduling.speculation import grant_drafts, may_draft
from pagoda_engine_core.scheduling.speed import Preemption, Speed
from pagoda_proto.errors import ErrorCode, PagodaError, error_code_from
from pagoda_proto.records import Delta
from pagoda_proto.steps import Chunk, Hello, RowError, RowOutput, StepPlan, StepResult


class Scheduler:
    """Decides what one worker computes in each step. `hello` is its offer; `row_ids` increase and are never reused."""

    def __init__(self, config: EngineConfig, hello: Hello, policy: Policy, row_ids: Iterator[int]) -> None:
        self._config = config
        self._identity = (hello.model_fingerprint, hello.numerics_id)
        self._policy = policy
        self._rows = Rows(row_ids, min(config.max_rows, hello.max_rows), hello.max_adapters)
        self._kv = KvCache.of(hello, config)
        self._pooled_width = hello.pooled_width
        self._speed = Speed(min(config.max_tokens_per_step, hello.max_tokens_per_step), config.prompt_step_s)
        self._preemption = Preemption(config.preemption, self._speed)
        self._requests: dict[str, Request] = {}
        self._swap_outs: list[tuple[int, int]] = []  # blocks the next plan saves of the rows it drops
        self._in_flight: deque[Flight] = deque()
        self._decoding = NOBODY  # in the last plan
        self._num_added = self._step = 0
        self.totals = Totals()  # read by others, written here only

    # --- queries -----------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return self._rows.num_requests

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - self.num_running

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the waiting requests."""
        return self._rows.queued_tokens

    @property
    def num_rows(self) -> int:
        return len(self._rows.running)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def block_counts(self) -> BlockCounts:
        return self._kv.counts

    @property
    def kv_usage(self) -> float:
        return self._kv.usage

    def fits(self, request: Request) -> bool:
        """Whether all blocks together hold one choice at its longest. The last token sampled needs no KV."""
        return not self._kv.unfit(request)

    def serves(self, request: Request) -> bool:
        """Whether it could ever run here: it fits, and has not begun with another model or other numerics."""
        begun = request.begun
        bound = begun is None or (begun.model_fingerprint, begun.numerics_id) == self._identity
        return bound and self.fits(request)

    def room(self) -> Room:
        """The room that the next step has left for requests not yet added."""
        rows = self._rows
        awake = restless(rows.running)
        num_free = rows.num_free + len(awake)  # the others take a row and their promised tokens
        room = Room(num_free, self._budget(awake, 1), self._kv, rows.adapters, self._pooled_width)
        return room.without(awake, rows.waiting)

    def need(self, request: Request, room: Room) -> Need:
        """How much of the next step's room a request would take."""
        return room.need(request.live_choices, self._kv.lifetime_blocks(request))

    def requests_in(self, step: int) -> set[str]:
        """The requests with rows in this step in flight."""
        flights = (flight for flight in self._in_flight if flight.step == step)
        return {choice.request.request_id for flight in flights for choice in flight.present()}

    def matched_tokens(self, request: Request) -> int:
        """Leading tokens of the request that are in this worker's prefix cache now."""
        return next((self._kv.matched_tokens(choice) for choice in request.live_choices), 0)

    def check_invariants(self) -> None:
        """Raises BrokenInvariant if the books do not balance; for tests and idle moments."""
        check_books(self._kv, self._requests.values(), self._rows, self._in_flight)

    # --- adding and removing requests --------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> list[Delta]:
        """Add a request. Returns deltas if its prior tokens end choices, or if it can never fit."""
        if request.request_id in self._requests:
            raise PagodaError(ErrorCode.INTERNAL, f"request {request.request_id} is here already", "request_id")
        deltas = request.settle(now)
        if request.ended:
            return deltas
        if unfit := self._kv.unfit(request):
            num_prompt, num_output = request.num_prompt_tokens, request.max_output_tokens
            message = f"{num_prompt} prompt tokens and up to {num_output} output tokens {unfit}"
            return deltas + request.fail(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, now)
        order = self._policy(request)  # before any change to the books, as it may raise
        request.ledger.enter(Cause.REPLAYING if request.resumes else Cause.QUEUED_BEHIND, now)
        self._requests[request.request_id] = request
        self._rows.queued_tokens += request.num_prompt_tokens
        self._num_added += 1
        for choice in request.choices:
            choice.order = (*order, self._num_added, choice.index)
            if choice.live:
                self._rows.waiting.add(choice)
        return deltas

    def abort(self, request_id: str, choices: Collection[int], now: float) -> list[Delta]:
        """End these choices, or all if none are named. Unknown requests and choices are ignored."""
        request = self._detach(request_id, choices, now)
        return self._close_if_ended(request, request.abort(choices, now)) if request else []

    def fail(self, request_id: str, code: ErrorCode, message: str, now: float) -> list[Delta]:
        """End a whole request with an error."""
        request = self._detach(request_id, (), now)
        return self._close_if_ended(request, request.fail(code, message, now)) if request else []

    def release(self, request_id: str, now: float) -> None:
        """Give up a request that continues on another worker, from its tokens."""
        if request := self._detach(request_id, (), now):
            request.leave_worker(now)
            self._rows.queued_tokens -= self._requests.pop(request_id).num_prompt_tokens

    def take_back(self, now: float) -> list[Request]:
        """The worker is lost: return all open requests, in order, with only their tokens. This discards the books
        instead of balancing them, so it works even if they are wrong."""
        requests = sorted(self._requests.values(), key=lambda request: request.choices[-1].order)
        for request in requests:
            request.leave_worker(now)
        self._kv = self._kv.emptied()
        self._rows, self._decoding = self._rows.emptied(), NOBODY
        for collection in (self._requests, self._in_flight, self._swap_outs):
            collection.clear()
        return requests

    def reset_prefix_cache(self) -> int:
        """Forget cached blocks that no row uses, and return their number."""
        return self._kv.reset_cache()

    # --- one step ----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute or drop, or if it is better planned after the next
        result. At most `max_steps_in_flight` plans may be unanswered (PagodaError INTERNAL)."""
        if len(self._in_flight) >= self._config.max_steps_in_flight:
            raise PagodaError(ErrorCode.INTERNAL, f"{len(self._in_flight)} steps are in flight already")
        rows = self._rows
        drafting = may_draft(rows.running, rows.waiting, self._config.speculation_tokens)
        if drafting and self._in_flight:
            return None
        awake = restless(rows.running)
        builder = PlanBuilder(self._budget(awake, min(1, len(rows.waiting))), len(self._kv.groups))
        self._plan_running(builder, awake, now)
        self._plan_waiting(builder, now)
        if drafting and not builder.preempted:
            grant_drafts(builder, self._kv, self._config.speculation_tokens)
        if builder.empty and not self._in_flight:
            # Every row waits for a sibling that finds no room. These are beams, whose results survive preemption.
            for choice in list(rows.running):
                self._preempt(choice, now)
        if builder.empty and not rows.dropped:
            return None
        self._step += 1
        plan, flight = builder.launch(self._step, self._decoding, rows.take_dropped(), self._swap_outs)
        self._decoding, self._swap_outs = flight.rows, []
        self._in_flight.append(flight)
        return plan

    def apply(self, result: StepResult, now: float, news: News) -> None:
        """Apply the result of the oldest plan in flight. `news` receives the outcome row by row, even if a row raises.

        Raises PagodaError PROTOCOL_ERROR, with nothing changed, if the result does not answer that plan. Output for
        rows that have since been finished, preempted, aborted or taken back is dropped.
        """
        if not self._in_flight:
            raise PagodaError(ErrorCode.PROTOCOL_ERROR, f"no step is in flight, got the result of {result.step}")
        self._in_flight[0].check(result)
        if result.errors:
            news.deltas += self._apply_errors({error.row_id: error for error in result.errors}, now)
        flight = self._in_flight.popleft()
        self._speed.observe(flight.num_tokens, flight.num_rows, result.forward_s, reports=flight.reports)
        for choice, chunk, output in flight.apply(result, self._kv, news):
            self._apply_row(choice, chunk, output, now, news)
        self.totals.output_tokens += len(news.tokens)

    def _budget(self, awake: Collection[Choice], num_beginning: int) -> Budget:
        distances = [choice.distance for choice in awake]
        decodes = self.num_rows - len(awake) + distances.count(1)
        prompts = num_beginning + sum(distance > 1 for distance in distances)
        tokens = self._speed.step_tokens(decodes, reports=reports(awake) or reports(self._rows.waiting))
        chunk_size = self._speed.chunk_tokens(self._kv.longest_chunk, tokens, decodes, prompts)
        return Budget(tokens, chunk_size if self._kv.keeps else None, decodes)

    # --- planning rows -----------------------------------------------------------------------------------------------

    def _plan_running(self, builder: PlanBuilder, awake: Sequence[Choice], now: float) -> None:
        """Let rows catch up, in order. Rows that this step has planned are never preempted.

        Choices that are not awake get their promised token without asking, unless the budget is too small.
        """
        for choice in awake if builder.budget.keeps_promises else list(self._rows.running):
            distance = choice.distance
            if choice.row_id == NO_ROW or not distance:
                continue  # preempted by this loop, or nothing left to plan
            if distance == 1:
                self._plan_decode(choice, builder, now)
            else:
                self._plan_chunk(choice, builder, now)
        builder.decodes = [choice for choice in self._rows.running if choice.num_computed < choice.quiet_until]

    def _plan_decode(self, choice: Choice, builder: PlanBuilder, now: float) -> None:
        if not (builder.budget.grant_promised() and builder.takes(choice) and self._hold(choice, 1, builder, now)):
            choice.quiet_until = 0
        elif choice.launched:
            mark_quiet(choice, self._kv)
        else:
            builder.compute(choice, 1)

    def _plan_chunk(self, choice: Choice, builder: PlanBuilder, now: float) -> None:
        num_tokens = builder.budget.grant(choice.distance)
        if num_tokens:
            if not self._hold(choice, num_tokens, builder, now):
                return
            builder.compute(choice, num_tokens)
        builder.reserve(self._kv.shortage(choice, choice.num_tokens))

    def _hold(self, choice: Choice, num_tokens: int, builder: PlanBuilder, now: float) -> bool:
        """Find blocks for its next tokens, preempting from the end; False if that preempts `choice` itself."""
        target = choice.num_computed + num_tokens
        while self._kv.lacks(self._kv.missing(choice, target)):
            victim = self._rows.running[-1]
            builder.preempted = True
            self._preempt(victim, now)
            if victim is choice:
                return False
        builder.grow_row(choice, self._kv.grow(choice, target))
        return True

    def _plan_waiting(self, builder: PlanBuilder, now: float) -> None:
        """Start rows in order until one does not fit. None overtakes it; its ledger records what it waits for."""
        index, waiting = 0, self._rows.waiting
        while index < len(waiting):
            choice = waiting[index]
            if awaits_sibling(choice):
                index += 1
                continue
            blocked = Cause.QUEUED_BLOCKS if builder.preempted else self._start(choice, builder, now)
            if blocked:
                choice.request.note_blocked(blocked, now)
                return

    def _start(self, choice: Choice, builder: PlanBuilder, now: float) -> Cause | None:
        """Make the first waiting choice a row, or return what it waits for. Besides what running rows still need, there
        must be room for all its known tokens and one more block; otherwise it would soon be preempted and its
        computation wasted."""
        if lacking := self._rows.lacks(choice):
            return lacking
        prefix = self._kv.lookup(choice)
        if not (builder.takes(choice) and builder.budget.fits(choice.num_tokens - prefix.num_tokens)):
            return Cause.QUEUED_BUDGET
        cost = self._kv.admission_cost(prefix, choice.num_tokens, self._kv.lifetime_blocks(choice.request))
        if self._kv.lacks(cost, builder.reserved_blocks):
            return Cause.QUEUED_BLOCKS
        self._admit(choice, prefix, builder, now)
        return None

    def _admit(self, choice: Choice, prefix: Prefix, builder: PlanBuilder, now: float) -> None:
        request = choice.request
        swap_ins = self._kv.attach(choice, prefix)
        num_tokens = builder.budget.grant(choice.distance)
        growth = self._kv.grow(choice, choice.num_computed + num_tokens)
        cached = min(prefix.num_tokens, request.num_prompt_tokens)
        if not request.started:
            self.totals.prompt_tokens += request.num_prompt_tokens
            self.totals.cached_prompt_tokens += cached
        request.note_row(cached, now)
        self._rows.enter(choice)
        for sibling in request.choices:
            sibling.quiet_until = 0  # from now on, the block it writes may be shared
        self.totals.swapped_in_blocks += len(swap_ins)
        builder.start_row(choice, growth, swap_ins)
        builder.compute(choice, num_tokens)
        builder.reserve(self._kv.shortage(choice, choice.num_tokens))

    def _preempt(self, choice: Choice, now: float) -> None:
        """Preempt a row. It resumes in the policy's order, from blocks swapped out here or by recomputation."""
        if self._preemption.swaps(choice, self._kv):
            moved = self._kv.swap_out(choice)
            self._swap_outs += moved
            self.totals.swap_preemptions += 1
            self.totals.swapped_out_blocks += len(moved)
        self._kv.free(choice)
        self._rows.preempt(choice, now)
        self.totals.preemptions += 1
        choice.request.preemptions += 1

    def _apply_errors(self, errors: dict[int, RowError], now: float) -> list[Delta]:
        deltas: list[Delta] = []
        for choice in list(self._rows.running):
            error = errors.get(choice.row_id)
            if error is not None:  # and no sibling's error has ended it
                code = error_code_from(error.code) or ErrorCode.INTERNAL
                deltas += self.fail(choice.request.request_id, code, error.message, now)
        self._rows.drop_rows(errors)
        return deltas

    def _apply_row(self, choice: Choice, chunk: Chunk, output: RowOutput | None, now: float, news: News) -> None:
        request = choice.request
        if output is not None and output.prompt_logprobs and choice.owes_prompt_logprobs:
            request.prompt_logprobs += output.prompt_logprobs
        if output is None or not chunk.sample:
            self._kv.commit(choice, chunk.start + chunk.num_tokens)
            return
        if request.search is not None:
            news.deltas += self._apply_found(choice, output, request.search, now)
            return
        delta, num_kept, ending = request.add_output(choice, output, now)
        news.deltas.append(delta)  # recorded now, whatever happens next
        if not request.pools:
            delta.tokens.begun = request.begin(*self._identity)
            self.totals.output_tokens += num_kept
        choice.sampled(num_kept, output.num_drafts)
        self._kv.commit(choice, chunk.start + chunk.num_tokens + num_kept - 1)
        self.totals.draft_tokens += output.num_drafted
        self.totals.accepted_draft_tokens += num_kept - 1
        mark_heed(choice, self._kv)
        if ending:
            self._withdraw(choice, now)
            self._close_if_ended(request, [request.finish(choice, ending, now, delta)])

    def _apply_found(self, choice: Choice, output: RowOutput, search: BeamSearch, now: float) -> list[Delta]:
        """Apply one beam's candidates. Once all beams have theirs, the likeliest continue or the search ends."""
        request = choice.request
        request.begin(*self._identity)
        self.totals.output_tokens += 1
        go_on(choice, search, output, self._kv, self._rows, now)
        if not search.done:
            return []
        self._detach(request.request_id, (), now)
        return self._close_if_ended(request, endings(request, search, now))

    # --- withdrawing rows and requests -------------------------------------------------------------------------------

    def _withdraw(self, choice: Choice, now: float) -> None:
        """Remove a live choice from its queue or from the worker."""
        if choice.state is ChoiceState.RUNNING:
            self._kv.free(choice)  # blocks are reusable at once: plans run in order
            self._rows.leave(choice, ChoiceState.WAITING, now)
        else:
            self._rows.waiting.remove(choice)
            self._kv.free_swapped(choice)

    def _detach(self, request_id: str, choices: Collection[int], now: float) -> Request | None:
        """Withdraw those of these choices that are live (all if none are named); they are about to end."""
        request = self._requests.get(request_id)
        for choice in request.named(choices) if request else ():
            self._withdraw(choice, now)
        return request

    def _close_if_ended(self, request: Request, deltas: list[Delta]) -> list[Delta]:
        """Remove the request, which has no rows any more, if its last choice has ended."""
        if request.ended:
            self._rows.queued_tokens -= self._requests.pop(request.request_id).num_prompt_tokens
        return deltas
