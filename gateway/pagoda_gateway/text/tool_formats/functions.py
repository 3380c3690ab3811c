"""Parameters of functions, from their JSON schemas: a value's possible types decide how it is written and parsed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from pagoda_gateway.text.lark import ANY, Rules
from pagoda_proto.grammars import NAMED_SCHEMAS, PLAIN_VALUES, UNSUPPORTED, WHITE_SPACE, places, quoted

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
ABOUT = frozenset({
    "title", "description", "default", "examples", "$defs", "definitions", "$schema", "$id", "$comment", "deprecated",
    "readOnly", "writeOnly", "nullable",
})  # fmt: skip
NOTES = frozenset({"title", "description", "examples", "default", "$comment"})
LENIENT = {"lenient": True, "coerce_one_of": True, "whitespace_pattern": WHITE_SPACE}
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")
_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(NAMED_SCHEMAS, dict),
    **dict.fromkeys(("enum", "anyOf", "oneOf", "allOf", "required"), list),
    **dict.fromkeys(("pattern", "$ref", "format"), str),
    "type": (str, list),
}
MAX_HOPS = 16
MAX_ALTERNATIVES_DEPTH = 64  # of alternatives within alternatives
MAX_LENGTH = 4096  # of a string whose length limits are enforced
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_CHARS = r"(.|\n)"

Schema = Mapping[str, Any]


class NotEnforced(ValueError):
    """A strict schema asks for what cannot be enforced; `pointer` is the place in the schema of `function`."""

    def __init__(self, pointer: str, why: str) -> None:
        super().__init__(why)
        self.pointer = pointer
        self.function = ""


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function that may be called. `parameters` is a JSON schema; None means that it takes no arguments.

    `strict`: the schema is enforced, or the request refused. `loose`: arguments are any JSON object.
    """

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False
    loose: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments, without annotations for people."""
        if self.loose:
            return {"type": "object"}
        return _NO_PARAMETERS if self.parameters is None else {"type": "object", **_lean(self.parameters, self.strict)}

    @property
    def json_part(self) -> dict[str, Any]:
        """The schema for a grammar. Unless strict, keywords that no grammar supports are ignored."""
        return self.schema if self.strict else {"x-guidance": LENIENT, **self.schema}

    def check(self) -> None:
        """Raises NotEnforced for keywords of a strict schema that no grammar supports."""
        for pointer in places(self.parameters or {}, UNSUPPORTED) if self.strict else ():
            raise NotEnforced(pointer, "this keyword is not supported with strict: true")


def _lean(schema: Any, strict: bool, at: str = "") -> Any:
    """A copy without annotations; unless strict, also without what no grammar supports: patterns with look-around or
    back-references, and keywords with invalid values.

    Raises:
        NotEnforced: a strict schema has a keyword with an invalid value.
    """
    if isinstance(schema, list):
        return [_lean(item, strict, f"{at}/{i}") for i, item in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if not _is_possible(name, value):
            if strict:
                raise NotEnforced(f"{at}/{name}", "this keyword cannot have such a value")
        elif name in NAMED_SCHEMAS:
            found[name] = {inner: _lean(item, strict, f"{at}/{name}/{inner}") for inner, item in value.items()}
        elif name in PLAIN_VALUES:
            found |= {name: value} if name not in NOTES else {}
        elif name not in NOTES and (strict or name != "pattern" or not _LOOKS_AROUND.search(value)):
            found[name] = _lean(value, strict, f"{at}/{name}")
    return found


def _is_possible(keyword: str, value: Any) -> bool:
    return isinstance(value, _KINDS.get(keyword, object))


class Parameter(NamedTuple):
    name: str
    schema: Schema
    required: bool


class Parameters:
    """A function's parameters by name, for formats that write them one by one. `open`: others may be given too."""

    def __init__(self, function: Function) -> None:
        self.strict = function.strict
        self.root = function.schema
        schema = resolved(self.root, self.root)
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        self.found = [
            Parameter(name, value if isinstance(value, dict) else {}, name in required)
            for name, value in properties.items()
        ]
        self.open = not properties and schema.get("additionalProperties", True) is not False
        self._by_name = {each.name: each for each in self.found}
        if self.strict:
            known = {"type", "properties", "required", "additionalProperties", "$ref"}
            refuse_others(schema, known, "")

    @cached_property
    def digest(self) -> str:
        """Distinguishes targets of local references from those in other schemas."""
        return hashlib.sha256(json.dumps(self.root).encode()).hexdigest()

    def schema_of(self, name: str) -> Schema:
        found = self._by_name.get(name)
        return {} if found is None else found.schema

    def alone(self, schema: Schema) -> dict[str, Any]:
        """A parameter's schema, with the definitions it may refer to."""
        found: dict[str, Any] = {} if self.strict else {"x-guidance": LENIENT}
        found |= schema
        if '"$ref"' in json.dumps(schema):
            found |= {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
        return found


def refuse_others(schema: Schema, known: set[str], pointer: str) -> None:
    """Raises NotEnforced for keywords not in `known`."""
    for keyword in schema:
        if keyword not in known and keyword not in ABOUT and not keyword.startswith("x-"):
            raise NotEnforced(f"{pointer}/{keyword}", "calls of this model cannot be held to this keyword")


def resolved(schema: Schema, root: Schema) -> Schema:
    """Follow a chain of local references to its schema; {} if it leads nowhere."""
    for _ in range(MAX_HOPS):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _at(reference, root)
    return {}


def _at(reference: str, root: Schema) -> Schema:
    if not reference.startswith("#"):
        return {}
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def types_of(schema: Schema, root: Schema) -> frozenset[str]:
    """The JSON types that a value may have."""
    return _types(schema, root, {}) or TYPES


def _types(schema: Schema, root: Schema, seen: dict[int, frozenset[str]], depth: int = 0) -> frozenset[str]:
    """Visit each schema once: a recursive reference adds no types. One nested too deeply may be anything."""
    if depth > MAX_ALTERNATIVES_DEPTH:
        return TYPES
    schema = resolved(schema, root)
    if id(schema) in seen:
        return seen[id(schema)]
    seen[id(schema)] = frozenset()
    named = schema.get("type")
    named = [named] if isinstance(named, str) else named
    types = TYPES if not isinstance(named, list) else frozenset(one for one in named if isinstance(one, str))
    if schema.get("nullable") is True:
        types |= {"null"}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        types &= frozenset(map(type_of, values)) | ({"number"} if any(map(_is_number, values)) else set())
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            found = [_types(one, root, seen, depth + 1) for one in schema[keyword] if isinstance(one, dict)]
            types &= frozenset().union(*found)
    seen[id(schema)] = types
    return types


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def fits(value: Any, types: frozenset[str]) -> bool:
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def branches(schema: Schema, root: Schema) -> Iterator[Schema]:
    """Yield the alternatives that make up a schema, or itself if it has none; each once."""
    waiting, seen = [schema], set()
    while waiting:
        one = resolved(waiting.pop(0), root)
        if id(one) in seen:
            continue
        seen.add(id(one))
        listed = one.get("anyOf", one.get("oneOf"))
        named = one.get("type")
        if isinstance(listed, list):
            waiting[:0] = [each for each in listed if isinstance(each, dict)]
        elif isinstance(named, list) and "enum" not in one and "const" not in one:
            yield from ({**one, "type": each} for each in named)
        else:
            yield one


def without_strings(schema: Schema, parameters: Parameters) -> Schema | None:
    """A schema of the non-string values; None if there are none.

    Raises:
        NotEnforced: the format could not distinguish strings from other values of a strict schema.
    """
    root = parameters.root
    types = types_of(schema, root)
    if "string" not in types:
        return schema
    others = [
        {**one, "enum": [value for value in one["enum"] if not isinstance(value, str)]} if "enum" in one else one
        for one in branches(schema, root)
        if types_of(one, root) != {"string"}
    ]
    others = [{**one, "type": sorted(types_of(one, root) - {"string"})} for one in others]
    if parameters.strict and any(set(one) - ABOUT - {"type", "enum", "const"} for one in others):
        raise NotEnforced("", "calls of this model do not tell a string from other values of this schema")
    return {"anyOf": others} if others else None


def string_values(schema: Schema) -> list[str] | None:
    """The strings that the schema lists; None if it has no list."""
    if "const" in schema:
        return [schema["const"]] if isinstance(schema["const"], str) else []
    if isinstance(schema.get("enum"), list):
        return [value for value in schema["enum"] if isinstance(value, str)]
    return None


def string_pattern(schema: Schema, strict: bool, pointer: str) -> str:
    """The regular expression of a string that is written verbatim. Raises NotEnforced."""
    if strict:
        refuse_others(schema, {"type", "enum", "const", "pattern", "minLength", "maxLength"}, pointer)
    pattern, least, most = schema.get("pattern"), schema.get("minLength", 0), schema.get("maxLength")
    told = _searched(pattern) if isinstance(pattern, str) else ""
    bounded = isinstance(least, int) and (most is None or (isinstance(most, int) and most <= MAX_LENGTH))
    counted = bounded and 0 <= least <= MAX_LENGTH and (least > 0 or most is not None)
    if strict and ((pattern is not None and (not told or counted)) or not bounded):
        at = f"{pointer}/{'pattern' if pattern is not None else 'maxLength'}"
        raise NotEnforced(at, "calls of this model cannot be held to this keyword as it stands")
    if told:
        return told
    return f"{_CHARS}{{{least},{'' if most is None else most}}}" if counted else ANY


def _searched(pattern: str) -> str:
    """Convert a pattern that is searched for into one that matches the whole string; "" if that is not certain."""
    inner = pattern.removeprefix("^")
    ends = inner.endswith("$") and not inner.endswith("\\$")
    inner = inner[:-1] if ends else inner
    if any(char in inner for char in "^$|/") or "(?" in inner or "\\b" in inner or "\n" in inner:
        return ""
    head = "" if pattern.startswith("^") else ANY
    return f"{head}({inner}){'' if ends else ANY}"


def string_rule(rules: Rules, schema: Schema, end: str, *, strict: bool, pointer: str) -> str:
    """A rule for a verbatim string and the text that ends it. Raises NotEnforced."""
    end = end.lstrip() if rules.has_token(end) else end  # white space before a token may belong to the string
    values = string_values(schema)
    if values is not None:
        return f"({' | '.join(map(quoted, values))}) {rules.spell(end)}"
    return rules.up_to([end], pattern=string_pattern(schema, strict, pointer))
