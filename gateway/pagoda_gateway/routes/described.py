"""Describes routes that parse and render their own bodies in /openapi.json."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, ItemsView
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from pagoda_gateway.api.answer_schemas import ErrorAnswer, Failure

JSON = "application/json"
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])


def endpoint(
    routes: APIRouter,
    path: str,
    summary: str,
    answer: type[BaseModel] | None,
    *,
    request: type[BaseModel] | None = None,
    unavailable: type[BaseModel] | None = ErrorAnswer,
    **options: Any,
) -> Callable[[Handler], Handler]:
    """Decorate the route's handler. `options` are FastAPI's, plus `method`, which defaults to POST for a route with a
    request body and to GET for others."""
    method = options.pop("method", "GET" if request is None else "POST")
    extra = _Later(partial(_described, path.replace(":path", ""), method.lower(), request, answer, unavailable))
    return routes.api_route(
        path, methods=[method], response_model=None, summary=summary, openapi_extra=extra, **options
    )


class Document:
    """/openapi.json, written once, on first request, in a thread: it takes longer than a token may be delayed."""

    def __init__(self, api: FastAPI) -> None:
        self._api = api
        self._writing = asyncio.Lock()
        self._text = b""

    async def answer(self, request: Request) -> Response:
        async with self._writing:
            self._text = self._text or await asyncio.to_thread(self._write)
        return Response(self._text, media_type=JSON)

    def _write(self) -> bytes:
        try:
            return json.dumps(self._api.openapi(), ensure_ascii=False, separators=(",", ":")).encode()
        finally:  # only the text is needed: keep the rest out of every future garbage collection
            self._api.openapi_schema = None


class _Later(dict[str, Any]):
    """What FastAPI adds to an operation, built only when read: it was a fifth of a gateway's startup time."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._make = make

    def __bool__(self) -> bool:
        return True

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # dict's own type of them cannot be made
        return self._make().items()


def _described(
    path: str,
    method: str,
    request: type[BaseModel] | None,
    answer: type[BaseModel] | None,
    unavailable: type[BaseModel] | None,
) -> dict[str, Any]:
    """The parts of an operation that FastAPI cannot know; references point into the document itself.

    Args:
        path: The route's own.
        answer: Schema of status 200; None for an answer without a JSON body.
        unavailable: Schema of status 503; if it is a `Failure`, all other errors have it too.
    """
    place = f"#/paths/{path.replace('~', '~0').replace('/', '~1')}/{method}"
    failure = unavailable if unavailable is not None and issubclass(unavailable, Failure) else ErrorAnswer
    answers = {"200": (answer, "the answer"), "503": (unavailable, "not now; it may go on later")}
    if request is not None or "{" in path:
        answers["4XX"] = (failure, "the request is at fault")
    answers["5XX"] = (failure, "the server is at fault")
    found: dict[str, Any] = {"responses": {}}
    for status, (schema, why) in answers.items():
        found["responses"][status] = {"description": why}
        if schema is not None:
            found["responses"][status] |= _content(schema, f"{place}/responses/{status}")
    if request is not None:
        kind = getattr(request, "media_type", JSON)
        found["requestBody"] = {"required": True, **_content(request, f"{place}/requestBody", kind)}
    return found


def _content(schema: type[BaseModel], place: str, kind: str = JSON) -> dict[str, Any]:
    where = place.replace("{", "{{").replace("}", "}}") + f"/content/{kind.replace('/', '~1')}/schema/$defs/{{model}}"
    return {"content": {kind: {"schema": schema.model_json_schema(ref_template=where)}}}
