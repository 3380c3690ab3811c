"""Calls in an answer as a grammar: one of the functions' names, then arguments of its schema, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pagoda_gateway.text.lark import GAP, Rules, escaped
from pagoda_gateway.text.tool_formats.format import ToolFormat
from pagoda_gateway.text.tool_formats.functions import Function, NotEnforced


def calls_only(rules: Rules, tool_format: ToolFormat, functions: Sequence[Function], *, several: bool) -> str:
    """An answer that is one call or, with `several`, one or more. Raises NotEnforced."""
    group = _group(rules, tool_format, functions, several)
    if tool_format.bare:
        return group
    first = f"{rules.spell(tool_format.begin)} {group}"
    if not several or tool_format.again is None:
        return first
    return f"{first} ({rules.spell(tool_format.again + tool_format.begin)} {group})*"


def calls_or(rules: Rules, tool_format: ToolFormat, functions: Sequence[Function], other: str, *, several: bool) -> str:
    """An answer that is all calls, or all something else. Raises NotEnforced."""
    return f"({calls_only(rules, tool_format, functions, several=several)}) | {other}"


def calls_in_text(
    rules: Rules, tool_format: ToolFormat, functions: Sequence[Function], *, several: bool, avoid: str = ""
) -> str:
    """A text that may contain calls, and does not begin with `avoid`. Raises NotEnforced."""
    group = _group(rules, tool_format, functions, several)
    names = "|".join(re.escape(function.name) for function in functions)
    bare = tool_format.bare.replace("NAMES", names)
    first = "|".join(filter(None, [bare and rf"\s|{bare}", beginning(avoid)]))
    text = rules.text(tool_format.triggers, first)
    if not tool_format.triggers:
        return f"{GAP} ({text} | {group})"
    head = rules.up_to(tool_format.triggers, first=first)
    if several and tool_format.again is not None:
        later = rules.up_to(tool_format.triggers)
        found = f"{text} | {head} {group} ({later} {group})* {rules.text(tool_format.triggers)}"
    else:
        found = f"{text} | {head} {group}"
    return f"{GAP} ({found} | {group})" if bare else found


def beginning(text: str) -> str:
    """An expression that matches `text` at the beginning of an answer, after any white space."""
    return rf"\s*{escaped(text)}" if text else ""


def _group(rules: Rules, tool_format: ToolFormat, functions: Sequence[Function], several: bool) -> str:
    """A group of calls, without `begin`."""
    call = rules.rule(" | ".join(_call(rules, tool_format, function) for function in functions))
    if several and tool_format.between is not None:
        call = f"{call} ({rules.spell(tool_format.between)} {call})*"
    return rules.rule(f"{rules.spell(tool_format.opening)} {call} {rules.spell(tool_format.end)}")


def _call(rules: Rules, tool_format: ToolFormat, function: Function) -> str:
    try:
        function.check()
        return tool_format.shape.rule(rules, function)
    except NotEnforced as error:
        error.function = function.name
        raise
