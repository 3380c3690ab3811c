"""API-independent events of an answer: parsers of a model's text emit them, and dialects render them.

The events of a choice come in order; `Finish` is the last one. Every call that begins also ends, unless the text breaks
off in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec

from pagoda_proto.records import FinishReason


class Thought(msgspec.Struct, frozen=True, tag=True):
    """Reasoning that a model writes before it answers."""

    text: str


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str


class CallBegun(msgspec.Struct, frozen=True, tag=True):
    """A tool call, numbered within its choice. `id` is one that its format demands; "" leaves it to the dialect."""

    index: int
    name: str
    id: str = ""


class CallArguments(msgspec.Struct, frozen=True, tag=True):
    """More of the text of a JSON object."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True, tag=True):
    """The arguments are complete."""

    index: int


class Finish(msgspec.Struct, frozen=True, tag=True):
    """`stop_reason` is the stop string or stop token id that ended the choice, if one did; `called`: it has calls, all
    of them complete."""

    reason: FinishReason
    stop_reason: str | int | None = None
    called: bool = False


Said = Thought | Text | CallBegun | CallArguments | CallEnded
Event = Said | Finish


def merged(events: Sequence[Said]) -> list[Said]:
    """Merge adjacent events of a kind."""
    found: list[Said] = []
    for _, group in groupby(events, _kind):
        first, *others = group
        if others and not isinstance(first, CallBegun | CallEnded):
            text = "".join(each.text for each in (first, *others) if not isinstance(each, CallBegun | CallEnded))
            found.append(msgspec.structs.replace(first, text=text))
        else:
            found += (first, *others)
    return found


def _kind(event: Said) -> tuple[type, int]:
    return type(event), event.index if isinstance(event, CallArguments) else 0
