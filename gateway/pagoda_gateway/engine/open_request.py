"""The state of one open request: its record, all tokens received per choice, and deltas its consumer has not read yet.

It is all that is needed to resubmit the request after a loss. Of each delta, the part already known is cut off, one
that leaves a gap is refused, and the rest is queued. No clock, no socket, no lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from pagoda_proto.deltas import WaitingDeltas
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import (
    Begun,
    Delta,
    FinishReason,
    LedgerEntry,
    PriorOutput,
    RequestRecord,
    Resume,
    Tokens,
    Usage,
    nothing_of,
)


class Taken(Enum):
    NEWS = "news"
    NOTHING = "nothing"  # of another attempt, or known already
    GAP = "gap"  # tokens are missing before it: the stream cannot be trusted


@dataclass
class _Choice:
    """`tokens` takes four bytes per token; `closed`: its text is complete and we asked to stop it; `reason`: how it
    ended according to the engine core.
    """

    tokens: array[int] = field(default_factory=lambda: array("I"))
    prompt_logprobs_seen: bool = False
    closed: bool = False
    reason: FinishReason | None = None

    @property
    def ended(self) -> bool:
        return self.reason is not None

    @property
    def outcome(self) -> FinishReason:
        """STOP for a choice that we asked to stop; ABORT for one that was still running."""
        if self.closed and self.reason in (None, FinishReason.ABORT):
            return FinishReason.STOP
        return self.reason or FinishReason.ABORT


_GRAVEST = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)


class OpenRequest:
    """Owned by the pool that carries it. `ended` is set once; nothing is accepted afterwards.

    `begun` names the weights and numerics its first token was made with, None before. `ledger` is how the engine core
    accounted for its time at the end of the last attempt.
    """

    def __init__(self, record: RequestRecord, prior: Sequence[Delta] = ()) -> None:
        """`prior` is output delivered before, at another gateway: it counts as known and is not delivered again."""
        self.record = record
        self.attempt = 0
        self.ended = False
        self.error: PagodaError | None = None
        self.error_code: ErrorCode | None = None  # of the last choice that failed
        self.begun: Begun | None = None
        self.ledger: list[LedgerEntry] = []
        self.was_read = False  # the model has seen its prompt
        self._usage: Usage | None = None  # as reported by the engine core
        self._choices = [_Choice() for _ in range(record.task.params.n)]
        self._pending = WaitingDeltas()
        self._failed: list[Delta] = []  # delivered separately, after earlier tokens
        for delta in prior:
            self._know(self._choices[delta.choice], delta)
        self.attempt = int(bool(prior))

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self._choices)

    @property
    def wants_nothing_more(self) -> bool:
        """Every choice has ended or was asked to stop: there is nothing to resubmit."""
        return all(choice.ended or choice.closed for choice in self._choices)

    @property
    def outcome(self) -> FinishReason:
        """How it ended for its user: the gravest outcome of its choices."""
        outcomes = {choice.outcome for choice in self._choices}
        return next(reason for reason in _GRAVEST if reason in outcomes)

    def usage(self) -> Usage:
        """As reported by the engine core; until then, as counted here."""
        return self._usage or Usage(
            prompt_tokens=len(self.record.prompt_token_ids),
            cached_prompt_tokens=self.begun.cached_prompt_tokens if self.begun is not None else 0,
            output_tokens=self.num_output_tokens,
            replays=self.attempt,
        )

    def resume(self) -> Resume:
        """What the next attempt starts from."""
        outputs = (
            PriorOutput(choice=i, token_ids=choice.tokens.tolist(), finished=choice.ended or choice.closed)
            for i, choice in enumerate(self._choices)
            if choice.tokens or choice.ended or choice.closed
        )
        return Resume(prior_outputs=tuple(outputs), begun=self.begun)

    def close(self, choices: tuple[int, ...]) -> None:
        """Mark the text of these choices as complete; of all if none is named."""
        for i in choices or range(len(self._choices)):
            self._choices[i].closed = True

    def next_token(self, choice: int, first_index: int, token_id: int) -> Delta:
        """A delta of this attempt with one token and nothing else."""
        tokens = Tokens(first_index=first_index, token_ids=[token_id])
        return Delta(request_id=self.record.request_id, attempt=self.attempt, choice=choice, result=tokens)

    def take_next(self, choice: int, first_index: int, token_id: int) -> bool:
        """Fast path of `take` for a `next_token`. Returns False and changes nothing if it is not the next one."""
        tokens = self._choices[choice].tokens
        if self.ended or self._choices[choice].ended or first_index != len(tokens):
            return False
        tokens.append(token_id)
        self._pending.add(self.next_token(choice, first_index, token_id))
        return True

    def take(self, delta: Delta) -> Taken:
        """Queue the new part of `delta`, which is cut to it in place."""
        if self.ended or delta.attempt != self.attempt:
            return Taken.NOTHING
        if not 0 <= delta.choice < len(self._choices):
            return Taken.GAP
        choice, tokens = self._choices[delta.choice], delta.tokens
        num_known = len(choice.tokens) - tokens.first_index
        if num_known < 0:
            return Taken.GAP
        if num_known:
            _cut(tokens, num_known)
        if choice.prompt_logprobs_seen:
            tokens.prompt_logprobs = None
        if choice.ended and not delta.ends_request:
            return Taken.NOTHING
        if not (delta.has_output or delta.finish_reason or delta.ends_request or tokens.prompt_logprobs):
            return Taken.NOTHING
        self._book(choice, delta)
        return Taken.NEWS

    def _know(self, choice: _Choice, delta: Delta) -> None:
        tokens = delta.tokens
        choice.tokens.extend(tokens.token_ids)
        self.was_read |= delta.has_output
        choice.prompt_logprobs_seen |= tokens.prompt_logprobs is not None
        choice.reason = choice.reason or delta.finish_reason
        self.begun = self.begun or tokens.begun

    def _book(self, choice: _Choice, delta: Delta) -> None:
        self._know(choice, delta)
        self.error_code = delta.error_code or self.error_code
        self._usage = delta.usage
        self.ledger = delta.ledger or []
        self.ended = delta.ends_request
        if delta.finish_reason is FinishReason.ERROR or (self._failed and delta.ends_request):
            self._failed.append(delta)
            return
        self._pending.add(delta)

    def fail(self, error: PagodaError) -> None:
        """End with an error: choices still wanted end with it, after tokens not yet read."""
        if not self.ended:
            self.error = error
            self.end_here()

    def end_here(self) -> None:
        """End without the engine core: wanted choices end with `error`, those asked to stop as aborted."""
        open_choices = [i for i, choice in enumerate(self._choices) if not choice.ended]
        for i in open_choices or [len(self._choices) - 1]:
            self._book(self._choices[i], self._last_delta(i))
        last = self._failed[-1] if self._failed else self._pending.last()
        last.usage = self._usage = self.usage()
        self.ended = True

    def _last_delta(self, index: int) -> Delta:
        choice = self._choices[index]
        delta = Delta(
            request_id=self.record.request_id,
            attempt=self.attempt,
            choice=index,
            result=nothing_of(self.record.task, len(choice.tokens)),
        )
        if choice.ended:
            return delta
        if choice.closed or self.error is None:
            delta.finish_reason = FinishReason.ABORT
        else:
            delta.finish_reason = FinishReason.ERROR
            delta.error_code = self.error.code
            delta.error_message = self.error.message
        return delta

    def drain(self) -> list[Delta]:
        """What has arrived since the last call, one delta per choice; failures once nothing else is left."""
        if self._pending:
            return self._pending.take()
        deltas, self._failed = self._failed, []
        return deltas

    def drop(self) -> None:
        """The consumer is gone."""
        self.ended = True
        self._pending.take()
        self._failed.clear()


def _cut(tokens: Tokens, num_known: int) -> None:
    num_cut = min(num_known, len(tokens.token_ids))
    del tokens.token_ids[:num_cut]
    if tokens.logprobs is not None:
        tokens.logprobs = tokens.logprobs[num_cut:] or None
    tokens.first_index += num_known
