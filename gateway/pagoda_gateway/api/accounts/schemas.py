"""Bodies, queries and answers for operators managing API keys, and for clients asking about their usage."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from pagoda_gateway.api.answer_schemas import Answered
from pagoda_gateway.api.body import Body, Number, Query

MAX_LISTED = 100
MAX_TIME = 2**40
LimitAsked = Annotated[int | None, Field(description="0: no limit; null: as the gateway's options say")]


class LimitsAsked(Body):
    requests_per_minute: LimitAsked = None
    tokens_per_minute: LimitAsked = None
    concurrent_requests: LimitAsked = None


class CreateKeyRequest(Body):
    """`NewKey` validates the values, for `pagoda keys` too."""

    name: str
    role: Literal["client", "monitor", "admin"] = "client"
    models: Annotated[list[str] | None, Field(description="names that requests may use; null: all")] = None
    limits: LimitsAsked = LimitsAsked()
    weight: Annotated[int, Field(description="its share, where the scheduling policy is fair")] = 1
    expires_at: Annotated[int | None, Field(ge=0, le=MAX_TIME, description="in Unix seconds")] = None


class LimitsShown(Answered):
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None


class KeyObject(Answered):
    id: str
    object: Literal["api_key"]
    name: str
    role: str
    state: Literal["active", "expired", "revoked"]
    models: list[str] | None
    limits: LimitsShown
    weight: int
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    redacted_value: str


class NewKeyObject(KeyObject):
    """`value` is the key itself, which is shown here and never again."""

    value: str


class KeyList(Answered):
    object: Literal["list"]
    data: list[KeyObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def _day(value: Any) -> Any:
    try:
        return date.fromisoformat(value) if isinstance(value, str) and len(value) == len("2026-01-31") else value
    except ValueError:
        raise ValueError("must be a day such as 2026-01-31") from None


Day = Annotated[date, BeforeValidator(_day)]


class KeysQuery(Query):
    limit: Annotated[int, Number, Field(ge=1, le=MAX_LISTED)] = 20
    order: Literal["asc", "desc"] = "desc"


class UsageQuery(Body):
    """`from` and `to` are days in UTC, both included; by default, the last 30 days."""

    from_: Annotated[Day | None, Field(alias="from")] = None
    to: Day | None = None
    key_id: str | None = None
    format: Literal["json", "csv"] | None = None


class UsageObject(Answered):
    day: str
    key_id: str | None
    model: str
    requests: int
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int


class UsageTotal(Answered):
    requests: int
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int


class UsageAnswer(Answered):
    """`key_id` of a row is null if no key was required."""

    object: Literal["list"]
    from_: Annotated[str, Field(alias="from")]
    to: str
    data: list[UsageObject]
    total: UsageTotal
