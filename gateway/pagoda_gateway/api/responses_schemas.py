"""Request bodies of OpenAI's Responses API, by the same rule as in `schemas`: a field does what it says, or is
refused by name.

Clients send a response's output back unchanged, so output items are valid input items, with their ids and states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag, TypeAdapter, model_validator

from pagoda_gateway.api.body import Body, Flag, Number, Query, Text, only
from pagoda_gateway.api.forms.fields import Form, ObjectFormat, TextFormat
from pagoda_gateway.api.schemas import Label, MetadataKey, Priority, Salt, Stop, kind_of_content, with_plain_parameters
from pagoda_gateway.api.tools import ObjectSchema, check_choice, is_choice, kind_of_choice
from pagoda_proto import grammars
from pagoda_proto.params import MAX_LOGPROBS

MAX_INPUT_ITEMS = 20_000
MAX_ITEMS_LISTED = 100
State = Literal["in_progress", "completed", "incomplete"] | None
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class InputText(Body):
    type: Literal["input_text"]
    text: Text
    prompt_cache_breakpoint: None = None


class OutputText(Body):
    """Its log-probabilities may be sent back with it, and are ignored."""

    type: Literal["output_text"]
    text: Text
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[dict[str, Any]] | None = None


class Refusal(Body):
    type: Literal["refusal"]
    refusal: Text


Part = Annotated[
    Annotated[InputText | OutputText | Refusal, Field(discriminator="type")],
    only("input_text", "output_text", "refusal", said="is a part of type {kind}; this model takes text: {known}"),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]
Content = Annotated[Annotated[Text, Tag("text")] | Annotated[Parts, Tag("parts")], Discriminator(kind_of_content)]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Label | None = None
    status: State = None
    phase: Label | None = Field(None, description="taken back; all text of a turn is shown to the model alike")


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: Label
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text = Field(description="a JSON object, as text")
    id: Label | None = None
    status: State = None
    namespace: None = None
    caller: None = None
    async_: Literal[False] | None = Field(None, validation_alias=AliasChoices("async", "async_"), exclude=True)


class FunctionOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: Label
    output: Content
    id: Label | None = None
    status: State = None
    caller: None = None


class SummaryPart(Body):
    type: Literal["summary_text"]
    text: Text


class ReasoningPart(Body):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Body):
    """Shown to the model as its chat template shows reasoning."""

    type: Literal["reasoning"]
    id: Label | None = None
    summary: Annotated[list[SummaryPart], Field(fail_fast=True)] = Field(default_factory=list)
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None
    encrypted_content: None = None
    status: State = None


def _kind_of_item(value: Any) -> str:
    """The tag of an item's type, which messages may omit. It must not be a key of an item, so that paths in messages
    can leave it out."""
    kind = value.get("type") if isinstance(value, dict) else None
    return f"a {kind} item" if isinstance(kind, str) else "a message item"


Item = Annotated[
    Annotated[MessageItem, Tag("a message item")]
    | Annotated[FunctionCallItem, Tag("a function_call item")]
    | Annotated[FunctionOutputItem, Tag("a function_call_output item")]
    | Annotated[ReasoningItem, Tag("a reasoning item")],
    Discriminator(_kind_of_item),
    only(
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        said="is an item of type {kind}; supported here: {known}",
    ),
]
Items = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_INPUT_ITEMS)]


_ITEM_LIST = TypeAdapter[list[Any]](Items)


def read_items(kept: list[dict[str, Any]]) -> list[Item]:
    """Parse stored `Item`s."""
    return _ITEM_LIST.validate_python(kept)


class SchemaFormat(Body):
    """The schema is enforced whether `strict` or not."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextOptions(Body):
    format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Label | None = Field(None, description="for chat templates that read it")


class ReasoningOptions(Body):
    effort: Label | None = Field(None, description="for chat templates that read it")
    summary: Literal["auto"] | None = Field(None, description="there is none: what a model thinks is shown whole")
    generate_summary: None = None


class StreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class FunctionTool(Body):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: ObjectSchema | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=64)]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(fail_fast=True, min_length=1, max_length=grammars.MAX_CHOICES)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a mode")]
    | Annotated[FunctionChoice, Tag("a function")]
    | Annotated[AllowedChoice, Tag("allowed tools")],
    Discriminator(kind_of_choice),
    BeforeValidator(is_choice),
]


OnlyFunctions = only("function", said="is a tool of type {kind}; only functions are supported here")

if TYPE_CHECKING:

    class Plain(Body): ...
else:
    Plain = with_plain_parameters("Plain", Body, "n", "include_stop_str_in_output", "use_beam_search", "length_penalty")


class ResponsesRequest(Plain):
    """POST /v1/responses."""

    model: str | None = Field(None, max_length=512, description="served model name; the only model if absent")
    input: Annotated[Annotated[Text, Tag("text")] | Annotated[Items, Tag("parts")], Discriminator(kind_of_content)]
    instructions: Text | None = None
    previous_response_id: Label | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = Field(None, description="kept for later unless false; background needs it")
    background: bool | None = None
    metadata: Annotated[dict[MetadataKey, Label], Field(max_length=16)] | None = None
    tools: Annotated[list[Annotated[FunctionTool, OnlyFunctions]], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Included] | None = Field(
        None, description="thoughts come as text that may be sent back, so none of them is encrypted"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["disabled"] | None = None
    user: Label | None = Field(None, description="informational")
    safety_identifier: Label | None = Field(None, description="informational")
    prompt_cache_key: Label | None = Field(None, description="informational; see cache_salt")
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None

    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop | None = None
    priority: Priority = Field(0, description="lower runs earlier, where the policy heeds it")
    cache_salt: Salt | None = Field(None, description="prefixes are shared only within one salt")
    chat_template_kwargs: dict[str, Any] | None = None

    access_programs: None = None
    background_options: None = None
    context_management: None = None
    conversation: None = None
    image: None = None
    max_tool_calls: None = None
    moderation: None = None
    prompt: None = None
    prompt_cache_options: None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ResponsesRequest:
        if self.input == []:
            raise ValueError("input must have at least one item")
        if self.background and self.store is False:
            raise ValueError("background needs store: nobody waits for the answer")
        asked = self.tool_choice not in (None, "none")
        check_choice([tool.name for tool in self.tools or ()], asked, self.chosen_names or ())
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.top_logprobs and not self.with_logprobs:
            raise ValueError("top_logprobs needs include: ['message.output_text.logprobs']")
        return self

    @property
    def with_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    @property
    def tools_in_use(self) -> list[FunctionTool]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def chosen_names(self) -> list[str] | None:
        """The functions that `tool_choice` names; None if it names none, which means all."""
        match self.tool_choice:
            case FunctionChoice(name=name):
                return [name]
            case AllowedChoice(tools=tools):
                return [one.name for one in tools]
        return None

    @property
    def form(self) -> Form:
        match self.text and self.text.format:
            case ObjectFormat():
                return Form("text.format", grammars.json_object())
            case SchemaFormat(schema_=schema):
                return Form("text.format", grammars.json_schema(schema))
        return Form("", "")


# Accepted and ignored: only what was requested when the response was made exists, and it is always included.
Includes = Annotated[list[Included] | None, BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]
INCLUDE = AliasChoices("include[]", "include")


class RetrieveQuery(Body):
    """`starting_after` is the number of the last event that the client has."""

    stream: Annotated[bool, Flag] = False
    starting_after: Annotated[int | None, Number, Field(ge=0)] = None
    include_obfuscation: Annotated[Literal[False] | None, Flag] = None
    include: Includes = Field(None, validation_alias=INCLUDE)

    @model_validator(mode="after")
    def _events_are_of_streams(self) -> RetrieveQuery:
        if self.starting_after is not None and not self.stream:
            raise ValueError("starting_after needs stream: true")
        return self


class ItemsQuery(Query):
    limit: Annotated[int, Number, Field(ge=1, le=MAX_ITEMS_LISTED)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: Includes = Field(None, validation_alias=INCLUDE)
