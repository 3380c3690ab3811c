"""Schemas of the routes' answers, for /openapi.json. Tests check real answers against them; no request uses them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answered(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorObject(Answered):
    message: str
    type: str
    param: str | None
    code: str


class Failure(Answered):
    """The body of a failed request's answer."""


class ErrorAnswer(Failure):
    error: ErrorObject


class MessagesErrorObject(Answered):
    type: str
    message: str


class MessagesErrorAnswer(Failure):
    type: Literal["error"]
    error: MessagesErrorObject
    request_id: str


class CachedTokens(Answered):
    cached_tokens: int


class ReasoningTokens(Answered):
    reasoning_tokens: int


class Usage(Answered):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None


class CalledFunction(Answered):
    name: str
    arguments: str


class ToolCall(Answered):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Answered):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []


class TokenLogprob(Answered):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answered):
    content: list[ChatTokenLogprob]
    refusal: None


class PromptLogprob(Answered):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatChoice(Answered):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] = []


class ChatAnswer(Answered):
    """With `stream: true`, server-sent events of `chat.completion.chunk` objects and a final [DONE] instead."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = []
    prompt_token_ids: list[int] = []


class CompletionLogprobs(Answered):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answered):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs = []
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class CompletionAnswer(Answered):
    """With `stream: true`, server-sent events of such objects and a final [DONE] instead."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage


class MessagesUsage(Answered):
    """The prompt's tokens are the sum of those computed and those read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int


class TextContent(Answered):
    type: Literal["text"]
    text: str


class ThinkingContent(Answered):
    """The signature is empty: it is not used here."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(Answered):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesAnswer(Answered):
    """With `stream: true`, server-sent events from `message_start` to `message_stop` instead."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessagesUsage


class CountTokensAnswer(Answered):
    input_tokens: int


class TokenizeAnswer(Answered):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Answered):
    prompt: str


class Model(Answered):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(Answered):
    object: Literal["list"]
    data: list[Model]


class Live(Answered):
    live: bool
    dead: list[str]


class Ready(Answered):
    ready: bool
    problems: list[str]


class Startup(Answered):
    started: bool
    phase: str
    problems: list[str]


class Version(Answered):
    version: str


class WorkerShown(Answered):
    worker_id: str
    state: str
    epoch: int
    device: str
    num_blocks: int
    num_free_blocks: int
    num_rows: int
    steps_done: int
    rss_bytes: int


class ReportShown(Answered):
    at_s: float
    workers: list[WorkerShown]
    totals: dict[str, int]


class RequestShown(Answered):
    id: str
    model: str
    ended_at: float
    end: str
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    total_s: float
    attempts: int
    waits_s: dict[str, float]


class RequestSpent(RequestShown):
    """`waits_s` sums to `total_s`."""

    object: Literal["request"]


class StackAnswer(Answered):
    """`report` is null while no engine core answers; `requests` are the caller's own, newest first."""

    version: str
    models: list[str]
    problems: list[str]
    phase: str
    num_open: int
    load: dict[str, Any]
    report: ReportShown | None
    requests: list[RequestShown]


class LoadAnswer(Answered):
    server_load: int
    engine: dict[str, Any]


class TranscriptPartShown(Answered):
    record: dict[str, Any]
    model_fingerprint: str
    numerics_id: str
    choices: list[dict[str, Any]]
    prompt_logprobs: list[Any] = []


class TranscriptShown(Answered):
    """`record` is what was sent to the engine core; `choices` are the tokens of each choice and how it ended."""

    id: str
    created: int
    model: str
    parts: list[TranscriptPartShown]
    format: int
    version: str
    how: dict[str, Any] = {}
    adapter: str = ""
