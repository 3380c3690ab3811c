"""Request bodies of Anthropic's Messages API, by the same rule as in `schemas`: a field does what it says, or is
refused by name.

`cache_control` is accepted and changes nothing: prefixes are cached in any case.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from pagoda_gateway.api.body import Body, Text, only
from pagoda_gateway.api.schemas import Label, kind_of_content
from pagoda_gateway.api.tools import ObjectSchema, check_choice


class CacheControl(Body):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cacheable(Body):
    cache_control: CacheControl | None = None


class TextBlock(Cacheable):
    type: Literal["text"]
    text: Text
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Body):
    """Shown to the model as its chat template shows reasoning. The signature is accepted and ignored."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class DirectCaller(Body):
    type: Literal["direct"]


class ToolUseBlock(Cacheable):
    type: Literal["tool_use"]
    id: Label
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any]
    caller: DirectCaller | None = None
    toolset_name: None = None


TextBlocks = Annotated[list[Annotated[TextBlock, only("text")]], Field(fail_fast=True)]
Texts = Annotated[Annotated[Text, Tag("text")] | Annotated[TextBlocks, Tag("parts")], Discriminator(kind_of_content)]


class ToolResultBlock(Cacheable):
    type: Literal["tool_result"]
    tool_use_id: Label
    content: Texts | None = None
    is_error: bool | None = Field(None, description="told to the model before the content")
    toolset_name: None = None


def _kind_of_block(value: Any) -> str:
    """The tag of a block's type. A tag must not be a key of a block, so that paths in messages can leave it out."""
    kind = value.get("type") if isinstance(value, dict) else None
    return f"a {kind} block" if isinstance(kind, str) else "a text block"


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("a text block")]
    | Annotated[ThinkingBlock, Tag("a thinking block")]
    | Annotated[ToolUseBlock, Tag("a tool_use block")]
    | Annotated[ToolResultBlock, Tag("a tool_result block")],
    Discriminator(_kind_of_block),
    only("text", "thinking", "tool_use", "tool_result"),
]
_BLOCKS_OF_ONE_ROLE = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}


class MessageParam(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[Text, Tag("text")] | Annotated[list[AnyBlock], Field(fail_fast=True), Tag("parts")],
        Discriminator(kind_of_content),
    ]

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> MessageParam:
        if self.content == [] and self.role != "assistant":
            raise ValueError(f"the content of a {self.role} message must have at least one block")
        for block in () if isinstance(self.content, str) else self.content:
            role = _BLOCKS_OF_ONE_ROLE.get(block.type, self.role)
            if role != self.role:
                raise ValueError(f"{block.type} blocks belong to {role} messages, got one in a {self.role} message")
        return self


class ToolDefinition(Cacheable):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
    description: Text | None = None
    input_schema: ObjectSchema
    strict: bool | None = Field(None, description="refused where an input cannot be held to the schema")
    eager_input_streaming: bool | None = Field(None, description="changes nothing: inputs are streamed as they come")
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(None, description="of the tool")
    disable_parallel_tool_use: bool | None = Field(None, description="at most one call")

    @model_validator(mode="after")
    def _fields_agree(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("name is required with the type tool, and not allowed with others")
        return self


class Thinking(Body):
    """`adaptive` leaves it to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1024, le=2**31 - 1)] | None = Field(
        None, description="most tokens of thoughts"
    )

    @model_validator(mode="after")
    def _budget_if_enabled(self) -> Thinking:
        if (self.budget_tokens is not None) != (self.type == "enabled"):
            raise ValueError("budget_tokens is required with the type enabled, and not allowed with others")
        return self


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens: a conversation, and everything that changes how the model sees it."""

    model: Annotated[str, Field(max_length=512)]
    messages: Annotated[list[MessageParam], Field(fail_fast=True, min_length=1)]
    system: Texts | None = None
    tools: Annotated[list[Annotated[ToolDefinition, only("custom")]], Field(fail_fast=True)] = Field(
        default_factory=list
    )
    tool_choice: Annotated[ToolChoice, only("auto", "any", "tool", "none")] | None = None
    thinking: Annotated[Thinking, only("enabled", "disabled", "adaptive")] | None = None
    cache_control: CacheControl | None = Field(None, description="changes nothing: prefixes are cached in any case")
    speed: Literal["standard"] | None = None

    context_management: None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    output_config: None = None
    user_profile_id: None = None
    workspace_id: None = None

    @model_validator(mode="after")
    def _choice_needs_tools(self) -> CountTokensRequest:
        choice = self.tool_choice
        asked = choice is not None and choice.type != "none"
        chosen = [] if choice is None or choice.name is None else [choice.name]
        check_choice([tool.name for tool in self.tools], asked, chosen)
        return self

    @property
    def tools_in_use(self) -> list[ToolDefinition]:
        return [] if self.tool_choice is not None and self.tool_choice.type == "none" else self.tools


class Metadata(Body):
    user_id: Label | None = Field(None, description="informational")


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(description="most output tokens; the context may leave room for fewer")
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    container: None = None
    diagnostics: None = None
    inference_geo: None = None

    @model_validator(mode="after")
    def _budget_leaves_room(self) -> MessagesRequest:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise ValueError(
                f"max_tokens must be greater than thinking.budget_tokens ({budget}), got {self.max_tokens}"
            )
        return self
