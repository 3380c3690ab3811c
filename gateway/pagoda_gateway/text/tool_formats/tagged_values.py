"""Shape: a call is a name followed by its arguments one by one, each a key and a value between tags.

A value that can only be a string is verbatim; other values are JSON. If a value may be either, it is taken as JSON if
it parses as JSON of a type it may have, and otherwise as a string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pagoda_gateway.text.lark import Rules
from pagoda_gateway.text.source import NotACall, Reading, Source
from pagoda_gateway.text.tool_formats.format import Calls
from pagoda_gateway.text.tool_formats.functions import (
    Function,
    NotEnforced,
    Parameter,
    Parameters,
    Schema,
    branches,
    fits,
    string_rule,
    types_of,
    without_strings,
)
from pagoda_gateway.text.tool_formats.words import dumped, inside, parsed
from pagoda_proto.grammars import quoted

STRING = frozenset({"string"})
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"


@dataclass(frozen=True)
class TaggedValues:
    """`begin` name `after_name` (`key` k `value` v `value_end`)* `end`, each as models are trained to write it.

    White space around a value belongs to the value, except a line break at the end of `value` and at the beginning of
    `value_end`. With `typed`, the value's type precedes it: `typed` is the text around the type; `strings` is the type
    written for strings, and `others` that for other values, "" for the name of the JSON type, which is `number` for
    integers too.
    """

    begin: str = ""
    after_name: str = ""
    key: str = ""
    value: str = ""
    value_end: str = ""
    end: str = ""
    numbered: str = ""
    typed: str = ""
    strings: str = "string"
    others: str = ""

    reads_schemas: ClassVar[bool] = True

    @property
    def markers(self) -> tuple[str, ...]:
        return self.begin, self.after_name, self.key, self.value, self.typed, self.value_end, self.end

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        if not (yield from source.loosely(self.begin)):
            raise NotACall("it begins in another way")
        yield from source.space()
        name = yield from source.name()
        if not name:
            raise NotACall("a name is missing")
        if self.numbered:
            yield from source.loosely(self.numbered)
            yield from source.name()
        if not (yield from source.loosely(self.after_name)):
            raise NotACall("it goes on in another way")
        if not (yield from source.peek()):
            raise NotACall("its name may not be whole")
        calls.begin(name)
        calls.arguments("{")
        if (yield from self._values(source, calls, Parameters(calls.functions.get(name) or Function(name=name)))):
            calls.arguments("}")
            calls.end()

    def _values(self, source: Source, calls: Calls, parameters: Parameters) -> Reading[bool]:
        """Read all arguments; False if the text breaks off."""
        first, last, lead = self.key.split()[0], self.end.split()[0], ""
        while True:
            yield from source.space()
            found = yield from source.one_of((first, last))
            if found != first:
                yield from source.closing(self.end[len(found) :])
                return bool(found) or not (source.ends_in(first) or source.ends_in(last))
            yield from source.loosely(self.key[len(first) :])
            try:
                key = (yield from source.collect(self._key_end)).strip()
            except NotACall:
                return False
            types = types_of(parameters.schema_of(key), parameters.root)
            if not (yield from self._value(source, calls, f"{lead}{dumped(key)}: ", types)):
                return False
            lead = ", "

    @property
    def _key_end(self) -> str:
        return self.value.split()[0]

    def _value(self, source: Source, calls: Calls, lead: str, types: frozenset[str]) -> Reading[bool]:
        """Read one value; False if the text breaks off."""
        if not (yield from source.loosely(self.value[len(self._key_end) :])):
            return False
        if self.typed:
            before, after = self.typed.split("|type|")
            yield from source.loosely(before)
            said = yield from source.name()
            if not (yield from source.loosely(after)):
                return False
            types = STRING if said == self.strings else types - STRING
        if self.value.endswith("\n"):
            yield from source.take("\n")
        if (yield from source.take(_CDATA)):
            whole = yield from self._content(source, calls, lead, types, (_CDATA_END,))
            yield from source.closing(self.value_end)
            return whole
        tag = self.value_end.strip()
        ends = (tag, "\n" + tag) if self.value_end.startswith("\n") else (tag,)
        return not source.ends_in(_CDATA) and (yield from self._content(source, calls, lead, types, ends))

    def _content(
        self, source: Source, calls: Calls, lead: str, types: frozenset[str], ends: Sequence[str]
    ) -> Reading[bool]:
        if types == STRING:
            calls.arguments(f'{lead}"')
            end = yield from source.until(ends, lambda text: calls.arguments(inside(text)), whole=False)
            calls.arguments('"' if end else "")
            return end is not None
        pieces: list[str] = []
        if "string" not in types and (yield from source.peek()) in ("{", "["):
            yield from source.brackets(pieces.append)  # its strings may contain what looks like the end
        end = yield from source.until(ends, pieces.append)
        calls.arguments(lead + _told("".join(pieces), types) if end else "")
        return end is not None

    def rule(self, rules: Rules, function: Function) -> str:
        parameters = Parameters(function)
        values = [self._parameter_rule(rules, parameters, each) for each in parameters.found]
        if parameters.open:
            if function.strict:
                raise NotEnforced("", "calls of this model are held to named properties only")
            any_value = rules.up_to([self.value_end])
            values.append(f"({rules.spell(self.key)} {_KEY} {self._value_head(rules, 'string')} {any_value})*")
        number = f"{quoted(self.numbered)} /[0-9]{{1,4}}/" if self.numbered else ""
        head = rules.spell(self.begin + function.name)
        return " ".join([head, number, rules.spell(self.after_name), *values, rules.spell(self.end)])

    def _parameter_rule(self, rules: Rules, parameters: Parameters, each: Parameter) -> str:
        pointer = f"/properties/{each.name}"
        types = types_of(each.schema, parameters.root)
        found: list[str] = []
        if "string" in types:
            found.append(f"{self._value_head(rules, 'string')} {self._string(rules, parameters, each.schema, pointer)}")
        others = without_strings(each.schema, parameters)
        if others is not None and ("string" not in types or self.typed or self._listed(parameters, each.schema)):
            schema = rules.schema(parameters.alone(others))
            kinds = sorted({_said(each) for each in types - STRING}) if self.typed and not self.others else [""]
            head = " | ".join(self._value_head(rules, kind) for kind in kinds)
            found.append(f"({head}) {schema} {rules.spell(self.value_end)}")
        rule = rules.rule(f"{rules.spell(self.key + each.name)} ({' | '.join(found)})")
        return rule if each.required else f"{rule}?"

    def _listed(self, parameters: Parameters, schema: Schema) -> bool:
        """Whether the strings are listed, so that other values can be distinguished from them."""
        return any("enum" in one or "const" in one for one in branches(schema, parameters.root))

    def _string(self, rules: Rules, parameters: Parameters, schema: Schema, pointer: str) -> str:
        """A rule for a string; of several alternatives, for the one that allows strings."""
        of_strings = [one for one in branches(schema, parameters.root) if "string" in types_of(one, parameters.root)]
        if parameters.strict and len(of_strings) > 1:
            raise NotEnforced(pointer, "calls of this model have one kind of string only")
        chosen = of_strings[0] if len(of_strings) == 1 else {}
        return string_rule(rules, chosen, self.value_end, strict=parameters.strict, pointer=pointer)

    def _value_head(self, rules: Rules, kind: str) -> str:
        if not self.typed:
            return rules.spell(self.value)
        said = self.strings if kind == "string" else self.others or kind
        return rules.spell(self.value + self.typed.replace("|type|", said))


def _said(kind: str) -> str:
    return "number" if kind == "integer" else kind


def _told(text: str, types: frozenset[str]) -> str:
    """The JSON of a value."""
    try:
        value = parsed(text)
    except ValueError:
        return dumped(text)
    return dumped(text) if isinstance(value, str) or not fits(value, types) else text.strip()
