"""A format is where calls begin and end, and the shape of one call; the rest is the same for all families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from pagoda_gateway.text.events import CallArguments, CallBegun, CallEnded, Said
from pagoda_gateway.text.lark import Rules
from pagoda_gateway.text.source import MAX_NAME_CHARS, NotACall, Reading, Source
from pagoda_gateway.text.tool_formats.functions import Function


class Calls:
    """The calls of one choice, as they are read: a shape tells them, in order.

    `number` counts those that ended; `begun`: one is being read. `on_begin` is called when one begins: what was read of
    it will not be said as text.
    """

    def __init__(self, functions: Sequence[Function], said: list[Said], on_begin: Callable[[], object]) -> None:
        self.functions = {function.name: function for function in functions}
        self.number = 0
        self.begun = False
        self._said = said
        self._on_begin = on_begin
        self._ids: set[str] = set()

    def begin(self, name: str, call_id: str = "") -> None:
        """Raises NotACall for a name that cannot be one. An id that cannot be one, or that the choice has already, is
        nobody's."""
        if not _names_something(name):
            raise NotACall("a call needs a name")
        known = not _names_something(call_id) or call_id in self._ids
        self._said.append(CallBegun(self.number, name, "" if known else call_id))
        self._ids.add(call_id)
        self.begun = True
        self._on_begin()

    def arguments(self, text: str) -> None:
        if text:
            self._said.append(CallArguments(self.number, text))

    def end(self) -> None:
        self._said.append(CallEnded(self.number))
        self.number += 1
        self.begun = False


def _names_something(text: str) -> bool:
    return 1 <= len(text) <= MAX_NAME_CHARS and text.isprintable()


class Shape(Protocol):
    """How one call is written.

    `markers` are the texts in it that may be tokens of their own. `reads_schemas`: what a value is says its schema.
    """

    reads_schemas: ClassVar[bool]

    @property
    def markers(self) -> tuple[str, ...]: ...

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        """Tell the call. Raises NotACall before it has begun, and never after; one that breaks off is not ended."""
        ...

    def rule(self, rules: Rules, function: Function) -> str:
        """Raises NotEnforced."""
        ...


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """A family's way to write calls.

    Attributes:
        names: What vLLM calls it; the same format may be known by several.
        marks: A chat template that has all of these asks for it.
        begin: What a group of calls is known by in a text; `also`: others that it may be known by.
        opening: What follows `begin`; a `bare` group starts with it.
        between: Between calls of a group; None for groups of one.
        end: What a group ends with.
        again: Between groups; None where there is only one.
        bare: An answer may begin with a group that lacks `begin`. Then it looks like this, as an expression in which
            NAMES are those of the functions.
        short_ids: Chat templates of this family take ids of nine letters and digits only.
    """

    names: tuple[str, ...]
    marks: tuple[str, ...]
    shape: Shape
    begin: str = ""
    also: tuple[str, ...] = ()
    opening: str = ""
    between: str | None = None
    end: str = ""
    again: str | None = None
    bare: str = ""
    short_ids: bool = False

    @property
    def triggers(self) -> tuple[str, ...]:
        return tuple(text for text in (self.begin, *self.also) if text)

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts in which what is a token must be seen, whatever the tokenizer calls it."""
        return (*self.triggers, self.opening, self.between or "", self.end, self.again or "", *self.shape.markers)
