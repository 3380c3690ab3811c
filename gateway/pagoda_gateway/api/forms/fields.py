"""Fields for structured output: OpenAI's, vLLM's, and vLLM's older ones. Each becomes a grammar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from pagoda_gateway.api.body import Body, Text
from pagoda_gateway.api.forms.grammar import structural_tag
from pagoda_gateway.api.forms.tags import Lark, StructuralTag
from pagoda_gateway.api.json_body import parse_object
from pagoda_proto import grammars
from pagoda_proto.errors import PagodaError
from pagoda_proto.params import MAX_GRAMMAR_CHARS


class TextFormat(Body):
    type: Literal["text"]


class ObjectFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    """The schema is enforced whether `strict` or not."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class TagFormat(StructuralTag):
    type: Literal["structural_tag"]


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat | TagFormat, Field(discriminator="type")]


def _reading(what: str) -> BeforeValidator:
    """Also accept a schema or a structural tag as JSON text."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse_object(value.encode())
        except PagodaError as error:
            raise ValueError(error.message.replace("the body", f"the {what}")) from error

    return BeforeValidator(read)


Schema = Annotated[dict[str, Any], _reading("schema")]
Regex = Annotated[str, Field(min_length=1, max_length=grammars.MAX_REGEX_CHARS)]
Choices = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=grammars.MAX_CHOICES)]
TagsAsText = Annotated[StructuralTag, _reading("structural tag")]


class StructuredOutputs(Body):
    """vLLM's field for structured output; give one of these."""

    json_: Schema | None = Field(None, alias="json")
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Lark | None = None
    json_object: Literal[True] | None = None
    structural_tag: TagsAsText | None = None


class Form(NamedTuple):
    """The form of the output, and the field that asks for it. `is_json`: all such output is JSON. `tag` is the source
    of the grammar, if texts in it may be names of special tokens."""

    field: str
    grammar: str
    is_json: bool = False
    tag: StructuralTag | None = None

    def grammar_with(self, special: Mapping[str, int]) -> str:
        """The grammar for a tokenizer with these special tokens. Raises ValueError."""
        too_long = len(self.grammar) > MAX_GRAMMAR_CHARS  # refused later, for its length
        if self.tag is None or too_long or not any(name in self.grammar for name in special):
            return self.grammar
        return structural_tag(self.tag, special)


class Formed(Body):
    """A body whose output may have a form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="see also response_format; one of them")
    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Lark | None = None

    @cached_property
    def form(self) -> Form | None:
        found = list(_forms(self))
        if len(found) > 1:
            raise ValueError(f"give only one of {', '.join(form.field for form in found)}")
        return found[0] if found else None

    @model_validator(mode="after")
    def _has_one_form(self) -> Formed:
        _ = self.form  # computed here, as a large body is validated in a thread
        return self


def _forms(body: Formed) -> Iterator[Form]:
    match body.response_format:
        case ObjectFormat():
            yield Form("response_format", grammars.json_object(), is_json=True)
        case SchemaFormat(json_schema=named):
            yield Form("response_format", grammars.json_schema(named.schema_), is_json=True)
        case TagFormat() as tagged:
            yield Form("response_format", structural_tag(tagged, {}), tag=tagged)
    asked = body.structured_outputs
    if asked is not None:
        yield from _vllm_forms("structured_outputs.", asked.json_, asked.regex, asked.choice, asked.grammar)
        if asked.json_object:
            yield Form("structured_outputs.json_object", grammars.json_object(), is_json=True)
        if asked.structural_tag is not None:
            tag = asked.structural_tag
            yield Form("structured_outputs.structural_tag", structural_tag(tag, {}), tag=tag)
    yield from _vllm_forms("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)


def _vllm_forms(
    prefix: str, json: Schema | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[Form]:
    if json is not None:
        yield Form(f"{prefix}json", grammars.json_schema(json), is_json=True)
    if regex is not None:
        yield Form(f"{prefix}regex", grammars.regex(regex))
    if choice is not None:
        yield Form(f"{prefix}choice", grammars.choice(choice))
    if grammar is not None:
        yield Form(f"{prefix}grammar", grammars.lark(grammar))
