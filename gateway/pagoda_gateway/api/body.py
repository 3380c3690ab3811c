"""Base classes of request bodies and queries: strict, with unknown fields refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Text = str  # bounded by the body's size and the model's context


def _something_is_kept(value: int) -> int:
    if value == 0:
        raise ValueError("must be -1 or at least 1, got 0")
    return value


Kept = Annotated[int, Field(ge=-1), AfterValidator(_something_is_kept)]  # tokens to keep; -1: all that fit
Id = Annotated[str, Field(min_length=1, max_length=128)]


class Body(BaseModel):
    """`max_values` bounds the values in arrays and objects together, checked before a body is parsed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    max_values: ClassVar[int] = 2**17


def _number(text: Any) -> Any:
    """Convert a number from a query or a form, whose values are text."""
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 16 else text


Number = BeforeValidator(_number)


def _flag(text: Any) -> Any:
    return {"true": True, "false": False}.get(text, text) if isinstance(text, str) else text


Flag = BeforeValidator(_flag)


def kind_of_prompts(value: Any) -> str:
    """The kind of a prompt by its first element; errors are then reported for that kind."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    return "texts" if isinstance(first, str) else "lists of ids" if isinstance(first, list) else "ids"


def only(*known: str, said: str = "is of type {kind}; supported here: {known}") -> BeforeValidator:
    """Refuse objects of other types in one sentence, whatever else they contain."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in known:
            raise ValueError(said.format(kind=ascii(kind[:64]), known=", ".join(known)))
        return value

    return BeforeValidator(check)


class Query(BaseModel):
    """The query parameters of a list."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    after: Id | None = None
