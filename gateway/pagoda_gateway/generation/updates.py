"""Token deltas of a choice become updates; updates add up to the whole choice, however they were cut."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagoda_gateway.text.events import CallArguments, CallBegun, Event, Finish, Text
from pagoda_gateway.text.generation import ChoiceText
from pagoda_gateway.text.model_text import ModelText
from pagoda_gateway.text.tools import HermesParser
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import Delta
from pagoda_proto.steps import TopLogprobs


@dataclass(slots=True)
class Update:
    """What came of one choice at once: tokens, their log-probabilities if they were asked for, and what they say."""

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
    """Reads one choice, up to its ending. With `tools`, calls are read out of its text."""

    def __init__(self, index: int, text: ModelText, params: SamplingParams, *, tools: bool) -> None:
        self.index = index
        self.text = ChoiceText(text, params)
        self._parser = HermesParser() if tools else None

    def read(self, delta: Delta) -> Update:
        tokens = delta.result
        new = self.text.push(tokens.token_ids, tokens.logprobs, delta.finish_reason, tokens.stop_token_id)
        events: list[Event] = []
        if self._parser is not None:
            events += self._parser.push(new.text)
        elif new.text:
            events.append(Text(new.text))
        if new.finish_reason is not None:
            events += self._parser.flush() if self._parser is not None else ()
            called = self._parser is not None and self._parser.num_calls > 0
            events.append(Finish(new.finish_reason, new.stop_reason, called))
        return Update(self.index, new.token_ids, new.logprobs, events)


@dataclass
class Gathered:
    """What one choice has become so far. `calls` are names and texts of arguments."""

    texts: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
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
                case CallBegun():
                    self.calls.append((event.name, ""))
                case CallArguments():
                    name, arguments = self.calls[event.index]
                    self.calls[event.index] = name, arguments + event.text
                case Finish():
                    self.finish = event
