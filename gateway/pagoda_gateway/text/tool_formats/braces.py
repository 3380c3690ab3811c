"""Shape: a call is `call:`, a name, and an object with bare keys and with strings between markers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pagoda_gateway.text.lark import Rules
from pagoda_gateway.text.source import NotACall, Reading, Source
from pagoda_gateway.text.tool_formats.format import Calls
from pagoda_gateway.text.tool_formats.functions import Function, Parameters
from pagoda_gateway.text.tool_formats.literals import Literals
from pagoda_proto.grammars import quoted


@dataclass(frozen=True)
class BracesCall:
    literals: Literals

    reads_schemas: ClassVar[bool] = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.literals.mark,)

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        if not (yield from source.loosely("call:")):
            raise NotACall("it begins in another way")
        name = yield from source.name()
        yield from source.space()
        if (yield from source.peek()) != "{":
            raise NotACall("arguments are an object")
        calls.begin(name)
        if (yield from self.literals.read(source, calls.arguments)):
            calls.end()

    def rule(self, rules: Rules, function: Function) -> str:
        parameters = Parameters(function)
        arguments = self.literals.rule(rules, parameters.root, parameters, "")
        return f"{quoted(f'call:{function.name}')} {arguments}"


def braces(mark: str) -> BracesCall:
    words = {"true": "true", "false": "false", "null": "null"}
    return BracesCall(Literals(words=words, mark=mark, bare_keys=True, between=",", colon=":"))
