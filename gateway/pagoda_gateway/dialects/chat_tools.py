"""What a chat body says about tool calls and reasoning, translated into API-independent types."""

from __future__ import annotations

from collections.abc import Callable

from pagoda_gateway.api import tools as api
from pagoda_gateway.api.schemas import ChatRequest
from pagoda_gateway.generation.answers import check_budget, check_form
from pagoda_gateway.text.answers import Calling, Demand, Formats, Wanted
from pagoda_gateway.text.tool_formats.functions import Function


def calling_of(body: ChatRequest) -> Calling | None:
    """None if no tools may be called."""
    mode = api.chosen_mode(body.tool_choice)
    if not body.tools or mode == api.NONE:
        return None
    chosen = api.chosen_names(body.tool_choice)
    names = None if chosen is None else frozenset(chosen)
    functions = [
        Function(name=tool.function.name, parameters=tool.function.parameters, strict=bool(tool.function.strict))
        for tool in body.tools
        if names is None or tool.function.name in names
    ]
    several = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, api.FunctionChoice)
    return Calling(functions=tuple(functions), demand=Demand(mode), several=several)


def wanted_of(body: ChatRequest, formats: Formats, form_grammar: str) -> Wanted:
    """What the answer may contain; `form_grammar` is its form's grammar for this tokenizer. Raises InvalidParams."""
    calling, form = calling_of(body), body.form
    if calling is not None and form is not None:
        check_form(formats, form.field)
    budget = body.thinking_token_budget if body.thinking_budget is None else body.thinking_budget
    if budget is not None:
        check_budget(formats, "thinking_budget" if body.thinking_budget is not None else "thinking_token_budget")
    return Wanted(calling=calling, form=form_grammar, budget=budget)


def place_in(body: ChatRequest) -> Callable[[str], str]:
    """Return a function from a tool's name to the path of its parameters in the body."""
    names = [tool.function.name for tool in body.tools or ()]
    return lambda name: f"tools[{names.index(name)}].function.parameters"
