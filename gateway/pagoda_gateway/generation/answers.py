"""Turns what a request wants of its answer, and the reasoning state its prompt leaves, into a grammar and a parser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from pagoda_gateway.text.answers import Formats, HowRead, Wanted
from pagoda_gateway.text.lark import TooMuch
from pagoda_gateway.text.reasoning import Thinking
from pagoda_gateway.text.tool_formats.functions import Function, NotEnforced
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.params import MAX_GRAMMAR_CHARS

MAX_SCHEMA_VALUES = 16 * 1024  # of all tools together; more would not fit into a grammar


class Plan(NamedTuple):
    """`loose_grammar` is weaker than `grammar`, for when that cannot be used; "" if there is none."""

    how: HowRead
    grammar: str = ""
    loose_grammar: str = ""


def plan_of(formats: Formats, wanted: Wanted, thinking: Thinking | None, place: Callable[[str], str]) -> Plan:
    """`place` returns where in the body a function's parameters are.

    Raises:
        InvalidParams: a strict function has a schema that cannot be enforced.
    """
    functions = () if wanted.calling is None else wanted.calling.functions
    all_strict = all(each.strict for each in functions)
    large = sum(num_values(each.parameters) for each in functions) > MAX_SCHEMA_VALUES
    if large and all_strict:
        raise InvalidParams([Problem("tools", f"schemas of strict tools have at most {MAX_SCHEMA_VALUES} values")])
    try:
        loose = "" if all_strict else _written(loosened(wanted), formats, thinking)
        grammar = "" if large else _grammar_of(wanted, formats, thinking)
    except NotEnforced as error:
        raise InvalidParams([Problem(f"{place(error.function)}{error.pointer}", str(error))]) from error
    except TooMuch as error:
        raise InvalidParams([Problem("tools", f"strict: {error}")]) from error
    how = HowRead(thinking=thinking, functions=_as_read(formats, functions, large or grammar is None))
    if large or grammar is None or (loose and len(grammar) > MAX_GRAMMAR_CHARS):
        return Plan(how, loose)
    return Plan(how, grammar, loose)


def _grammar_of(wanted: Wanted, formats: Formats, thinking: Thinking | None) -> str | None:
    """None if it would be too large and a weaker one is allowed. Raises NotEnforced, TooMuch."""
    try:
        return _written(wanted, formats, thinking)
    except TooMuch:
        if wanted.calling is None or all(each.strict for each in wanted.calling.functions):
            raise
        return None


def _written(wanted: Wanted, formats: Formats, thinking: Thinking | None) -> str:
    """Raises NotEnforced, TooMuch."""
    try:
        return wanted.grammar(formats, thinking)
    except RecursionError as error:
        raise TooMuch("schemas lead too deep") from error


def _as_read(formats: Formats, functions: Sequence[Function], large: bool) -> tuple[Function, ...]:
    """The functions, with their schemas only if the format needs them to parse values."""
    if formats.tools is not None and formats.tools.shape.reads_schemas and not large:
        return tuple(functions)
    return tuple(Function(name=each.name) for each in functions)


def num_values(value: Any) -> int:
    """Number of values in a JSON value, itself included; counting stops above MAX_SCHEMA_VALUES."""
    waiting, count = [value], 0
    while waiting and count <= MAX_SCHEMA_VALUES:
        item = waiting.pop()
        count += 1
        if isinstance(item, dict | list):
            waiting += item.values() if isinstance(item, dict) else item
    return count


def loosened(wanted: Wanted) -> Wanted:
    """A copy in which functions that are not strict may have any JSON object as arguments."""
    if wanted.calling is None:
        return wanted
    functions = tuple(
        each if each.strict else msgspec.structs.replace(each, loose=True) for each in wanted.calling.functions
    )
    return msgspec.structs.replace(wanted, calling=msgspec.structs.replace(wanted.calling, functions=functions))


def check_budget(formats: Formats, field: str) -> None:
    """Raises InvalidParams if reasoning cannot be cut short."""
    reasoning = formats.reasoning
    if reasoning is None:
        raise InvalidParams([Problem(field, "this server knows no way to find thoughts in what this model writes")])
    if not any(reasoning.close.startswith(token) for token in formats.tokens):
        raise InvalidParams(
            [Problem(field, "this model ends its thoughts with no single token, so they cannot be limited")]
        )


def check_form(formats: Formats, field: str) -> None:
    """Raises InvalidParams if an output form cannot be combined with tools."""
    if formats.tools is not None and formats.tools.bare:
        raise InvalidParams([Problem("tools", f"cannot go with {field}: this model writes tool calls as plain text")])
