"""OpenAI's request bodies, with vLLM's extensions. Fields not implemented are accepted only with no-op values.

Every field of the specification is listed: supported, or restricted to values that change nothing, so that a client
gets an error about the field instead of a wrong result. Types are strict: a string is never taken for a number.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import BeforeValidator, Discriminator, Field, Tag, create_model, model_validator

from pagoda_gateway.api.body import Body, Kept, Text, kind_of_prompts, only
from pagoda_gateway.api.forms.fields import Formed
from pagoda_gateway.api.json_body import MAX_VALUES
from pagoda_gateway.api.tools import NONE, ToolChoice, Tools, check_choice, chosen_names
from pagoda_proto.params import (
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MIN_PRIORITY,
    PARAMETERS,
    PLAIN,
    Parameter,
    SamplingParams,
)

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)

Label = Annotated[str, Field(max_length=512)]  # informational: names, the client's own ids
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]  # of a million wrong ids, report the first
Budget = Annotated[int, Field(ge=0, le=2**31 - 1)]
MetadataKey = Annotated[str, Field(max_length=64)]
Priority = Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
Salt = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Word = Annotated[str, Field(min_length=1, max_length=256)]
RequestName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Stop = str | Annotated[list[str], Field(fail_fast=True)]


# Fields that beam search would ignore, and that are therefore refused, in addition to those in `pagoda_proto.params`.
BESIDE_BEAMS = (
    "stream", "logprobs", "top_logprobs", "best_of", "echo", "suffix", "tools", "thinking_budget",
    "thinking_token_budget",
)  # fmt: skip
PLAIN_VERBOSITY = "medium"  # what clients send by default


def stop_strings(stop: Stop | None) -> tuple[str, ...]:
    """The stop strings as a tuple; a plain string is one of them."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


class TextPart(Body):
    type: Literal["text"]
    text: Text


