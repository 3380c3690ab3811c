"""Request and response bodies. A request's is bounded, then parsed, and never held longer than needed."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.responses import Response

from pagoda_gateway.api import body as api
from pagoda_gateway.api.encoding import encoded
from pagoda_gateway.api.errors import invalid_fields
from pagoda_gateway.api.json_body import check_content_type, parse_object, parsed_bytes
from pagoda_gateway.clients import NOBODY, Caller
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.generation.prompts import at_most
from pagoda_gateway.http.memory import Holding
from pagoda_gateway.http.sse import until_disconnect
from pagoda_gateway.http.text_pool import INLINE_SIZE
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.params import too_long

Body = TypeVar("Body", bound=api.Body)
Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")
TIMEOUT, MAX_TIMEOUT_MS = "Request-Timeout-Ms", 86_400_000
_MILLISECONDS = re.compile(r"[0-9]{1,9}", re.ASCII)


def caller_of(request: Request) -> Caller:
    """The caller, as `http.limits` has identified it."""
    caller: Caller = request.scope.get("state", {}).get("caller", NOBODY)
    return caller


def timeout_of(headers: Headers) -> float | None:
    """The client's timeout for the whole answer from the header, in seconds; None without one. Raises InvalidParams."""
    found = headers.getlist(TIMEOUT)
    if not found:
        return None
    text = found[0].strip()
    if len(found) > 1 or not _MILLISECONDS.fullmatch(text) or not 1 <= int(text) <= MAX_TIMEOUT_MS:
        rule = f"must be a whole number from 1 to {MAX_TIMEOUT_MS}, once"
        raise InvalidParams([Problem(TIMEOUT, f"{rule}, got {', '.join(found)[:64]!a}")])
    return int(text) / 1000


def due_at_of(headers: Headers) -> float:
    """The deadline by that timeout from now, in Unix seconds; 0 without one. Raises InvalidParams."""
    timeout_s = timeout_of(headers)
    return 0.0 if timeout_s is None else time.time() + timeout_s


async def read_body(
    ctx: GatewayContext, request: Request, schema: type[Body], seen: Callable[[bytes], object] | None = None
) -> Body:
    """Read the request's body as `schema`; raises PagodaError for any fault in it. The bytes are not kept; `seen` gets
    them in the thread that parses them."""
    check_content_type(request.headers.get("content-type", ""))
    data = b"".join([chunk async for chunk in request.stream() if chunk])  # a single chunk is not copied

    hold_for(request, parsed_bytes(data, schema.max_values))

    def work() -> Body:
        if seen is not None:
            seen(data)
        return checked_body(ctx, schema, parse_object(data, schema.max_values))

    reading = ctx.pool.run(caller_of(request).key, len(data), work)
    return await (reading if len(data) <= INLINE_SIZE else while_connected(request, reading))


def checked_body(ctx: GatewayContext, schema: type[Body], body: dict[str, Any]) -> Body:
    """Raises PagodaError, naming each field at fault."""
    _check_counts(ctx, body)
    return parse_body(schema, body)


def query_of(request: Request, schema: type[Model]) -> Model:
    """The request's query as `schema`; names that end in [] are lists. Raises InvalidParams naming parameters that are
    unknown, wrong or given twice."""
    found: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name.endswith("[]"):
            found.setdefault(name, []).append(value)
        elif name in found:
            raise InvalidParams([Problem(name[:64], "is given twice in the query")])
        else:
            found[name] = value
    return parse_body(schema, found)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, and cancel it if the client leaves. Raises ClientGone then."""
    async with until_disconnect(request.receive):
        return await work


def hold_for(request: Request, num_bytes: int, *, instead: bool = False) -> None:
    """Count this much memory as held for the request, or `instead` of its body, which is no longer needed.

    Raises:
        PagodaError: OVERLOADED if that is more than is left, REQUEST_TOO_LARGE if it always will be.
    """
    holding: Holding | None = request.scope.get("state", {}).get("memory")
    if holding is not None:
        if instead:
            holding.release()
        holding.grow_to(num_bytes)


def _check_counts(ctx: GatewayContext, body: dict[str, Any]) -> None:
    """Refuse lists that are far too long before validating them."""
    config = ctx.config
    longest = [max(model.engine.load.max_model_len, model.text.max_model_len) for model in ctx.catalogue]
    limits = {
        "messages": config.max_messages,
        "input": max(config.max_messages, config.max_inputs),
        "tools": config.max_tools,
    }
    for name, limit in limits.items():
        value = body.get(name)
        if isinstance(value, list) and not (value and isinstance(value[0], int)):  # token ids have their own limit
            at_most(name, len(value), limit)
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or body.get("truncate_prompt_tokens") is not None:
        return
    most_ids, asked = max(longest), body.get("max_tokens")
    if prompt and isinstance(prompt[0], int) and len(prompt) > most_ids > 0:
        raise too_long(most_ids, len(prompt), asked if isinstance(asked, int) else 1, "prompt")
    at_most("prompt", len(prompt), max(config.max_prompts, most_ids))


def parse_body(schema: type[Model], body: dict[str, Any]) -> Model:
    """Raises InvalidParams naming each field at fault."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise invalid_fields(error, body) from error


def listed(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """A page of a list as OpenAI's API shows it; `more`: another page follows."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


def json_response(content: dict[str, Any]) -> Response:
    return Response(encoded(content), media_type="application/json")
