"""Shape: a call is a JSON object with its name and arguments, alone between tags or in a list."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import ClassVar

from pagoda_gateway.text.lark import Rules
from pagoda_gateway.text.source import NotACall, Reading, Source
from pagoda_gateway.text.tool_formats.format import Calls
from pagoda_gateway.text.tool_formats.functions import Function
from pagoda_gateway.text.tool_formats.words import parsed
from pagoda_proto.grammars import quoted

_ARGUMENTS = frozenset({"arguments", "parameters"})
_NAMES = frozenset({"name", "tool_name"})
_IDS = frozenset({"id", "tool_call_id"})


@dataclass(frozen=True)
class JsonCall:
    """The keys in the order in which a model writes them; keys of other families are parsed as well.

    `keyed`: the name is the key, and the arguments are its value.
    """

    name: str = "name"
    arguments: str = "arguments"
    id: str = ""
    keyed: bool = False

    reads_schemas: ClassVar[bool] = False

    @property
    def markers(self) -> tuple[str, ...]:
        return ()

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        if not (yield from source.loosely("{")):
            raise NotACall("a call is an object")
        name = call_id = ""
        early = ""  # arguments that came before the name
        while (yield from source.peek()) != "}":
            key = yield from _key(source)
            if self.keyed or (key in _ARGUMENTS and name):
                yield from self._arguments(source, calls, key if self.keyed else name, call_id)
                yield from _rest(source)
                return
            if key in _ARGUMENTS:
                early = yield from source.json_text()
            elif key in _NAMES | _IDS:
                value = yield from source.json()
                told = str(value) if isinstance(value, str | int) else ""
                name, call_id = (told, call_id) if key in _NAMES else (name, told)
            else:
                yield from source.json_text()
            yield from _comma(source)
        yield from source.next()
        arguments = _object(early or "{}")
        calls.begin(name, call_id)
        calls.arguments(arguments)
        calls.end()

    def _arguments(self, source: Source, calls: Calls, name: str, call_id: str) -> Reading[None]:
        if (yield from source.peek()) == "{":
            calls.begin(name, call_id)
            whole = yield from source.brackets(calls.arguments)
        else:
            arguments = _object((yield from source.json_text()))
            calls.begin(name, call_id)
            calls.arguments(arguments)
            whole = True
        if whole:
            calls.end()

    def rule(self, rules: Rules, function: Function) -> str:
        name, arguments = json.dumps(function.name), rules.schema(function.json_part)
        if self.keyed:
            return f"{quoted('{' + name + ': ')} {arguments} {quoted('}')}"
        head = f'"{self.name}": {name}, "{self.arguments}": '
        if not self.id:
            return f"{quoted('{' + head)} {arguments} {quoted('}')}"
        opening, going_on = '{"' + self.id + '": "', '", ' + head
        return f"{quoted(opening)} /[0-9]{{1,4}}/ {quoted(going_on)} {arguments} {quoted('}')}"


def _key(source: Source) -> Reading[str]:
    """Read a key of an object, up to its value. Raises NotACall."""
    yield from source.space()
    if (yield from source.peek()) != '"':
        raise NotACall("a key is a string")
    key = yield from source.json()
    if not (yield from source.loosely(":")):
        raise NotACall("a key has a value")
    yield from source.space()
    return str(key)


def _comma(source: Source) -> Reading[None]:
    """Read what separates two keys, or precedes the end. Raises NotACall."""
    yield from source.space()
    if (yield from source.take(",")):
        yield from source.space()
    elif (yield from source.peek()) != "}":
        raise NotACall("an object goes on with a comma")


def _rest(source: Source) -> Reading[None]:
    """Skip what follows the arguments in the object."""
    with contextlib.suppress(NotACall):
        yield from _comma(source)
        while (yield from source.peek()) != "}":
            yield from _key(source)
            yield from source.json_text()
            yield from _comma(source)
        yield from source.next()


def _object(text: str) -> str:
    """The text of arguments, which may be an encoded string. Raises NotACall unless it is a JSON object."""
    try:
        value = parsed(text)
        if isinstance(value, str):
            text, value = value, parsed(value)
        text.encode()  # refuses lone surrogates
    except ValueError as error:
        raise NotACall("arguments are an object") from error
    if not isinstance(value, dict):
        raise NotACall("arguments are an object")
    return text.strip()
