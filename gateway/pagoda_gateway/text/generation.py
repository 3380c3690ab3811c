"""A choice's text is a function of its token ids alone, so replaying the ids rebuilds it exactly.

Tokens are processed one by one, so that a stop string cuts at the token that completes it, however the tokens arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda_gateway.text.detokenizer import Detokenizer
from pagoda_gateway.text.model_text import ModelText
from pagoda_gateway.text.stop import StopMatcher
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import FinishReason
from pagoda_proto.steps import TopLogprobs


@dataclass(slots=True)
class TextDelta:
    """What a push added.

    `stop_reason` is the stop string or stop token id that ended the choice; None for an end of sequence, for a length
    limit, or while it runs. `logprobs` has one entry per token of `token_ids`, if the choice has log-probabilities.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TopLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class ChoiceText:
    """Text of one choice, `visible` tokens included. After its end, further tokens are ignored."""

    def __init__(self, model_text: ModelText, params: SamplingParams, visible: frozenset[int] = frozenset()) -> None:
        skip = params.skip_special_tokens
        self._detokenizer = Detokenizer(model_text.table, skip_special_tokens=skip, visible=visible)
        self._stop = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self._params = params
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TopLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
    ) -> TextDelta:
        """Take new tokens, and perhaps the choice's ending, as the engine core delivers them.

        If a stop string ends the choice, `finish_reason` is STOP, and the caller must abort the choice in the engine
        core, which does not know of stop strings.
        """
        if self.finished:
            return TextDelta("", [])
        if finish_reason is None and stop_token_id is None and not self._params.stop:  # nothing can end it here
            self.num_tokens += len(token_ids)
            known = None if logprobs is None else list(logprobs)
            return TextDelta(self._detokenizer.push(token_ids), list(token_ids), known)
        shown = self._without_stop_token(token_ids, stop_token_id)
        text, num_taken = self._take(shown)
        if self._stop.stopped_by is None:
            num_taken = len(token_ids)
            if finish_reason is not None:
                text += self._flush()
        self.num_tokens += num_taken
        stopped = self._stop.stopped_by is not None
        self.finish_reason = FinishReason.STOP if stopped else finish_reason
        return TextDelta(
            text=text,
            token_ids=list(token_ids[:num_taken]),
            logprobs=None if logprobs is None else list(logprobs[:num_taken]),
            finish_reason=self.finish_reason,
            stop_reason=self._stop.stopped_by if stopped else self._named_stop_token(stop_token_id),
        )

    def _take(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Text of the tokens, and how many of them were taken: up to a stop string, if one is found."""
        if not self._params.stop:
            return self._detokenizer.push(token_ids), len(token_ids)
        pieces = []
        for i, token_id in enumerate(token_ids, 1):
            armed = self.num_tokens + i > self._params.min_tokens
            pieces.append(self._stop.push(self._detokenizer.push((token_id,)), armed=armed))
            if self._stop.stopped_by is not None:
                return "".join(pieces), i
        return "".join(pieces), len(token_ids)

    def _flush(self) -> str:
        return self._stop.push(self._detokenizer.flush()) + self._stop.flush()

    def _without_stop_token(self, token_ids: Sequence[int], stop_token_id: int | None) -> Sequence[int]:
        """Drop the stop token that ended the choice, unless the caller wants it in the text."""
        ended = stop_token_id is not None and bool(token_ids) and token_ids[-1] == stop_token_id
        return token_ids[:-1] if ended and not self._params.include_stop_str_in_output else token_ids

    def _named_stop_token(self, stop_token_id: int | None) -> int | None:
        return stop_token_id if stop_token_id in self._params.stop_token_ids else None
