"""Turns a choice's token deltas into updates, which add up to the same choice however the deltas were split."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagoda_gateway.text.answers import AnswerReader, Formats, HowRead
from pagoda_gateway.text.events import CallArguments, CallBegun, Event, Finish, Said, Text, Thought, merged
from pagoda_gateway.text.generation import ChoiceText
from pagoda_gateway.text.model_text import ModelText
from pagoda_gateway.text.reasoning import Thinking
from pagoda_proto.records import Delta, RequestRecord
from pagoda_proto.steps import TopLogprobs

SHORT_ID_CHARS = 9
MAX_LEAD_TOKENS = 2  # only white space may precede reasoning


@dataclass(slots=True)
class Update:
    """New output of one choice: tokens, their log-probabilities if requested, and the events parsed from them."""

    choice: int
    token_ids: list[int]
    logprobs: list[TopLogprobs] | None
    events: list[Event]

    @property
    def text(self) -> str:
        text = ""
        for event in self.events:
            if isinstance(event, Text):
                text += event.text
        return text

    @property
    def finish(self) -> Finish | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Finish) else None


class ChoiceReader:
    """Reads one choice until it ends."""

    def __init__(self, index: int, text: ModelText, record: RequestRecord, how: HowRead) -> None:
        self.index = index
        formats = text.formats
        self.text = ChoiceText(text, record.task.params, formats.visible(how))
        self._reader = AnswerReader(formats, how)
        self._thoughts = ThoughtCount.of(formats, how)
        self._short_ids = formats.tools is not None and formats.tools.short_ids
        self._request_id = record.request_id

    @property
    def num_reasoning_tokens(self) -> int | None:
        """The count so far; None if it cannot be known exactly."""
        return None if self._thoughts is None else self._thoughts.number

    def read(self, delta: Delta) -> Update:
        tokens = delta.tokens
        new = self.text.push(tokens.token_ids, tokens.logprobs, delta.finish_reason, tokens.stop_token_id)
        said = self._reader.push(new.text)
        if new.finish_reason is not None:
            said = merged([*said, *self._reader.flush()])
        if self._thoughts is not None:
            self._thoughts.take(new.token_ids)
        events: list[Event] = [self._named(event) for event in said] if self._short_ids else [*said]
        if new.finish_reason is not None:
            events.append(Finish(new.finish_reason, new.stop_reason, self._reader.called))
        return Update(self.index, new.token_ids, new.logprobs, events)

    def _named(self, event: Said) -> Said:
        """Give a call the short id that some chat templates require, derived from the request's id."""
        if not isinstance(event, CallBegun):
            return event
        digest = hashlib.sha256(f"{self._request_id} {self.index} {event.index}".encode()).digest()
        letters = base64.b32encode(digest).decode().lower()
        return CallBegun(event.index, event.name, letters[:SHORT_ID_CHARS])


class ThoughtCount:
    """Counts a choice's reasoning tokens, markers included; exact, as each marker it counts by is a single token.

    Args:
        opens: The token that opens reasoning; None if the prompt has opened it.
        closes: The token that closes it.
    """

    def __init__(self, opens: int | None, closes: int) -> None:
        self._opens = opens
        self._closes = closes
        self._num_taken = 0
        self._over = False
        self.number = 0

    @staticmethod
    def of(formats: Formats, how: HowRead) -> ThoughtCount | None:
        """None if the number cannot be known exactly."""
        reasoning = formats.reasoning
        if reasoning is None or how.thinking is None or reasoning.again:
            return None
        opens, closes = formats.tokens.get(reasoning.open), formats.tokens.get(reasoning.close)
        if closes is None or (opens is None and how.thinking is Thinking.POSSIBLE):
            return None
        count = ThoughtCount(opens if how.thinking is Thinking.POSSIBLE else None, closes)
        count._over = how.thinking is Thinking.OVER
        return count

    def take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids if not self._over else ():
            self._num_taken += 1
            if self._opens is not None and self._num_taken <= MAX_LEAD_TOKENS and token_id == self._opens:
                self._opens = None
            if self._opens is None:
                self.number = self._num_taken
            self._over = token_id == self._closes or (self._opens is not None and self._num_taken >= MAX_LEAD_TOKENS)
            if self._over:
                return


@dataclass
class GatheredCall:
    begun: CallBegun
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass
class Gathered:
    """The output of one choice so far."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[GatheredCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TopLogprobs] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, update: Update) -> None:
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs or ()
        for event in update.events:
            match event:
                case Text():
                    self.texts.append(event.text)
                case Thought():
                    self.thoughts.append(event.text)
                case CallBegun():
                    self.calls.append(GatheredCall(event))
                case CallArguments():
                    self.calls[event.index].pieces.append(event.text)
                case Finish():
                    self.finish = event
