"""Shape: a Python call, a name with keyword arguments that are literals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pagoda_gateway.text.lark import Rules
from pagoda_gateway.text.source import NotACall, Reading, Source
from pagoda_gateway.text.tool_formats.format import Calls
from pagoda_gateway.text.tool_formats.functions import Function, NotEnforced, Parameters
from pagoda_gateway.text.tool_formats.literals import Literals, in_order
from pagoda_gateway.text.tool_formats.words import dumped
from pagoda_proto.grammars import quoted

PYTHON = Literals(words={"True": "true", "False": "false", "None": "null"})


@dataclass(frozen=True)
class PythonCall:
    """Only the request's functions count as calls: everything else is text."""

    reads_schemas: ClassVar[bool] = False

    @property
    def markers(self) -> tuple[str, ...]:
        return ()

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        yield from source.space()
        name = yield from source.name()
        if name not in calls.functions or not (yield from source.loosely("(")):
            raise NotACall("no function of this name")
        calls.begin(name)
        calls.arguments("{")
        lead = ""
        while True:
            yield from source.space()
            if (yield from source.take(")")):
                calls.arguments("}")
                calls.end()
                return
            key: list[str] = []
            if (yield from source.until(("=",), key.append)) is None:
                return
            calls.arguments(f"{lead}{dumped(''.join(key).strip())}: ")
            if not (yield from PYTHON.read(source, calls.arguments)):
                return
            yield from source.space()
            yield from source.take(",")
            lead = ", "

    def rule(self, rules: Rules, function: Function) -> str:
        parameters = Parameters(function)
        if parameters.open and function.strict:
            raise NotEnforced("", "calls of this model are held to named properties only")
        told = [
            (f"{quoted(f'{name}=')} {PYTHON.rule(rules, schema, parameters, f'/properties/{name}')}", required)
            for name, schema, required in parameters.found
        ]
        arguments = in_order(rules, told, ", ")
        if parameters.open:
            member = f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}=/ {PYTHON.rule(rules, {}, parameters, '')}"
            arguments = f'({member} (", " {member})*)?'
        return f"{quoted(function.name + '(')} {arguments} {quoted(')')}"
