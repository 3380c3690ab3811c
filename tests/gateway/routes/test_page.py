"""GET /: files as they are, cached by browsers until they change, under a policy that allows nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from pagoda_gateway.page import files
from pagoda_gateway.routes import page


@pytest.fixture
def client() -> AsyncClient:
    app = FastAPI()
    app.include_router(page.router())
    return AsyncClient(transport=ASGITransport(app=app), base_url="http://gateway")


@pytest.mark.parametrize("path", sorted(files.PATHS))
async def test_a_file_comes_as_it_is_and_under_the_policy(client: AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code == 200
    name = "index.html" if path == "/" else path.removeprefix("/page/")
    assert answer.content == (Path(files.__file__).parent / name).read_bytes()
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].partition(";")[0] == kinds[name.rpartition(".")[2]]
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'",
        "img-src": "'self' data:", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip


@pytest.mark.parametrize("known", ["{0}", "W/{0}", '"other", {0}', "*"])
async def test_a_file_that_is_known_is_not_sent_again(client: AsyncClient, known: str) -> None:
    first = await client.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = await client.get("/page/main.js", headers={"if-none-match": known.format(first.headers["etag"])})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert (await client.get("/page/chat.js", headers={"if-none-match": first.headers["etag"]})).status_code == 200


async def test_heads_are_those_of_the_files(client: AsyncClient) -> None:
    whole, head = await client.get("/"), await client.head("/")
    assert head.headers["content-length"] == str(len(whole.content))
    assert head.headers["etag"] == whole.headers["etag"]


@pytest.mark.parametrize("name", ["nothing.js", "__init__.py", "files.py", "..%2ffiles.py", "", "index.html"])
async def test_a_path_names_a_file_of_the_page_or_nothing(client: AsyncClient, name: str) -> None:
    assert (await client.get(f"/page/{name}")).status_code == 404
