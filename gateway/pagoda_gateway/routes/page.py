"""GET / and the files of its page. They need no key, as they reveal nothing; the API calls they make do need one."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pagoda_gateway.page import files
from pagoda_gateway.page.files import PageFile

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # cached, and revalidated by ETag
}


def router() -> APIRouter:
    routes = APIRouter()
    found = files.load()

    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    @routes.api_route(files.PLACE + "{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        file = found.get(request.scope["path"])
        if file is None:
            raise HTTPException(404)
        return _answer(file, request.headers.get("if-none-match", ""))

    return routes


def _answer(file: PageFile, known: str) -> Response:
    headers = HEADERS | {"etag": file.etag}
    tags = {tag.strip().removeprefix("W/") for tag in known.split(",")}
    if tags & {file.etag, "*"}:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)