class FunctionCall(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text = Field(description="a JSON object, as text")


class ToolCallParam(Body):
    id: Label
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


def kind_of_content(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


OnlyText = only("text", said="is a part of type {kind}; this model takes text parts only")
TextParts = Annotated[list[Annotated[TextPart, OnlyText]], Field(fail_fast=True, min_length=1)]
Content = Annotated[Annotated[Text, Tag("text")] | Annotated[TextParts, Tag("parts")], Discriminator(kind_of_content)]


class Message(Body):
    """One turn. Fields of answers (refusal, annotations, ..) are accepted as they are sent: empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: Text | None = Field(None, description="of an assistant; shown as the chat template shows it")
    reasoning: Text | None = Field(None, description="the same as reasoning_content")
    name: Label | None = None
    tool_calls: Annotated[list[ToolCallParam], Field(fail_fast=True, max_length=128)] | None = None
    tool_call_id: Label | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is required, except in an assistant message with tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to assistant messages")
        if self.role != "assistant" and not (self.reasoning_content is None and self.reasoning is None):
            raise ValueError("reasoning_content belongs to assistant messages")
        if self.reasoning is not None and self.reasoning_content not in (None, self.reasoning):
            raise ValueError("reasoning and reasoning_content differ")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a tool message needs tool_call_id")
        return self


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="usage so far in every chunk")
    include_obfuscation: Literal[False] | None = None

    @model_validator(mode="after")
    def _continuous_needs_usage(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage: true")
        return self


def _keyed_by_token_id(value: Any) -> Any:
    """Check that keys are token ids written as strings, as in OpenAI's API."""
    if isinstance(value, dict):
        for key in value:
            if not (isinstance(key, str) and _TOKEN_ID.fullmatch(key)):
                raise ValueError("keys must be token ids written as strings")
    return value


def _plain(kind: Any, parameter: Parameter) -> Any:
    """A parameter's field, as declared in `pagoda_proto.params`, which also checks its range, for every API alike."""
    about = parameter.about if kind is bool else f"{parameter.about}; {parameter.rule}"
    return kind | None, Field(None, description=about)


def with_plain_parameters(name: str, base: type[Body], *but: str) -> Any:
    """A body with a field for every plain parameter except those in `but`."""
    kinds = get_type_hints(SamplingParams)
    fields: dict[str, Any] = {each: _plain(kinds[each], PARAMETERS[each]) for each in PLAIN if each not in but}
    return create_model(name, __base__=base, **fields)


if TYPE_CHECKING:

    class PlainParameters(Formed):
        n: int | None
        temperature: float | None
        use_beam_search: bool | None
        length_penalty: float | None
else:
    PlainParameters = with_plain_parameters("PlainParameters", Formed)


class Sampling(PlainParameters):
    """Fields that chat and plain completions share."""

    model: str | None = Field(None, max_length=512, description="served model name; the only model if absent")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    max_tokens: int | None = None
    stop: Stop | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_keyed_by_token_id)] | None = None
    user: Label | None = Field(None, description="informational")

    stop_token_ids: TokenIds | None = None
    bad_words: Annotated[list[Word], Field(max_length=MAX_BAD_WORDS // 2)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    prompt_logprobs: int | None = None
    priority: Priority = Field(0, description="lower runs earlier, where the policy heeds it")
    cache_salt: Salt | None = Field(None, description="prefixes are shared only within one salt")
    return_token_ids: bool | None = None
    request_id: RequestName | None = Field(None, description="the answer's id ends with it, and the log shows it")
    truncate_prompt_tokens: Kept | None = Field(
        None, description="keep only so many tokens of the prompt, the last ones; -1: as many as there is room for"
    )

    @model_validator(mode="after")
    def _beams_are_plain(self) -> Sampling:
        if not self.use_beam_search:
            if self.length_penalty is not None:
                raise ValueError("length_penalty needs use_beam_search: true")
            return self
        for name in BESIDE_BEAMS:
            value = getattr(self, name, None)
            if value is not None and value is not False and value != []:
                raise ValueError(f"{name} cannot be combined with use_beam_search")
        return self

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs is not available with stream: true")
        return self


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, description="the same as max_tokens")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    thinking_budget: Budget | None = Field(None, description="most tokens of thoughts")
    thinking_token_budget: Budget | None = Field(None, description="the same as thinking_budget")
    metadata: Annotated[dict[MetadataKey, Label], Field(max_length=16)] | None = Field(
        None, description="informational"
    )
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    safety_identifier: Label | None = Field(None, description="informational")
    prompt_cache_key: Label | None = Field(None, description="informational; see cache_salt")
    prompt_cache_retention: Literal["in_memory"] | None = None

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Label | None = Field(None, description="for chat templates that read it")
    include_reasoning: bool = Field(True, description="whether thoughts are shown; they are counted in any case")
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="for chat templates that read it; elsewhere there is only medium"
    )
    echo: bool = Field(False, description="begin the answer with the last message, if that is an assistant's")

    audio: None = None
    chat_template: None = None
    function_call: Literal["none"] | None = None
    functions: None = None
    moderation: None = None
    prediction: None = None
    prompt_cache_options: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        check_prompt_options(self)
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        check_choice(names, self.tool_choice not in (None, NONE), chosen_names(self.tool_choice) or ())
        if self.thinking_budget is not None and self.thinking_token_budget not in (None, self.thinking_budget):
            raise ValueError("thinking_budget and thinking_token_budget differ")
        if self.form is not None and not self.form.is_json and self.tools and self.tool_choice != NONE:
            raise ValueError(f"{self.form.field} leaves no room for tools; give one of them, or tool_choice none")
        return self


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    max_values = MAX_VALUES  # prompts of token ids

    prompt: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[list[Text], Field(fail_fast=True), Tag("texts")]
        | Annotated[TokenIds, Tag("ids")]
        | Annotated[list[TokenIds], Field(fail_fast=True), Tag("lists of ids")],
        Discriminator(kind_of_prompts),
    ]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionRequest:
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of < n:
            raise ValueError(f"best_of must be at least n ({n}), got {self.best_of}")
        if self.stream and self.best_of is not None and self.best_of > n:
            raise ValueError("best_of above n is not available with stream: true")
        return self


class TokenizeRequest(Body):
    """POST /tokenize with a `prompt`, or with `messages` as in a chat request."""

    model: str | None = Field(None, max_length=512)
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = None
    tools: Tools | None = None

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is not None:
            check_prompt_options(self)
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    max_values = MAX_VALUES

    model: str | None = Field(None, max_length=512)
    tokens: TokenIds


def check_prompt_options(request: ChatRequest | TokenizeRequest) -> None:
    """Raises ValueError."""
    if request.continue_final_message and request.add_generation_prompt:
        raise ValueError("continue_final_message needs add_generation_prompt: false")
