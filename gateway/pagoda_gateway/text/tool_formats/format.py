"""A format says where calls begin and end, and which shape one call has; the rest is the same for all families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from pagoda_gateway.text.events import CallArguments, CallBegun, CallEnded, Said
from pagoda_gateway.text.lark import Rules
from pagoda_gateway.text.source import MAX_NAME_CHARS, NotACall, Reading, Source
from pagoda_gateway.text.tool_formats.functions import Function


class Calls:
    """Collects the calls of one choice, which a shape reports in order as it parses them.

    `number` counts calls that have ended; `begun`: one is being read. `on_begin` is called when one begins: from then
    on, what was read of it cannot become text.
    """

    def __init__(self, functions: Sequence[Function], said: list[Said], on_begin: Callable[[], object]) -> None:
        self.functions = {function.name: function for function in functions}
        self.number = 0
        self.begun = False
        self._said = said
        self._on_begin = on_begin
        self._ids: set[str] = set()

    def begin(self, name: str, call_id: str = "") -> None:
        """Raises NotACall for an invalid name. An id that is invalid, or already used in the choice, is dropped."""
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

    `markers` are the texts in it that may be tokens. `reads_schemas`: the schema determines how a value is parsed.
    """

    reads_schemas: ClassVar[bool]

    @property
    def markers(self) -> tuple[str, ...]: ...

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        """Parse a call and report it. Raises NotACall only before it has begun; a call that breaks off is not ended."""
        ...

    def rule(self, rules: Rules, function: Function) -> str:
        """A grammar rule for a call of `function`. Raises NotEnforced."""
        ...


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a model family writes calls.

    Attributes:
        names: vLLM's names for it; one format may have several.
        marks: A chat template that contains all of these uses it.
        begin: The text that starts a group of calls; `also`: alternatives to it.
        opening: The text after `begin`; a `bare` group starts with it.
        between: The text between calls of a group; None if a group has only one.
        end: The text that ends a group.
        again: The text between groups; None if there is only one group.
        bare: If set, an answer may begin with a group that lacks `begin`; this expression recognises it, with NAMES for
            the names of the functions.
        short_ids: Chat templates of this family accept only ids of nine letters and digits.
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
        """Texts whose tokens must be visible, whether or not the tokenizer calls them special."""
        return (*self.triggers, self.opening, self.between or "", self.end, self.again or "", *self.shape.markers)
