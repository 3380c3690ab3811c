"""A position says how much of a stream its reader has, in numbers that do not depend on how the stream was split.

For each choice it counts the tokens sent (ids, log-probabilities) and the *units* of their content: a unit is a
character of text, reasoning or arguments, or anything that is only sent whole: a beginning, a call's name, an ending.
To resume, a gateway writes the stream again from its first token, with the same code, and leaves out what the position
covers.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

import msgspec

from pagoda_gateway.generation.updates import Update
from pagoda_gateway.text.events import CallArguments, Event, Text, Thought
from pagoda_proto.errors import ErrorCode, PagodaError

MAX_POSITION_CHARS = 4096
MAX_CHOICES = 128  # in a stream that can be resumed, because every event id covers all of them
_FORM = re.compile(r"([a-z0-9_]{1,64}):([0-9a-f]{8}):([0-9]{1,9}):([0-9]{1,9}\.[0-9]{1,9}(?:,[0-9]{1,9}\.[0-9]{1,9})*)")


class Place(NamedTuple):
    """How far the reader is in one choice."""

    tokens: int = 0
    units: int = 0


NOWHERE = Place()


class Position(NamedTuple):
    """`tag` identifies what the stream was made from: its job, weights and numerics; `besides` counts what belongs to
    no choice, as the dialect defines it."""

    stream: str
    tag: str
    besides: int
    places: tuple[Place, ...]

    def __str__(self) -> str:
        places = ",".join([f"{tokens}.{units}" for tokens, units in self.places])
        return f"{self.stream}:{self.tag}:{self.besides}:{places}"

    @classmethod
    def read(cls, text: str) -> Position:
        """Raises ValueError if `text` does not have the form of a position."""
        found = _FORM.fullmatch(text) if len(text) <= MAX_POSITION_CHARS else None
        if found is None:
            raise ValueError("is not the id of an event of this server")
        stream, tag, besides, places = found.groups()
        pairs = (place.split(".") for place in places.split(","))
        return cls(stream, tag, int(besides), tuple(Place(int(tokens), int(units)) for tokens, units in pairs))


def units_of(event: Event) -> int:
    return len(event.text) if isinstance(event, Text | Thought | CallArguments) else 1


class MadeOf(Protocol):
    def tag(self) -> str:
        """Identifies what is known now of the stream's job, weights and numerics: eight hexadecimal digits."""
        ...

    def fits(self, tag: str) -> bool:
        """Whether events sent under this tag may have been made from the same."""
        ...


class Marks:
    """Tracks the reader's position while a stream is written. The writer asks what the reader already has, says how far
    an event advances it, and gets the event's id.

    Args:
        stream: The stream's name.
        made_of: Provides the tags.
        num_choices: Of all prompts together.
        known: The position that the reader came with.
    """

    def __init__(self, stream: str, made_of: MadeOf, num_choices: int, known: Position | None = None) -> None:
        """Raises ValueError if `known` belongs to another stream, or to one with another number of choices."""
        if known is not None and (known.stream, len(known.places)) != (stream, num_choices):
            raise ValueError("belongs to another stream")
        self.stream = stream
        self._made_of = made_of
        self._known_tag = None if known is None else known.tag
        self._places = [NOWHERE] * num_choices
        self._known = [NOWHERE] * num_choices if known is None else list(known.places)
        self.besides = 0 if known is None else known.besides

    def known(self, choice: int) -> Place:
        """How much of the output still to be written the reader already has."""
        return self._known[choice]

    def move(self, choice: int, tokens: int, units: int) -> None:
        place = self._places[choice]
        self._places[choice] = Place(place.tokens + tokens, place.units + units)

    def move_to(self, choice: int, place: Place) -> None:
        self._places[choice] = place

    def line(self) -> bytes:
        """The `id:` line of an event that brings the reader to the current position.

        Raises:
            PagodaError: STREAM_INTERRUPTED: the reader's part was made with other weights or numerics.
        """
        if self._known_tag is not None and not self._made_of.fits(self._known_tag):
            message = "this stream cannot be continued: it began with other weights or other numerics"
            raise PagodaError(ErrorCode.STREAM_INTERRUPTED, message)
        return b"id: " + str(self._position()).encode() + b"\n"

    def _position(self) -> Position:
        return Position(self.stream, self._made_of.tag(), self.besides, tuple(self._places))

    def skip(self, choice: int, units: int) -> int:
        """How many of the next `units` the reader has; moves past those."""
        known = self._known[choice]
        skipped = min(known.units, units)
        self._known[choice] = known._replace(units=known.units - skipped)
        self.move(choice, 0, skipped)
        return skipped

    def cut(self, update: Update) -> tuple[Update, Update]:
        """Split an update into the part that the reader has, moving past it, and the rest."""
        known = self._known[update.choice]
        if known == NOWHERE:
            return Update(update.choice, [], None if update.logprobs is None else [], []), update
        at = min(known.tokens, len(update.token_ids))
        self._known[update.choice] = known._replace(tokens=known.tokens - at)
        self.move(update.choice, at, 0)
        ids, logprobs = update.token_ids, update.logprobs
        parts = [(ids[:at], None if logprobs is None else logprobs[:at])]
        parts.append((ids[at:], None if logprobs is None else logprobs[at:]))
        had: list[Event] = []
        left: list[Event] = []
        for event in update.events:
            size = units_of(event)
            skipped = self.skip(update.choice, size)
            if skipped == size and not left:
                had.append(event)
            elif skipped and isinstance(event, Text | Thought | CallArguments):
                had.append(msgspec.structs.replace(event, text=event.text[:skipped]))
                left.append(msgspec.structs.replace(event, text=event.text[skipped:]))
            else:
                left.append(event)
        return Update(update.choice, *parts[0], had), Update(update.choice, *parts[1], left)
