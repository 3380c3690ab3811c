"""OpenAI's files: upload streamed into the store, listing, content, deletion."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from pagoda_gateway.batches.files import FileInfo, FileLimits, Files, Upload
from pagoda_gateway.batches.schemas import FileDeleted, FileForm, FileList, FileObject, FilesQuery, UploadBody
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.http.multipart import UploadForm
from pagoda_gateway.http.sse import ClientGone
from pagoda_gateway.routes.body import caller_of, hold_for, json_response, listed, parse_body, query_of
from pagoda_gateway.routes.described import endpoint
from pagoda_gateway.store.interface import MAX_PART_BYTES
from pagoda_proto import times
from pagoda_proto.errors import InvalidParams, PagodaError, Problem

PATH = "/v1/files"


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter(tags=["files"])
    files = files_of(ctx)
    _add_upload(routes, files)
    _add_list(routes, files)
    _add_one(routes, files)
    return routes


def files_of(ctx: GatewayContext) -> Files:
    return Files(ctx.store, FileLimits(ctx.config.max_file_bytes, ctx.config.max_files_bytes))


def _add_upload(routes: APIRouter, files: Files) -> None:
    @endpoint(routes, PATH, "Upload a file of requests", FileObject, request=UploadBody)
    async def create_file(request: Request) -> Response:
        hold_for(request, 2 * MAX_PART_BYTES)
        form = UploadForm(request.headers.get("content-type", ""))
        length = request.headers.get("content-length", "")
        upload = await files.begin(caller_of(request).tenant, int(length) if length.isdigit() else None)
        try:
            info = await _received(request, form, upload)
        except BaseException as error:
            with contextlib.suppress(PagodaError):
                await upload.discard()
            if isinstance(error, ClientDisconnect):
                raise ClientGone from None
            raise
        return json_response(_shown(info))


async def _received(request: Request, form: UploadForm, upload: Upload) -> FileInfo:
    async for data in request.stream():
        await upload.write(form.feed(data))
    form.close()
    asked = parse_body(FileForm, dict(form.fields))
    if (asked.anchor is None) != (asked.seconds is None):
        raise InvalidParams([Problem("expires_after", "must have an anchor, created_at, and seconds")])
    if not upload.num_bytes:
        raise InvalidParams([Problem("file", "is empty")])
    kept_s = times.KEPT_S if asked.seconds is None else asked.seconds
    return await upload.finish(form.filename or "", asked.purpose, kept_s)


def _add_list(routes: APIRouter, files: Files) -> None:
    @endpoint(routes, PATH, "Files", FileList)
    async def list_files(request: Request) -> Response:
        asked = query_of(request, FilesQuery)
        page = await files.page(
            caller_of(request).tenant,
            limit=asked.limit,
            after=asked.after,
            newest_first=asked.order == "desc",
            purpose=asked.purpose,
        )
        return json_response(listed([_shown(info) for info in page.files], page.more))


def _add_one(routes: APIRouter, files: Files) -> None:
    @endpoint(routes, f"{PATH}/{{file_id}}", "One file", FileObject)
    async def get_file(request: Request, file_id: str) -> Response:
        return json_response(_shown(await files.find(caller_of(request).tenant, file_id)))

    @endpoint(routes, f"{PATH}/{{file_id}}/content", "A file's content", None)
    async def get_content(request: Request, file_id: str) -> Response:
        info = await files.find(caller_of(request).tenant, file_id)
        hold_for(request, 2 * MAX_PART_BYTES)
        content = aiter(files.content(info))
        first = await anext(content)  # a failing store can still get a proper error response
        headers = {"content-length": str(info.bytes), "content-disposition": "attachment"}
        return StreamingResponse(_chained(first, content), media_type="application/octet-stream", headers=headers)

    @endpoint(routes, f"{PATH}/{{file_id}}", "Delete a file", FileDeleted, method="DELETE")
    async def delete_file(request: Request, file_id: str) -> Response:
        await files.delete(caller_of(request).tenant, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for data in rest:
        yield data


def _shown(info: FileInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "object": "file",
        "bytes": info.bytes,
        "created_at": info.created_at,
        "expires_at": info.expires_at,
        "filename": info.filename,
        "purpose": info.purpose,
        "status": "processed",
    }
