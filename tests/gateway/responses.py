"""Helpers that send /v1/responses requests to a test's gateway and parse its answers."""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.fakes_engine import MODEL, Gateway

from pagoda_gateway.api.responses_answers import ResponseAnswer

PATH = "/v1/responses"


async def post(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(PATH, json={"model": MODEL, "input": "hello"} | fields)
    assert response.status_code == 200, response.text
    ResponseAnswer.model_validate(response.json())
    return response.json()


async def get(gateway: Gateway, path: str, **query: Any) -> dict[str, Any]:
    response = await gateway.client.get(f"{PATH}/{path}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(stream: str) -> list[dict[str, Any]]:
    """The events in a stream's text; checks that each is named by its type, and numbered."""
    events = []
    for block in filter(None, stream.split("\n\n")):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    first = events[0]["sequence_number"]
    assert [one["sequence_number"] for one in events] == list(range(first, first + len(events)))
    return events


async def stream(gateway: Gateway, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "input": "hello", "stream": True} | fields
    response = await gateway.client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


async def refusal(gateway: Gateway, status: int = 400, method: str = "POST", path: str = "", **fields: Any) -> Any:
    sent = {"json": {"model": MODEL, "input": "hello"} | fields} if method == "POST" else {"params": fields}
    response = await gateway.client.request(method, PATH + path, **sent)
    assert response.status_code == status, response.text
    return response.json()["error"]
