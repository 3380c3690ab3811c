"""What a response's body says about tool calls, translated into API-independent types."""

from __future__ import annotations

from collections.abc import Callable

from pagoda_gateway.api.responses_schemas import AllowedChoice, FunctionChoice, ResponsesRequest
from pagoda_gateway.generation.answers import check_form
from pagoda_gateway.text.answers import Calling, Demand, Formats, Wanted
from pagoda_gateway.text.tool_formats.functions import Function


def wanted_of(body: ResponsesRequest, formats: Formats) -> Wanted:
    """What the answer may contain. Raises InvalidParams."""
    calling = _calling(body)
    if calling is not None and body.form.grammar:
        check_form(formats, body.form.field)
    return Wanted(calling=calling, form=body.form.grammar)


def _calling(body: ResponsesRequest) -> Calling | None:
    if not body.tools_in_use:
        return None
    chosen, one = body.chosen_names, isinstance(body.tool_choice, FunctionChoice)
    names = None if chosen is None else frozenset(chosen)
    functions = tuple(
        Function(name=tool.name, parameters=tool.parameters, strict=bool(tool.strict))
        for tool in body.tools_in_use
        if names is None or tool.name in names
    )
    mode = body.tool_choice.mode if isinstance(body.tool_choice, AllowedChoice) else body.tool_choice
    demand = Demand.REQUIRED if one or mode == "required" else Demand.AUTO
    return Calling(functions=functions, demand=demand, several=body.parallel_tool_calls is not False and not one)


def place_in(body: ResponsesRequest) -> Callable[[str], str]:
    """Return a function from a tool's name to the path of its parameters in the body."""
    names = [tool.name for tool in body.tools or ()]
    return lambda name: f"tools[{names.index(name)}].parameters"
