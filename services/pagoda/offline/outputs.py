"""The results of offline generation, in the field's usual classes, assembled from the engine core's deltas."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagoda_gateway.text.generation import ChoiceText
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Delta, FinishReason, LedgerEntry, RequestRecord, Usage
from pagoda_proto.steps import TopLogprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One choice.

    Attributes:
        index: The choice's number in the request.
        text: The text so far.
        token_ids: The tokens so far.
        cumulative_logprob: Sum over the tokens; None if no log-probabilities were requested.
        logprobs: Per token, the alternatives by token id, including the chosen token; None if not requested.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: The stop string or stop token id that ended it; None otherwise.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Where a request's tokens and time went; `ledger` sums to its latency in the engine core."""

    usage: Usage
    ledger: tuple[LedgerEntry, ...]


@dataclass
class RequestOutput:
    """A request and everything generated for it so far.

    Attributes:
        prompt: The prompt's text; None if it was given as token ids.
        prompt_logprobs: Per prompt token, the alternatives by token id, None for the first; None if not requested.
        finished: Whether every choice has ended.
        metrics: Known once finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    metrics: RequestMetrics | None = None


class OfflineRequest:
    """A request in this process: takes deltas, keeps its `output` up to date. `error` is set if it failed."""

    def __init__(self, record: RequestRecord, prompt: str | None, text: ModelText) -> None:
        params = record.task.params
        self.record = record
        self.error: PagodaError | None = None
        self.output = RequestOutput(
            request_id=record.request_id,
            prompt=prompt,
            prompt_token_ids=record.prompt_token_ids,
            outputs=[CompletionOutput(index) for index in range(params.n)],
        )
        self._text = text
        self._choices = [ChoiceText(text, params) for _ in range(params.n)]

    @property
    def ended(self) -> bool:
        return self.output.finished or self.error is not None

    def take(self, delta: Delta) -> int | None:
        """Add a delta; returns the choice to abort if a stop string has just ended it on the text side. A delta that
        cannot be added fails the request."""
        try:
            return self._add(delta)
        except Exception as error:
            log.exception("the answer of request %r cannot be read", delta.request_id)
            self.error = PagodaError(ErrorCode.INTERNAL, f"the answer cannot be read: {error}")
            return None

    def _add(self, delta: Delta) -> int | None:
        choice, output, tokens = self._choices[delta.choice], self.output.outputs[delta.choice], delta.tokens
        if delta.finish_reason is FinishReason.ERROR and not choice.finished:
            self.error = PagodaError(delta.error_code or ErrorCode.INTERNAL, delta.error_message)
        if tokens.prompt_logprobs is not None:
            self._take_prompt_logprobs(tokens.prompt_logprobs)
        stopped = False
        if not choice.finished:
            added = choice.push(tokens.token_ids, tokens.logprobs, delta.finish_reason, tokens.stop_token_id)
            output.text += added.text
            output.token_ids += added.token_ids
            output.finish_reason, output.stop_reason = added.finish_reason, added.stop_reason
            if added.logprobs is not None:
                self._take_logprobs(output, added.token_ids, added.logprobs)
            stopped = choice.finished and delta.finish_reason is None
        if delta.ends_request and delta.usage is not None:
            self.output.metrics = RequestMetrics(delta.usage, tuple(delta.ledger or ()))
            self.output.finished = self.error is None
        return delta.choice if stopped else None

    def _take_logprobs(
        self, output: CompletionOutput, token_ids: Sequence[int], entries: Sequence[TopLogprobs]
    ) -> None:
        output.logprobs = output.logprobs or []
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(entry.logprob for entry in entries)
        output.logprobs += [self._alternatives(*pair) for pair in zip(token_ids, entries, strict=True)]

    def _take_prompt_logprobs(self, entries: Sequence[TopLogprobs]) -> None:
        tokens = self.record.prompt_token_ids[1:]
        self.output.prompt_logprobs = [None, *(self._alternatives(*pair) for pair in zip(tokens, entries, strict=True))]

    def _alternatives(self, token_id: int, entry: TopLogprobs) -> dict[int, Logprob]:
        found = {
            top: Logprob(logprob, rank, self._decoded(top))
            for rank, (top, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
        }
        return found | {token_id: Logprob(entry.logprob, entry.rank, self._decoded(token_id))}

    def _decoded(self, token_id: int) -> str:
        return self._text.token_bytes(token_id).decode("utf-8", "replace")
