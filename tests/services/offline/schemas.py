"""Schemas that bound what they admit, so that output following one comes to an end; together they use every promised
keyword.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

WORD: Schema = {"type": "string", "maxLength": 8}
SMALL: Schema = {"type": "integer", "minimum": -20, "maximum": 300}


def record(required: bool = True, **properties: Schema) -> Schema:
    names = list(properties) if required else []
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: dict[str, Schema] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "small integer": SMALL,
    "exclusive": {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 8},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "word": WORD,
    "long enough": {"type": "string", "minLength": 5, "maxLength": 9},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern inside": {"type": "string", "pattern": "ab", "maxLength": 12},
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    "enum": {"enum": ["red", "green", "blue", 7, None, {"a": [1]}]},
    "const": {"const": {"x": [True, "y"]}},
    "unicode": {"enum": ["grün", "日本", "a\nb", '"', "\\"]},
    "list": {"type": "array", "items": SMALL, "minItems": 2, "maxItems": 5},
    "tuple": {"type": "array", "prefixItems": [WORD, {"type": "boolean"}], "items": False, "minItems": 2},
    "empty list": {"type": "array", "maxItems": 0},
    "object": record(city=WORD, n=SMALL),
    "optional": record(False, a={"type": "boolean"}, b=SMALL, c={"type": "null"}),
    "nested": record(a=record(b=record(c=WORD)), d={"type": "array", "items": record(e=SMALL), "maxItems": 2}),
    "types": {"type": ["integer", "null", "boolean"], "minimum": 0, "maximum": 9},
    "any of": {"anyOf": [SMALL, {"type": "null"}, record(kind={"const": "a"}, a=SMALL)]},
    "one of": {"oneOf": [record(kind={"const": "a"}, a=SMALL), record(kind={"const": "b"}, b=WORD)]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
    "refs": {"$defs": {"p": record(x=SMALL, y=SMALL)}, **record(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"})},
    "recursive": {
        "$defs": {"t": {"anyOf": [SMALL, {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 1}]}},
        "$ref": "#/$defs/t",
    },
    "names by pattern": {
        "type": "object", "patternProperties": {"^k[0-9]$": SMALL}, "additionalProperties": False,
        "minProperties": 0, "maxProperties": 3,
    },
    "strange names": record(**{'a"b': SMALL, "é/~": {"type": "null"}}),
}  # fmt: skip
