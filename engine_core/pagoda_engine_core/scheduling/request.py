"""A request is its record plus the output tokens so far; all other state can be lost and recomputed.

    Request   one record on its way to its one ending: choices, ledger, usage
    Choice    one of its n continuations: output tokens for good; row, blocks and progress only while on a worker

In a beam search a choice is a beam, possibly a different one after each step: it has one token to compute until its
candidates are known, then none until all beams have theirs. Its tokens are reported only at the end.

Requests make their own deltas, so a request ends in the same way whether or not a scheduler holds it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from pagoda_engine_core.scheduling.beams import BeamSearch
from pagoda_engine_core.scheduling.blocks import HashChain, Table
from pagoda_engine_core.scheduling.ledger import QUEUED, Cause, Ledger
from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams, num_candidates
from pagoda_proto.records import (
    FROM_THE_START,
    Begun,
    Delta,
    FinishReason,
    Pool,
    Pooled,
    PriorOutput,
    RequestRecord,
    Resume,
    Stream,
    Tokens,
    Usage,
    nothing_of,
)
from pagoda_proto.steps import RowOutput, TopLogprobs

NO_ROW = -1


class ChoiceState(StrEnum):
    WAITING = "waiting"  # not started on this worker
    RUNNING = "running"  # has a row
    PREEMPTED = "preempted"  # had a row, and waits to resume
    FINISHED = "finished"


class Ending(NamedTuple):
    """Why a choice ends."""

    reason: FinishReason
    stop_token_id: int | None = None
    error_code: ErrorCode | None = None
    error_message: str = ""


class Choice:
    """One continuation. `num_computed` counts tokens whose KV is computed once all plans in flight are done;
    `num_pending` counts tokens that those plans will sample. With drafts in flight both are only lower bounds, so the
    choice waits for the result. Scheduler and KvCache write the fields after `order`; `decoding` explains the marks
    `.._until` and `heed_at`.
    """

    __slots__ = (
        "chains", "heed_at", "index", "launched", "max_outputs", "num_computed", "num_confirmed", "num_drafting",
        "num_drafts", "num_pending", "num_registered", "num_swapped", "order", "output_ids", "plain_until",
        "quiet_until", "request", "row_id", "state", "stop_ids", "stream", "swapped", "tables",
    )  # fmt: skip

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.stop_ids = request.stop_ids
        self.stream = Stream(number=index, request_id=request.request_id, attempt=request.attempt, choice=index)
        self.output_ids: list[int] = []
        self.max_outputs = request.max_output_tokens if request.search is None else int(index == 0)  # for now
        self.state = ChoiceState.WAITING
        self.order: tuple[float, ...] = ()  # in the policy's order, fixed when a scheduler takes the request
        self.row_id = NO_ROW
        self.launched = False  # a plan that computes this row has been made
        self.tables: list[Table] = []  # one for each group, all of equal length; empty without blocks
        self.num_computed = 0
        self.num_confirmed = 0  # of these, confirmed by results; excludes a prefix hit until the first
        self.num_pending = 0
        self.num_drafts = 0  # as last proposed by the worker
        self.num_drafting = 0  # drafts that the plan in flight allows
        self.num_registered = 0  # leading full blocks that were offered to the prefix cache
        self.swapped: list[Table] = []  # swap blocks of `num_swapped` leading tokens, while preempted
        self.num_swapped = 0
        self.quiet_until = self.plain_until = self.heed_at = 0
        self.chains: dict[int, HashChain] = {}  # by block size: hashed once for all workers

    @property
    def live(self) -> bool:
        return self.state is not ChoiceState.FINISHED

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return self.request.num_prompt_tokens + len(self.output_ids)

    @property
    def distance(self) -> int:
        """Tokens to compute before the next can be sampled; 0 while its last allowed token is being sampled, or an
        unknown number of drafts is in flight."""
        num_outputs = len(self.output_ids) + self.num_pending
        if num_outputs >= self.max_outputs or self.num_drafting:
            return 0
        return self.request.num_prompt_tokens + num_outputs - self.num_computed

    @property
    def draft_room(self) -> int:
        """Drafts that the worker proposes for the next planned token, as far as the choice could keep them."""
        num_outputs = len(self.output_ids) + self.num_pending
        return max(0, min(self.num_drafts, self.max_outputs - num_outputs - 1))

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Prompt log-probabilities go out once, with choice 0's first token."""
        return self.index == 0 and not self.output_ids and self.request.params.prompt_logprobs is not None

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens [start, end)."""
        prompt, num_prompt = self.request.record.prompt_token_ids, self.request.num_prompt_tokens
        if end <= num_prompt:
            return prompt[start:end]
        return prompt[start:] + self.output_ids[max(0, start - num_prompt) : end - num_prompt]

    def sampled(self, num_kept: int, num_drafts: int) -> None:
        """A step in flight has yielded `num_kept` tokens: the KV of all but the last is computed."""
        self.num_pending -= 1
        self.num_computed += num_kept - 1
        self.num_drafting = 0
        self.num_drafts = num_drafts

    def become_row(self, row_id: int) -> None:
        """Take a row that the worker does not know yet."""
        self.row_id, self.state = row_id, ChoiceState.RUNNING
        self.launched = False
        self.quiet_until = self.plain_until = self.heed_at = 0

    def leave_worker(self, state: ChoiceState) -> None:
        """Forget all state held on a worker, except the swapped-out blocks of a preempted choice. The other blocks have
        been freed, or were lost with their worker."""
        self.state = state
        self.row_id = NO_ROW
        self.launched = False
        self.tables = []
        self.num_computed = self.num_confirmed = self.num_pending = self.num_registered = 0
        self.num_drafts = self.num_drafting = 0
        self.quiet_until = self.plain_until = self.heed_at = 0
        if state is not ChoiceState.PREEMPTED:
            self.swapped, self.num_swapped = [], 0
        if self.owes_prompt_logprobs:
            self.request.prompt_logprobs.clear()


class Request:
    """One record and its state.

    `deaths` counts losses of a worker that the request may have caused, `silences` holds the incarnations of workers
    that were only silent, `lost_lives` counts all losses while it had a row; each since its last new token. The router
    writes them; the scheduler that holds the request writes `num_rows`, `started` and the usage counters. Once `begun`,
    all its tokens come from the same weights and numerics.

    The caller has checked that `resume` fits the record: at most one entry for each choice. A `search` always starts
    over, since nothing of it is reported before its end; `params` are then those of each of its rows.
    """

    def __init__(
        self,
        record: RequestRecord,
        *,
        max_output_tokens: int,
        now: float,
        attempt: int = 0,
        resume: Resume = FROM_THE_START,
    ) -> None:
        self.record = record
        self.params: SamplingParams = record.task.params
        self.begun = begun = resume.begun
        self.request_id = record.request_id
        self.adapter_digest = record.adapter.digest if record.adapter else ""
        self.attempt = attempt
        self.max_output_tokens = max_output_tokens
        self.num_prompt_tokens = len(record.prompt_token_ids)
        self.arrived_at = now
        self.ledger = Ledger(Cause.QUEUED_NO_WORKER, now)
        self.eos_token_ids = () if self.params.ignore_eos else record.task.eos_token_ids
        self.deaths = self.lost_lives = 0
        self.silences: set[str] = set()
        self.replays = attempt
        self.charged = 0.0  # to its tenant, so far
        self.preemptions = 0
        self.cached_prompt_tokens = begun.cached_prompt_tokens if begun else 0
        self.started = False  # has had a row
        self.num_rows = 0
        self.prompt_logprobs: list[TopLogprobs] = []
        self.stop_ids = frozenset(self.eos_token_ids + self.params.stop_token_ids)
        self.search = self._search() if self.params.use_beam_search else None
        carried = self.params, self.eos_token_ids, record.adapter, record.cache_salt
        # Each row is sent these besides its tokens; functions stay in this process.
        self.row_bytes = len(msgspec.msgpack.encode(carried, enc_hook=repr))
        self.choices = [Choice(self, index) for index in range(self.params.n)]
        if self.search is None:
            self._take_prior(resume.prior_outputs)

    @property
    def live_choices(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.live]

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.output_ids) for choice in self.choices)

    @property
    def ended(self) -> bool:
        return not any(choice.live for choice in self.choices)

    @property
    def pools(self) -> bool:
        """Whether its prompt is read, not continued: its one output is a vector."""
        return isinstance(self.record.task, Pool)

    @property
    def resumes(self) -> bool:
        """Whether there is something to replay: it has had a row, or came with tokens."""
        return self.started or any(choice.output_ids for choice in self.choices)

    def leave_worker(self, now: float) -> None:
        """Forget everything but its tokens: its worker is lost or has given it up."""
        for choice in self.live_choices:
            choice.leave_worker(ChoiceState.WAITING)
        self.num_rows = 0
        self.replays += self.started
        self.ledger.enter(Cause.REPLAYING if self.resumes else Cause.QUEUED_NO_WORKER, now)

    def lose_track(self, now: float) -> list[Delta]:
        """Fail it with an internal error: its state in the scheduler is lost."""
        return self.fail(ErrorCode.INTERNAL, "the scheduler lost track of this request", now)

    def number_streams(self, first: int) -> None:
        """Number its streams: the receiver knows choice i as stream `first` + i."""
        for choice in self.choices:
            choice.stream = msgspec.structs.replace(choice.stream, number=first + choice.index)

    def named(self, choices: Collection[int]) -> list[Choice]:
        """Those of these choices that are live; all live ones if `choices` is empty. For a search this is all or none,
        because which beam becomes which choice is known only at its end."""
        live = self.live_choices
        named = [choice for choice in live if not choices or choice.index in choices]
        return [] if self.search is not None and len(named) < len(live) else named

    def begin(self, model_fingerprint: str, numerics_id: str) -> Begun | None:
        """Bind it to the weights and numerics of its first token. Returns what to report of that, once."""
        if self.begun is not None:
            return None
        self.begun = Begun(
            model_fingerprint=model_fingerprint, numerics_id=numerics_id, cached_prompt_tokens=self.cached_prompt_tokens
        )
        return self.begun

    def settle(self, now: float) -> list[Delta]:
        """Finish choices that their prior tokens already end, before anything runs.

        If all choices arrive finished, the request still gets its one ending, on the last choice: the ending that an
        earlier attempt reported, or an abort if the tokens do not show one.
        """
        endings = [(choice, self.ending_of(choice)) for choice in self.live_choices]
        deltas = [self.finish(choice, ending, now) for choice, ending in endings if ending]
        if not deltas and self.ended:
            last = self.choices[-1]
            deltas = [self.finish(last, self.ending_of(last) or Ending(FinishReason.ABORT), now)]
        return deltas

    def add_output(self, choice: Choice, output: RowOutput, now: float) -> tuple[Delta, int, Ending | None]:
        """Add a row's output: returns its delta, how many outputs were kept, and the ending, if any."""
        if self.pools:
            delta = self.delta(choice, 0)
            delta.result = Pooled(data=output.pooled)
            return delta, 1, Ending(FinishReason.STOP)
        delta, ending = self.add_tokens(choice, output.token_ids, output.logprobs, now)
        return delta, len(delta.tokens.token_ids), ending

    def add_tokens(
        self, choice: Choice, token_ids: Sequence[int], logprobs: list[TopLogprobs] | None, now: float
    ) -> tuple[Delta, Ending | None]:
        """Append sampled tokens up to the first that ends the choice, and drop the rest.

        Returns their delta and the ending, if any; the caller then finishes the choice.
        """
        tokens = Tokens(first_index=len(choice.output_ids), token_ids=[])
        delta = self.delta(choice, 0)
        delta.result = tokens
        if choice.owes_prompt_logprobs:
            tokens.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, []
        ending = None
        for token_id in token_ids:
            choice.output_ids.append(token_id)
            tokens.token_ids.append(token_id)
            ending = self.ending_of(choice)
            if ending:
                break
        if self.params.logprobs is not None and logprobs is not None:
            tokens.logprobs = logprobs[: len(tokens.token_ids)]
        self.note_progress(now)
        return delta, ending

    def ending_of(self, choice: Choice) -> Ending | None:
        """How its tokens end `choice`, if they do. A stop token at an output position < min_tokens does not."""
        num_outputs = len(choice.output_ids)
        if num_outputs > self.params.min_tokens and choice.output_ids[-1] in self.stop_ids:
            return Ending(FinishReason.STOP, choice.output_ids[-1])
        return Ending(FinishReason.LENGTH) if num_outputs >= self.max_output_tokens else None

    def finish(self, choice: Choice, ending: Ending, now: float, delta: Delta | None = None) -> Delta:
        """End a live choice, in `delta` or a new one; a request's last delta carries usage and ledger."""
        choice.state = ChoiceState.FINISHED
        if delta is None:
            choice.output_ids = choice.output_ids if self.search is None else []  # none were reported
            delta = self.delta(choice, len(choice.output_ids))
        delta.finish_reason = ending.reason
        if isinstance(delta.result, Tokens):
            delta.result.stop_token_id = ending.stop_token_id
        delta.error_code = ending.error_code
        delta.error_message = ending.error_message
        return self._close(delta, now) if self.ended else delta

    def abort(self, choices: Collection[int], now: float) -> list[Delta]:
        """End these live choices (empty: all) without a worker's help."""
        return [self.finish(choice, Ending(FinishReason.ABORT), now) for choice in self.named(choices)]

    def fail(self, code: ErrorCode, message: str, now: float) -> list[Delta]:
        """End all live choices with an error."""
        ending = Ending(FinishReason.ERROR, None, code, message)
        return [self.finish(choice, ending, now) for choice in self.live_choices]

    def let_go(self) -> None:
        """Break the reference cycle with its choices after its end: its prompt must not wait for garbage collection."""
        self.choices = []

    def note_progress(self, now: float) -> None:
        """A worker has produced output for it."""
        self.deaths = self.lost_lives = 0
        self.silences.clear()
        if self.ledger.cause is not Cause.DECODE:
            self.ledger.enter(Cause.DECODE, now)

    def note_row(self, cached_tokens: int, now: float) -> None:
        """A row of this request has been planned; `cached_tokens` of its prompt come from the prefix cache."""
        if not self.started:
            self.started = True
            if self.begun is None:
                self.cached_prompt_tokens = cached_tokens
        if self.ledger.cause in QUEUED:
            self.ledger.enter(Cause.PREFILL, now)

    def note_idle(self, now: float) -> None:
        """Its last row is gone: the remaining choices were preempted or have not started. A replay keeps its cause."""
        if self.ledger.cause in (Cause.PREFILL, Cause.DECODE):
            preempted = any(choice.state is ChoiceState.PREEMPTED for choice in self.choices)
            self.ledger.enter(Cause.PREEMPTED if preempted else Cause.QUEUED_BEHIND, now)

    def note_blocked(self, cause: Cause, now: float) -> None:
        """It is first in line and waits because of `cause`. A request that resumes keeps its own cause."""
        if not self.num_rows and self.ledger.cause in QUEUED and self.ledger.cause is not cause:
            self.ledger.enter(cause, now)

    def _search(self) -> BeamSearch:
        params, count = self.params, num_candidates(self.params, len(self.stop_ids))
        self.params = msgspec.structs.replace(params, temperature=0.0, logprobs=count)
        return BeamSearch(params.n, params.length_penalty, self.stop_ids, self.max_output_tokens, params.logprobs)

    def _take_prior(self, prior: Sequence[PriorOutput]) -> None:
        for output in prior:
            choice = self.choices[output.choice]
            choice.output_ids = list(output.token_ids)
            if output.finished:
                choice.state = ChoiceState.FINISHED

    def delta(self, choice: Choice, first_index: int) -> Delta:
        """A delta of `choice` with no new output, at output position `first_index`."""
        nothing = nothing_of(self.record.task, first_index)
        return Delta(request_id=self.request_id, attempt=self.attempt, choice=choice.index, result=nothing)

    def _close(self, delta: Delta, now: float) -> Delta:
        self.ledger.close(now)
        delta.ledger = self.ledger.entries()
        delta.usage = Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            output_tokens=sum(len(choice.output_ids) for choice in self.choices),
            preemptions=self.preemptions,
            replays=self.replays,
        )
        return delta
