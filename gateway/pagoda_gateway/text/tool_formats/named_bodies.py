"""Shape: a call is a name between markers, followed by its arguments as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pagoda_gateway.text.lark import Rules
from pagoda_gateway.text.source import NotACall, Reading, Source
from pagoda_gateway.text.tool_formats.format import Calls
from pagoda_gateway.text.tool_formats.functions import Function


@dataclass(frozen=True)
class NamedBody:
    """`begin` name `body` {..} `end`.

    `numbered`: a colon and a number follow the name, and `id_begin`, name and number form the call's id. The text
    between the name and the last word of `body` is ignored.
    """

    begin: str = ""
    body: str = ""
    end: str = ""
    numbered: bool = False
    id_begin: str = ""

    reads_schemas: ClassVar[bool] = False

    @property
    def markers(self) -> tuple[str, ...]:
        return self.begin, self.body, self.end

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        if not (yield from source.loosely(self.begin)):
            raise NotACall("it begins in another way")
        yield from source.space()
        name, call_id = (yield from source.name()), ""
        if self.numbered and (yield from source.take(":")):
            call_id = f"{self.id_begin}{name}:{yield from source.name()}"
        yield from source.space()
        if (yield from source.peek()) != "{":
            yield from source.collect(self.body.split()[-1])
            yield from source.space()
        if (yield from source.peek()) != "{":
            raise NotACall("arguments are an object")
        calls.begin(name, call_id)
        if (yield from source.brackets(calls.arguments)):
            calls.end()
            yield from source.loosely(self.end)

    def rule(self, rules: Rules, function: Function) -> str:
        number = '":" /[0-9]{1,6}/' if self.numbered else ""
        head, body = rules.spell(self.begin + function.name), rules.spell(self.body)
        return f"{head} {number} {body} {rules.schema(function.json_part)} {rules.spell(self.end)}"
