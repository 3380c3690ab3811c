"""Values written as literals of some language: the same tree as JSON's, with other words and quotes.

Reading converts a literal to JSON as it arrives. Anything that is not a literal becomes a string.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagoda_gateway.text.lark import Rules
from pagoda_gateway.text.source import Reading, Source, Tell
from pagoda_gateway.text.tool_formats.functions import (
    NotEnforced,
    Parameters,
    Schema,
    branches,
    refuse_others,
    resolved,
    string_rule,
    types_of,
)
from pagoda_gateway.text.tool_formats.words import dumped, inside, parsed
from pagoda_proto.grammars import quoted

MAX_DEPTH = 64
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


@dataclass(frozen=True)
class Literals:
    """`words` are the language's words for true, false and null. `mark` encloses strings, which are then verbatim;
    without it they are quoted as in Python or JSON. `bare_keys`: keys of objects are names.
    """

    words: Mapping[str, str]
    mark: str = ""
    bare_keys: bool = False
    between: str = ", "
    colon: str = ": "

    # Reading

    def read(self, source: Source, tell: Tell, depth: int = 0) -> Reading[bool]:
        """Pass a value to `tell` as JSON; False if the text breaks off in it."""
        yield from source.space()
        first = yield from source.peek()
        if self.mark and (yield from source.take(self.mark)):
            return (yield from self._verbatim(source, tell))
        if not self.mark and first and first in "'\"":
            return (yield from _string(source, tell))
        if first and first in _CLOSERS and depth < MAX_DEPTH:
            yield from source.next()
            return (yield from self._members(source, tell, first, depth + 1))
        return (yield from self._scalar(source, tell))

    def _verbatim(self, source: Source, tell: Tell) -> Reading[bool]:
        tell('"')
        whole = yield from source.until((self.mark,), lambda text: tell(inside(text)), whole=False)
        tell('"' if whole else "")
        return whole is not None

    def _members(self, source: Source, tell: Tell, opener: str, depth: int) -> Reading[bool]:
        closer, lead = _CLOSERS[opener], ""
        tell("{" if opener == "{" else "[")
        while True:
            yield from source.space()
            char = yield from source.peek()
            if not char:
                return False
            if char == closer:
                yield from source.next()
                tell("}" if opener == "{" else "]")
                return True
            tell(lead)
            if opener == "{" and not (yield from self._key(source, tell)):
                return False
            if not (yield from self.read(source, tell, depth)):
                return False
            yield from source.space()
            yield from source.take(",")
            lead = ", "

    def _key(self, source: Source, tell: Tell) -> Reading[bool]:
        pieces: list[str] = []
        first = yield from source.peek()
        if self.mark and (yield from source.take(self.mark)):
            whole = yield from self._verbatim(source, pieces.append)
        elif first in ("'", '"'):
            whole = yield from _string(source, pieces.append)
        else:
            whole = (yield from source.until((":",), pieces.append)) is not None
            pieces = [dumped("".join(pieces).strip()), ": "]
        if whole and pieces[-1] != ": ":
            yield from source.loosely(":")
            pieces.append(": ")
        tell("".join(pieces) if whole else "")
        return whole

    def _scalar(self, source: Source, tell: Tell) -> Reading[bool]:
        text = ""
        while (char := (yield from source.peek())) and char not in ",]})":
            text += yield from source.next()
        if not char:
            return False
        if not text and char != ",":
            yield from source.next()  # a bracket that closes nothing
        if not text:
            tell("null")
            return True
        tell(self._told(text.strip()))
        return True

    def _told(self, text: str) -> str:
        for word, meant in self.words.items():
            if text in (word, meant):
                return meant
        try:
            return dumped(text) if isinstance(parsed(text), str) else text
        except ValueError:
            return dumped(text)

    # Rules

    def rule(self, rules: Rules, schema: Schema, parameters: Parameters, pointer: str) -> str:
        """A rule for values that conform to the schema. Raises NotEnforced."""
        reference = schema.get("$ref")
        if isinstance(reference, str):
            name = f"d_{hashlib.sha256((parameters.digest + reference).encode()).hexdigest()[:16]}"
            target = resolved(schema, parameters.root)
            return rules.recursive(name, lambda: self.rule(rules, target, parameters, pointer))
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list):
            return f"({' | '.join(self._written(rules, value) for value in listed)})"
        found = [self._of_type(rules, one, parameters, pointer) for one in branches(schema, parameters.root)]
        return found[0] if len(found) == 1 else f"({' | '.join(found)})"

    def _of_type(self, rules: Rules, schema: Schema, parameters: Parameters, pointer: str) -> str:
        if "enum" in schema or "const" in schema or "$ref" in schema:
            return self.rule(rules, schema, parameters, pointer)
        match sorted(types_of(schema, parameters.root)):
            case ["string"]:
                return self._string_rule(rules, schema, parameters, pointer)
            case ["boolean"] | ["null"] as kinds:
                meant = {"boolean": ("true", "false"), "null": ("null",)}[kinds[0]]
                return f"({' | '.join(quoted(word) for word, json in self.words.items() if json in meant)})"
            case ["integer"] | ["number"] | ["integer", "number"]:
                return rules.schema(parameters.alone(schema))
            case ["array"]:
                return self._array(rules, schema, parameters, pointer)
            case ["object"]:
                return self._object(rules, schema, parameters, pointer)
        return self._any(rules, parameters, pointer)

    def _string_rule(self, rules: Rules, schema: Schema, parameters: Parameters, pointer: str) -> str:
        if not self.mark:
            return rules.schema(parameters.alone(schema))
        rest = string_rule(rules, schema, self.mark, strict=parameters.strict, pointer=pointer)
        return f"{rules.spell(self.mark)} {rest}"

    def _array(self, rules: Rules, schema: Schema, parameters: Parameters, pointer: str) -> str:
        if parameters.strict:
            refuse_others(schema, {"type", "items"}, pointer)
        items = schema.get("items")
        told = self.rule(rules, items if isinstance(items, dict) else {}, parameters, f"{pointer}/items")
        return f'"[" {self._several(rules.rule(told))} "]"'

    def _object(self, rules: Rules, schema: Schema, parameters: Parameters, pointer: str) -> str:
        properties = schema.get("properties")
        if parameters.strict:
            refuse_others(schema, {"type", "properties", "required", "additionalProperties"}, pointer)
        if not isinstance(properties, dict) or not properties:
            return self._free_object(rules, parameters, pointer)
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        told = []
        for name, value in properties.items():
            below = f"{pointer}/properties/{name}"
            inner = self.rule(rules, value if isinstance(value, dict) else {}, parameters, below)
            told.append((f"{self._key_rule(name)} {inner}", name in required))
        return f'"{{" {in_order(rules, told, self.between)} "}}"'

    def _free_object(self, rules: Rules, parameters: Parameters, pointer: str) -> str:
        return self._object_of(rules, self._any(rules, parameters, pointer))

    def _object_of(self, rules: Rules, value: str) -> str:
        """An object with any keys, whose values match this rule."""
        key = _KEY if self.bare_keys else rules.schema({"type": "string"})
        return f'"{{" {self._several(f"{key} {quoted(self.colon)} {value}")} "}}"'

    def _several(self, member: str) -> str:
        return f"({member} ({quoted(self.between)} {member})*)?"

    def _key_rule(self, name: str) -> str:
        return quoted((name if self.bare_keys else dumped(name)) + self.colon)

    def _any(self, rules: Rules, parameters: Parameters, pointer: str) -> str:
        if parameters.strict:
            raise NotEnforced(pointer, "calls of this model need one type for each value of a strict tool")
        return rules.recursive("any_value", lambda: self._any_body(rules, "any_value"))

    def _any_body(self, rules: Rules, name: str) -> str:
        marked = self.mark and f"{rules.spell(self.mark)} {rules.up_to([self.mark])}"
        string, number = marked or rules.schema({"type": "string"}), rules.schema({"type": "number"})
        words = " | ".join(map(quoted, self.words))
        return f'{string} | {number} | {words} | "[" {self._several(name)} "]" | {self._object_of(rules, name)}'

    def _written(self, rules: Rules, value: Any) -> str:
        return rules.spell(self.text_of(value))

    def text_of(self, value: Any) -> str:
        """A value as a literal."""
        if isinstance(value, str):
            return f"{self.mark}{value}{self.mark}" if self.mark else dumped(value)
        if isinstance(value, list):
            return f"[{self.between.join(map(self.text_of, value))}]"
        if isinstance(value, dict):
            keys = [key if self.bare_keys else dumped(key) for key in value]
            members = zip(keys, map(self.text_of, value.values()), strict=True)
            return f"{{{self.between.join(f'{key}{self.colon}{item}' for key, item in members)}}}"
        text = dumped(value)
        return next((word for word, meant in self.words.items() if meant == text), text)


def in_order(rules: Rules, members: list[tuple[str, bool]], between: str) -> str:
    """A rule for members in this order, each (body, required); `between` separates those that are present."""
    after: list[str] = ['""'] * (len(members) + 1)  # what may follow once a member was written
    first: list[str] = ['""'] * (len(members) + 1)
    for i in range(len(members) - 1, -1, -1):
        told, required = members[i]
        body = rules.rule(told)
        going_on = f"{quoted(between)} {body} {after[i + 1]}"
        after[i] = rules.rule(going_on if required else f"{going_on} | {after[i + 1]}")
        begun = f"{body} {after[i + 1]}"
        first[i] = rules.rule(begun if required else f"{begun} | {first[i + 1]}")
    return first[0]


def _string(source: Source, tell: Tell) -> Reading[bool]:
    """Read a string quoted as in Python or JSON."""
    quote = yield from source.next()
    tell('"')
    high = ""  # the high half of a surrogate pair
    while char := (yield from source.next()):
        if char == quote:
            tell(inside("\ufffd" if high else ""))
            tell('"')
            return True
        if char == "\\":
            char = yield from _escape(source)
        if high and "\udc00" <= char <= "\udfff":
            char = (high + char).encode("utf-16", "surrogatepass").decode("utf-16")
        elif high:
            tell(inside("\ufffd"))
        high = char if "\ud800" <= char <= "\udbff" else ""
        if not high:
            tell(inside(char if not "\udc00" <= char <= "\udfff" else "\ufffd"))
    return False


def _escape(source: Source) -> Reading[str]:
    char = yield from source.next()
    digits = ""
    for _ in range(_HEX.get(char, 0)):
        digits += yield from source.next()
    if not digits:
        return _ESCAPES.get(char, char)
    try:
        return chr(int(digits, 16))
    except (ValueError, OverflowError):
        return f"\\{char}{digits}"
