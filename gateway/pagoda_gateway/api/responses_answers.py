"""Schemas of the answers of /v1/responses, for /openapi.json. Tests check real answers against them."""

from __future__ import annotations

from typing import Any, Literal

from pagoda_gateway.api.answer_schemas import Answered, CachedTokens, ChatTokenLogprob

State = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answered):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class OutputMessage(Answered):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    status: State


class FunctionCall(Answered):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: State


class ReasoningText(Answered):
    type: Literal["reasoning_text"]
    text: str


class Reasoning(Answered):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]
    status: State


class InputDetails(CachedTokens):
    cache_write_tokens: Literal[0]


class OutputDetails(Answered):
    reasoning_tokens: int


class ResponseUsage(Answered):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(Answered):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(Answered):
    reason: Literal["max_output_tokens"]


class ResponseAnswer(Answered):
    """With `stream: true`, server-sent events from `response.created` to `response.completed` instead."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int = 0
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | FunctionCall | Reasoning]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class DeletedResponse(Answered):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Answered):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
