"""What keys may do, route by route, and how an admin creates them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
from tests.gateway.fakes_engine import MODEL, play
from tests.gateway.http_fakes import error_code
from tests.gateway.keys.whole_app import ADMIN, App, running_app

from pagoda_gateway.api.accounts.schemas import KeyList, KeyObject, NewKeyObject
from pagoda_gateway.clients import OPEN_PATHS
from pagoda_gateway.keys.grants import Role
from pagoda_gateway.routes.accounts.keys import PATH

BESIDES = ["/nothing/here", "/v1", "/v1/admin", "/v1/admin/anything", "/metrics/", "/health/x", "/healthz"]
ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
GENERATING = {
    "/v1/chat/completions": ASK,
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": ASK | {"model": MODEL},
    "/v1/responses": {"input": "hello"},
    "/v1/messages/count_tokens": {"messages": ASK["messages"], "model": MODEL},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [72]},
}


def places(app: App) -> list[tuple[str, str]]:
    """Every method of every route, and some paths without a route."""
    found: list[tuple[str, str]] = []
    for route in app.routes():
        path = re.sub("{[^}]*}", "x", route.path)
        found += [(method, path) for method in (*(route.methods or ()), "OPTIONS", "BREW")]
    assert len(found) > 60
    return found + [(method, path) for path in BESIDES for method in ("GET", "POST", "OPTIONS")]


async def statuses(client: httpx.AsyncClient, asked: list[tuple[str, str]]) -> dict[tuple[str, str], int]:
    return {place: (await client.request(*place, content=b"{}")).status_code for place in asked}


def below(path: str, place: str) -> bool:
    return f"{path}/".startswith(f"{place}/")


async def test_sec_22_every_route_asks_for_a_key_and_some_for_one_of_a_role(tmp_path: Path) -> None:
    async with running_app(tmp_path, admin_api_key="") as app:
        client_key, client = await app.new_key()
        _, monitor = await app.new_key(role=Role.MONITOR)
        _, admin = await app.new_key(role=Role.ADMIN)
        asked = places(app)
        shut = {place for place in asked if place[1] not in OPEN_PATHS}
        for nobody in (app.client(), app.client("none"), app.client(client_key.shown), app.client(client_key.id)):
            found = await statuses(nobody, asked)
            assert {place for place, status in found.items() if status == 401} == shut
        found = await statuses(client, asked)
        admins = {place for place in asked if below(place[1], "/v1/admin") or below(place[1], "/metrics")}
        assert {place for place, status in found.items() if status in (401, 403)} == admins
        assert {found[place] for place in admins} == {403}
        found = await statuses(monitor, asked)
        watched = [place for place in shut if any(below(place[1], at) for at in ("/metrics", "/load", "/version"))]
        assert {place for place, status in found.items() if status == 403} == shut - {*watched}
        assert not {*(await statuses(admin, asked)).values()} & {401, 403}


async def test_nobody_makes_the_first_key_of_an_open_server(tmp_path: Path) -> None:
    async with running_app(tmp_path, admin_api_key="") as app:
        for method in ("GET", "POST", "DELETE"):
            answer = await app.client().request(method, PATH, content=b"{}")
            assert (answer.status_code, error_code(answer.content)) == (403, "insufficient_permissions")
        assert (await app.client().get("/metrics")).status_code == 200


async def test_an_admin_makes_keys_lists_them_and_takes_them_back(tmp_path: Path) -> None:
    async with running_app(tmp_path) as app:
        asked = {
            "name": "Ann",
            "models": [MODEL],
            "limits": {"requests_per_minute": 9},
            "weight": 5,
            "expires_at": 2**35,
        }
        answer = await app.admin.post(PATH, json=asked)
        assert answer.headers["cache-control"] == "no-store"
        made = NewKeyObject.model_validate(answer.json())
        assert (made.name, made.models, made.role, made.state, made.weight) == ("Ann", [MODEL], "client", "active", 5)
        secret = made.value[-43:]
        client = app.client(made.value)
        answer = await client.get("/v1/models")
        assert (answer.status_code, answer.headers["x-ratelimit-limit-requests"]) == (200, "9")
        for i in range(3):
            await app.admin.post(PATH, json={"name": f"n{i}", "role": "monitor"})
        first = KeyList.model_validate((await app.admin.get(PATH, params={"limit": 2})).json())
        rest = KeyList.model_validate((await app.admin.get(PATH, params={"after": first.last_id})).json())
        assert [one.name for one in first.data + rest.data] == ["n2", "n1", "n0", "Ann"]
        assert (first.has_more, rest.has_more) == (True, False)
        one = await app.admin.get(f"{PATH}/{made.id}")
        assert KeyObject.model_validate(one.json()).redacted_value == f"sk-pagoda-{made.id[4:]}-.."
        revoked = KeyObject.model_validate((await app.admin.delete(f"{PATH}/{made.id}")).json())
        assert revoked.state == "revoked"
        for text in (one.text, str(first), str(rest), str(revoked)):
            assert secret not in text
            assert "digest" not in text


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({}, "name"),
    ({"name": "x" * 65}, "name"),
    ({"name": "a", "role": "root"}, "role"),
    ({"name": "a", "models": []}, "models"),
    ({"name": "a", "limits": {"tokens_per_minute": -1}}, "limits.tokens_per_minute"),
    ({"name": "a", "limits": {"tokens_per_hour": 1}}, "limits.tokens_per_hour"),
    ({"name": "a", "weight": 0}, "weight"),
    ({"name": "a", "expires_at": 1}, "expires_at"),
    ({"name": "a", "adapters": []}, "adapters"),
    ({"name": "a", "id": "key_0123456789abcdef"}, "id"),
]
BAD_QUERIES = ["limit=0", "limit=101", "limit=x", "order=up", "page=2", "limit=1&limit=2"]


async def test_what_is_wrong_is_a_400_that_names_it(tmp_path: Path) -> None:
    async with running_app(tmp_path) as app:
        for fields, param in BAD_FIELDS:
            answer = await app.admin.post(PATH, json=fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await app.admin.get(PATH)).json()["data"] == []
        for query in BAD_QUERIES:
            answer = await app.admin.get(f"{PATH}?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_what_is_no_key_is_not_found(tmp_path: Path) -> None:
    async with running_app(tmp_path) as app:
        for key_id in ("key_0123456789abcdef", "x", "key_'%20OR%201=1"):
            for method in ("GET", "DELETE"):
                answer = await app.admin.request(method, f"{PATH}/{key_id}")
                assert (answer.status_code, error_code(answer.content)) == (404, "not_found")


async def test_a_model_that_a_key_may_not_use_does_not_exist_for_it(tmp_path: Path) -> None:
    async with running_app(tmp_path, play([72])) as app:
        for models, status in ((("other",), 404), ((MODEL,), 200), (None, 200)):
            _, client = await app.new_key(models=models)
            for path, body in GENERATING.items():
                for named in ({}, {"model": MODEL}):
                    answer = await client.post(path, json=body | named)
                    assert answer.status_code == status, answer.text
                    assert status == 200 or "this server has none for this API key" in answer.text
                absent = await client.post(path, json=body | {"model": "absent"})
                assert absent.status_code == 404
            listed = (await client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ([MODEL] if status == 200 else [])
            assert (await client.get("/stack")).json()["models"] == [model["id"] for model in listed]
            assert (await client.get(f"/v1/models/{MODEL}")).status_code == status


async def test_keys_of_both_options_are_told_apart(tmp_path: Path) -> None:
    async with running_app(tmp_path, api_key="key-of-a-client") as app:
        client = app.client("key-of-a-client")
        assert [(await client.get(path)).status_code for path in ("/v1/models", "/metrics", PATH)] == [200, 403, 403]
        assert [(await app.admin.get(path)).status_code for path in ("/v1/models", "/metrics", PATH)] == [200] * 3
        both = {"authorization": f"Bearer {ADMIN}", "x-api-key": "key-of-a-client"}
        assert (await app.client().get("/v1/models", headers=both)).status_code == 401
