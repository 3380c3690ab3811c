"""Structural tags: output that is partly free text and partly structured, in the notation of xgrammar and vLLM.

A format describes a piece of output, and may contain other formats. The older notation, `structures` and `triggers`,
is equivalent to `triggered_tags`. Formats that are not supported (on tokens, and XML styles) are refused by type.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from pagoda_gateway.api.body import Body, Text
from pagoda_proto.grammars import MAX_CHOICES, MAX_REGEX_CHARS, check_lark

MAX_REPEATS = 1024

Piece = Annotated[str, Field(min_length=1)]
Lark = Annotated[str, Field(min_length=1), BeforeValidator(check_lark)]
Excludes = Annotated[list[Piece], Field(max_length=MAX_CHOICES)]
Several = Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)


class ConstString(Body):
    type: Literal["const_string"]
    value: Text


class JsonSchema(Body):
    type: Literal["json_schema"]
    json_schema: dict[str, Any]
    style: Literal["json"] = "json"
    any_order: Literal[False] = False


class LarkGrammar(Body):
    type: Literal["grammar"]
    grammar: Lark


class Regex(Body):
    type: Literal["regex"]
    pattern: Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)]


class AnyText(Body):
    """Text up to the next format. It contains none of `excludes`."""

    type: Literal["any_text"]
    excludes: Excludes = Field([])
    max_tokens: None = None
    max_chars: None = None


class Sequence(Body):
    type: Literal["sequence"]
    elements: Annotated[list[Format], Several]


class Or(Body):
    type: Literal["or"]
    elements: Annotated[list[Format], Several]


class Optional(Body):
    type: Literal["optional"]
    content: Format


class Plus(Body):
    type: Literal["plus"]
    content: Format


class Star(Body):
    type: Literal["star"]
    content: Format


class Repeat(Body):
    """`max` -1: any number of times."""

    type: Literal["repeat"]
    min: Annotated[int, Field(ge=0, le=MAX_REPEATS)]
    max: Annotated[int, Field(ge=-1, le=MAX_REPEATS)]
    content: Format

    @model_validator(mode="after")
    def _has_room(self) -> Repeat:
        if 0 <= self.max < self.min:
            raise ValueError(f"max must be at least min ({self.min}) or -1, got {self.max}")
        return self


class Tag(Body):
    """`begin`, content, and one of `end`."""

    type: Literal["tag"] = "tag"
    begin: Text
    content: Format
    end: Text | Annotated[list[Text], Several]

    @property
    def ends(self) -> list[str]:
        return [self.end] if isinstance(self.end, str) else self.end


class TriggeredTags(Body):
    """Text, in which each trigger starts the tag that begins with it."""

    type: Literal["triggered_tags"]
    triggers: Annotated[list[Piece], Several]
    tags: Annotated[list[Tag], Several]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Excludes = Field([])

    @model_validator(mode="after")
    def _triggers_find_their_tags(self) -> TriggeredTags:
        for tag in self.tags:
            found = [trigger for trigger in self.triggers if tag.begin.startswith(trigger)]
            if len(found) != 1:
                raise ValueError(f"begin {tag.begin[:64]!a} must start with exactly one of the triggers")
        for trigger in self.triggers:
            if not any(tag.begin.startswith(trigger) for tag in self.tags):
                raise ValueError(f"trigger {trigger[:64]!a} begins no tag")
        return self


class TagsWithSeparator(Body):
    type: Literal["tags_with_separator"]
    tags: Annotated[list[Tag], Several]
    separator: Text
    at_least_one: bool = False
    stop_after_first: bool = False


Format = Annotated[
    ConstString
    | JsonSchema
    | LarkGrammar
    | Regex
    | AnyText
    | Sequence
    | Or
    | Optional
    | Plus
    | Star
    | Repeat
    | Tag
    | TriggeredTags
    | TagsWithSeparator,
    Field(discriminator="type"),
]


class Structure(Body):
    begin: Text
    schema_: dict[str, Any] = Field(alias="schema")
    end: Text


class StructuralTag(Body):
    """`format`, or the older `structures` with `triggers`."""

    type: Literal["structural_tag"] = "structural_tag"
    format: Format | None = None
    structures: Annotated[list[Structure], Several] | None = None
    triggers: Annotated[list[Piece], Several] | None = None

    @model_validator(mode="after")
    def _one_shape(self) -> StructuralTag:
        older = (self.structures is not None, self.triggers is not None)
        if older[0] != older[1] or older[0] == (self.format is not None):
            raise ValueError("give either format, or structures and triggers")
        _ = self.whole
        return self

    @property
    def whole(self) -> Format:
        """The format of the whole output."""
        if self.format is not None:
            return self.format
        tags = [
            Tag(begin=one.begin, content=JsonSchema(type="json_schema", json_schema=one.schema_), end=one.end)
            for one in self.structures or ()
        ]
        return TriggeredTags(type="triggered_tags", triggers=self.triggers or [], tags=tags, excludes=[])


for _body in (Sequence, Or, Optional, Plus, Star, Repeat, Tag, TriggeredTags, TagsWithSeparator, StructuralTag):
    _body.model_rebuild()
