"""When and in which thread /openapi.json is made; the routes' tests check its contents."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.responses import Response

from pagoda_gateway.routes.described import Document, endpoint


class Answer(BaseModel):
    number: int


class Schemas:
    """Records the threads that ask for the document's parts."""

    def __init__(self, monkeypatch: Any) -> None:
        self.threads: list[int] = []
        of = Answer.model_json_schema

        def noted(**options: Any) -> dict[str, Any]:
            self.threads.append(threading.get_ident())
            return of(**options)

        monkeypatch.setattr(Answer, "model_json_schema", noted)


def an_app(path: str) -> FastAPI:
    routes = APIRouter()

    @endpoint(routes, path, "a number", Answer, unavailable=None)
    async def number() -> Response:
        return Response(b"{}")

    api = FastAPI(openapi_url=None)
    api.add_route("/openapi.json", Document(api).answer)
    api.include_router(routes)
    return api


async def test_the_document_is_made_once_by_a_thread_when_it_is_asked_for(monkeypatch: Any) -> None:
    schemas = Schemas(monkeypatch)
    api = an_app("/made/once")
    transport = httpx.ASGITransport(app=api)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        await client.get("/made/once")
        assert schemas.threads == []
        answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(8)))
    assert len(schemas.threads) == 1
    assert schemas.threads[0] != threading.get_ident()
    assert {answer.headers["content-type"] for answer in answers} == {"application/json"}
    described = answers[0].json()["paths"]["/made/once"]["get"]["responses"]["200"]
    assert described["content"]["application/json"]["schema"]["properties"]["number"] == {
        "title": "Number",
        "type": "integer",
    }
    assert len({answer.content for answer in answers}) == 1
