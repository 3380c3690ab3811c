"""What a model says, in no API's words: whatever reads its text emits these, and dialects render them.

The events of a choice come in order; `Finish` is the last one. A call that has begun is ended, unless the text broke
off in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagoda_proto.records import FinishReason


class Thought(msgspec.Struct, frozen=True, tag=True):
    """What a model writes for itself before it answers."""

    text: str


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str


class CallBegun(msgspec.Struct, frozen=True, tag=True):
    """A tool call, numbered within its choice. `id` is what its format demands; "" leaves it to the dialect."""

    index: int
    name: str
    id: str = ""


class CallArguments(msgspec.Struct, frozen=True, tag=True):
    """More of the text of a JSON object."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True, tag=True):
    """The arguments are whole."""

    index: int


class Finish(msgspec.Struct, frozen=True, tag=True):
    """`stop_reason` is the stop string or stop token id that ended the choice, if one did; `called`: it has calls."""

    reason: FinishReason
    stop_reason: str | int | None = None
    called: bool = False


Said = Thought | Text | CallBegun | CallArguments | CallEnded
Event = Said | Finish


def merged(events: Sequence[Said]) -> list[Said]:
    """Neighbours of a kind as one."""
    found: list[Said] = []
    for event in events:
        last = found[-1] if found else None
        match last, event:
            case Text(), Text():
                found[-1] = Text(last.text + event.text)
            case Thought(), Thought():
                found[-1] = Thought(last.text + event.text)
            case CallArguments(), CallArguments():
                found[-1] = CallArguments(last.index, last.text + event.text)
            case _:
                found.append(event)
    return found
