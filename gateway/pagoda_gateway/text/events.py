"""What a model says, in no API's words: whatever reads its text emits these, and dialects render them.

The events of a choice come in order; `Finish` is the last one. What a model thinks before it speaks would be one more
event beside `Text`, of one more parser.
"""

from __future__ import annotations

import msgspec

from pagoda_proto.records import FinishReason


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str


class CallBegun(msgspec.Struct, frozen=True, tag=True):
    """A tool call, numbered within its choice."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True, tag=True):
    """More of the text of a JSON object."""

    index: int
    text: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """`stop_reason` is the stop string or stop token id that ended the choice, if one did; `called`: it has calls."""

    reason: FinishReason
    stop_reason: str | int | None = None
    called: bool = False


Said = Text | CallBegun | CallArguments
Event = Said | Finish
