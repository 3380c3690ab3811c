"""A delta is news only from where its choice ends: cut off what is known, refuse what leaves a hole, queue the rest.

The books of one open request: the record, every token received so far per choice, and what its consumer has not taken
yet. They are all that is needed to submit the request again after a loss. No clock, no socket, no lock.
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
    NOTHING = "nothing"  # another attempt's, or known already
    GAP = "gap"  # tokens are missing before it: the stream cannot be trusted


@dataclass
class _Choice:
    """`tokens` has four bytes per token; `closed` means that its text is complete and we asked to stop it, `reason`
    how the engine core said it ended.
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
        """A choice that we asked to stop stopped; one that was left running was aborted."""
        if self.closed and self.reason in (None, FinishReason.ABORT):
            return FinishReason.STOP
        return self.reason or FinishReason.ABORT


_GRAVEST = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)


class OpenRequest:
    """Single owner: the pool that carries it. `ended` is set once; nothing is accepted afterwards.

    `begun` is under what its first token was made, None before. `ledger` is what the engine core said of its time at
    the end of the last attempt.
    """

    def __init__(self, record: RequestRecord, prior: Sequence[Delta] = ()) -> None:
        """`prior` is what was read of it before, at another gateway: it is known, and not told again."""
        self.record = record
        self.attempt = 0
        self.ended = False
        self.error: PagodaError | None = None
        self.error_code: ErrorCode | None = None  # of the last choice that failed
        self.begun: Begun | None = None
        self.ledger: list[LedgerEntry] = []
        self.was_read = False  # the model has seen its prompt
        self._usage: Usage | None = None  # as the engine core told it
        self._choices = [_Choice() for _ in range(record.task.params.n)]
        self._pending = WaitingDeltas()
        self._failed: list[Delta] = []  # delivered by themselves, after the tokens that came before
        for delta in prior:
            self._know(self._choices[delta.choice], delta)
        self.attempt = int(bool(prior))

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self._choices)

    @property
    def wants_nothing_more(self) -> bool:
        """Every choice has ended or was asked to: there is nothing to submit again."""
        return all(choice.ended or choice.closed for choice in self._choices)

    @property
    def outcome(self) -> FinishReason:
        """How it ended as its user sees it; of several choices the gravest."""
        outcomes = {choice.outcome for choice in self._choices}
        return next(reason for reason in _GRAVEST if reason in outcomes)

    def usage(self) -> Usage:
        """The engine core's word, or what is known here until it comes."""
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
        """The text of these choices is complete; of none named, of all."""
        for i in choices or range(len(self._choices)):
            self._choices[i].closed = True

    def next_token(self, choice: int, first_index: int, token_id: int) -> Delta:
        """A token and nothing else, of this attempt."""
        tokens = Tokens(first_index=first_index, token_ids=[token_id])
        return Delta(request_id=self.record.request_id, attempt=self.attempt, choice=choice, result=tokens)

    def take_next(self, choice: int, first_index: int, token_id: int) -> bool:
        """`take` of a `next_token` that is news; nothing is changed, and False, when it is not."""
        tokens = self._choices[choice].tokens
        if self.ended or self._choices[choice].ended or first_index != len(tokens):
            return False
        tokens.append(token_id)
        self._pending.add(self.next_token(choice, first_index, token_id))
        return True

    def take(self, delta: Delta) -> Taken:
        """Queue what is new in `delta`, which is cut to that in place."""
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
        """End with an error: choices still wanted end with it, after the tokens that are waiting."""
        if not self.ended:
            self.error = error
            self.end_here()

    def end_here(self) -> None:
        """End without the engine core: what is still wanted ends with `error`, what was asked to stop is aborted."""
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
        """What has come since the last call, one delta per choice; failures when nothing else is left."""
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
