"""Files over HTTP, behind the limits middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.fakes_engine import make_gateway
from tests.gateway.http_fakes import error_code, running_http, talk

from pagoda_gateway.batches.schemas import FileDeleted, FileList, FileObject
from pagoda_gateway.clients import identify_by
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.http.limits import LimitsMiddleware
from pagoda_gateway.http.multipart import MAX_FORM_BYTES
from pagoda_gateway.routes import files
from pagoda_gateway.store.interface import unavailable
from pagoda_proto import times

KEYS = {"one": "key-of-tenant-one", "two": "key-of-tenant-two"}
MAX_BYTES = 100_000
LINES = b'{"custom_id": "a"}\n' * 4000


class Served:
    """The routes behind their limits, with a client for each tenant."""

    def __init__(self, root: Path, **config: Any) -> None:
        fields = {"max_file_bytes": MAX_BYTES, "max_files_bytes": 4 * MAX_BYTES, "api_key": ",".join(KEYS.values())}
        gateway = make_gateway(root, **fields | config)
        self.config: GatewayConfig = gateway.context.config
        uploads = {files.PATH: self.config.max_file_bytes + MAX_FORM_BYTES}
        self.store: Any = gateway.context.store
        identify = identify_by(self.config.forwarded_allow_ips, gateway.context.gate)
        self.app = LimitsMiddleware(
            gateway.asgi, self.config, gateway.context.memory, identify, gateway.context.quotas, uploads
        )

    def client(self, name: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {KEYS[name]}"}
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://gateway/v1", headers=headers)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = Served(tmp_path)
    yield served
    await served.store.aclose()


async def upload(client: httpx.AsyncClient, content: bytes = LINES, **fields: str) -> httpx.Response:
    return await client.post("/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"} | fields)


async def test_what_was_uploaded_is_what_comes_back(served: Served) -> None:
    async with served.client("one") as client:
        answer = await upload(client)
        assert answer.status_code == 200, answer.text
        file = FileObject.model_validate(answer.json()).model_dump()
        assert (file["bytes"], file["filename"], file["purpose"]) == (len(LINES), "lines.jsonl", "batch")
        assert file["expires_at"] == file["created_at"] + times.KEPT_S
        assert (await client.get(f"/files/{file['id']}")).json() == file
        content = await client.get(f"/files/{file['id']}/content")
        assert content.content == LINES
        assert content.headers["content-length"] == str(len(LINES))
        listing = FileList.model_validate((await client.get("/files")).json())
        assert [one.model_dump() for one in listing.data] == [file]
        assert (listing.first_id, listing.last_id, listing.has_more) == (file["id"], file["id"], False)
        gone = FileDeleted.model_validate((await client.delete(f"/files/{file['id']}")).json())
        assert (gone.id, gone.deleted) == (file["id"], True)
        for path in (f"/files/{file['id']}", f"/files/{file['id']}/content"):
            answer = await client.get(path)
            assert (answer.status_code, error_code(answer.content)) == (404, "not_found")
        assert (await client.delete(f"/files/{file['id']}")).status_code == 404


async def test_a_file_is_its_keys_own(served: Served) -> None:
    async with served.client("one") as one, served.client("two") as two:
        file_id = (await upload(one)).json()["id"]
        for path in (f"/files/{file_id}", f"/files/{file_id}/content", f"/files?after={file_id}"):
            assert (await one.get(path)).status_code == 200
            assert (await two.get(path)).status_code == 404
        assert (await two.delete(f"/files/{file_id}")).status_code == 404
        assert (await two.get("/files")).json()["data"] == []
        assert len((await one.get("/files")).json()["data"]) == 1


async def test_listing_goes_on_after_what_was_seen(served: Served) -> None:
    async with served.client("one") as client:
        ids = [(await upload(client, b"x")).json()["id"] for _ in range(3)]
        page = (await client.get("/files?limit=2")).json()
        assert [one["id"] for one in page["data"]] == [ids[2], ids[1]]
        assert page["has_more"]
        rest = (await client.get(f"/files?limit=2&after={page['last_id']}")).json()
        assert [one["id"] for one in rest["data"]] == [ids[0]]
        assert not rest["has_more"]
        oldest = (await client.get("/files?order=asc&limit=1&purpose=batch")).json()
        assert oldest["data"][0]["id"] == ids[0]
        assert (await client.get("/files?purpose=batch_output")).json()["data"] == []


@pytest.mark.parametrize("seconds", ["3600", "2592000"])
async def test_a_client_says_how_long_a_file_is_kept(served: Served, seconds: str) -> None:
    expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
    async with served.client("one") as client:
        file = (await upload(client, **expiry)).json()
        assert file["expires_at"] - file["created_at"] == int(seconds)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": ""}, "purpose"),
        ({"colour": "red"}, "colour"),
        ({"expires_after[anchor]": "created_at"}, "expires_after"),
        ({"expires_after[seconds]": "3600"}, "expires_after"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}, "expires_after[seconds]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "1e9"}, "expires_after[seconds]"),
    ],
)
async def test_a_bad_field_is_a_400_that_names_it_and_nothing_is_kept(
    served: Served, fields: dict[str, str], param: str
) -> None:
    async with served.client("one") as client:
        answer = await upload(client, **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert not (await served.store.page("files", "", limit=1)).records
        assert (await client.get("/files")).json()["data"] == []


async def test_an_empty_file_and_none_at_all_are_refused(served: Served) -> None:
    async with served.client("one") as client:
        assert (await upload(client, b"")).status_code == 400
        answer = await client.post("/files", files={"purpose": (None, "batch")})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
        answer = await client.post("/files", json={"purpose": "batch"})
        assert answer.status_code == 415


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=10001", "order=up", "purpose=vision", "before=x"])
async def test_a_bad_query_is_a_400_that_names_it(served: Served, query: str) -> None:
    async with served.client("one") as client:
        answer = await client.get(f"/files?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])
        assert (await client.get("/files?limit=1&limit=2")).status_code == 400


async def test_sec_20_an_upload_is_bounded_alone_and_together(served: Served) -> None:
    async with served.client("one") as client:
        for content in (bytes(MAX_BYTES + 1), bytes(MAX_BYTES + MAX_FORM_BYTES)):
            answer = await upload(client, content)
            assert (answer.status_code, error_code(answer.content)) == (413, "request_too_large")
        statuses = [(await upload(client, bytes(MAX_BYTES))).status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 200, 413]
        file_id = (await client.get("/files")).json()["first_id"]
        await client.delete(f"/files/{file_id}")
        assert (await upload(client, bytes(MAX_BYTES))).status_code == 200


async def test_a_store_that_is_gone_is_a_503_that_says_when(served: Served) -> None:
    async def gone(*args: Any, **kwargs: Any) -> Any:
        raise unavailable("/secret/path", 3.0)

    async with served.client("one") as client:
        file_id = (await upload(client)).json()["id"]
        served.store.get = served.store.put = served.store.page = served.store.delete = gone
        answers = [
            await upload(client),
            await client.get("/files"),
            await client.get(f"/files/{file_id}"),
            await client.get(f"/files/{file_id}/content"),
            await client.delete(f"/files/{file_id}"),
        ]
        for answer in answers:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
            assert "secret" not in answer.text


async def test_an_upload_that_stops_is_ended_and_leaves_nothing(tmp_path: Path) -> None:
    served = Served(tmp_path, body_timeout_s=0.3, api_key="")
    async with running_http(served.app, served.config) as running:
        head = b"POST /v1/files HTTP/1.1\r\nhost: h\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        begun = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nsome'
        status, headers, body = await talk(running.port, head + b"content-length: 5000\r\n\r\n" + begun)
        assert (status, error_code(body), headers["connection"]) == (408, "request_timeout", "close")
        too_long = head + b"content-length: 99999999\r\n\r\n" + begun
        status, headers, body = await talk(running.port, too_long)
        assert (status, error_code(body)) == (413, "request_too_large")
        page = await served.store.page("files", "", limit=1)
        assert not page.records
    await served.store.aclose()


async def test_a_refusal_is_heard_over_an_upload_that_goes_on(tmp_path: Path) -> None:
    served = Served(tmp_path, api_key="")
    async with running_http(served.app, served.config) as running:
        head = "POST /v1/files HTTP/1.1\r\nhost: h\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        chunks = b"".join(b"ffff\r\n" + bytes(0xFFFF) + b"\r\n" for _ in range(40)) + b"0\r\n\r\n"
        form = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        begun = f"{head}transfer-encoding: chunked\r\n\r\n{len(form):x}\r\n".encode() + form + b"\r\n"
        status, headers, body = await talk(running.port, begun + chunks)
        assert (status, error_code(body), headers["connection"]) == (413, "request_too_large", "close")
    await served.store.aclose()
