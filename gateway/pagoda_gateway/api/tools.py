"""Tools in OpenAI's chat API: the functions that may be called, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from pagoda_gateway.api.body import Body, Text
from pagoda_proto.grammars import MAX_CHOICES

NONE, AUTO, REQUIRED = "none", "auto", "required"


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Parameters must be an object: calls pass arguments by name."""
    kind = schema.get("type")
    if kind not in (None, "object") and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f"must describe an object (type: object), got type {kind!r:.64}")
    return schema


ObjectSchema = Annotated[dict[str, Any], AfterValidator(_of_an_object)]


class FunctionDefinition(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: ObjectSchema | None = None
    strict: bool | None = Field(None, description="refused where arguments cannot be held to the schema")


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


def _not_empty(value: Any) -> Any:
    if value == []:
        raise ValueError("empty array: expected an array with minimum length 1, but got an empty array instead")
    return value


Tools = Annotated[list[Tool], Field(fail_fast=True), BeforeValidator(_not_empty)]


class FunctionName(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]


class FunctionChoice(Body):
    type: Literal["function"]
    function: FunctionName


class Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def kind_of_choice(value: Any) -> str:
    """The tag of a choice's type. A tag must not be a key of a choice, so that paths in messages can leave it out."""
    kind = value.get("type") if isinstance(value, dict) else None
    return "a function" if kind == "function" else "allowed tools" if kind == "allowed_tools" else "a mode"


def is_choice(value: Any) -> Any:
    """Refuse other types in one sentence. Raises ValueError."""
    kind = value.get("type") if isinstance(value, dict) else "function"
    if kind not in ("function", "allowed_tools"):
        raise ValueError(f"must be of type 'function' or 'allowed_tools', got {str(kind)[:64]!a}")
    return value


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a mode")]
    | Annotated[FunctionChoice, Tag("a function")]
    | Annotated[AllowedChoice, Tag("allowed tools")],
    Discriminator(kind_of_choice),
    BeforeValidator(is_choice),
]
AnyChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice


def chosen_names(choice: AnyChoice | None) -> list[str] | None:
    """The functions that a choice names; None if it names none, which means all."""
    match choice:
        case FunctionChoice(function=named):
            return [named.name]
        case AllowedChoice(allowed_tools=allowed):
            return [one.function.name for one in allowed.tools]
    return None


def chosen_mode(choice: AnyChoice | None) -> str:
    """NONE, AUTO or REQUIRED."""
    match choice:
        case FunctionChoice():
            return REQUIRED
        case AllowedChoice(allowed_tools=allowed):
            return allowed.mode
    return choice or AUTO


def check_choice(tools: Sequence[str], asked: bool, chosen: Sequence[str]) -> None:
    """Raises ValueError for a choice of tools that do not exist. `asked`: the body has a choice other than none."""
    if asked and not tools:
        raise ValueError("tool_choice needs tools")
    known = set(tools)
    if len(known) < len(tools):
        raise ValueError("each tool must have a different name")
    for name in chosen:
        if name not in known:
            raise ValueError(f"tool_choice names {name[:64]!a}, which is not among the tools")
