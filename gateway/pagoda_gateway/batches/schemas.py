"""Bodies, queries and answers of OpenAI's files and batches."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from pagoda_gateway.api.answer_schemas import Answered
from pagoda_gateway.api.body import Body, Id, Number, Query

KEPT_S = (3600, 30 * 86400)
MAX_FILES_LISTED, MAX_BATCHES_LISTED = 10_000, 100
MAX_METADATA = 16
KeptS = Annotated[int, Field(ge=KEPT_S[0], le=KEPT_S[1])]
Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
]


class FilesQuery(Query):
    purpose: Literal["batch", "batch_output"] | None = None
    limit: Annotated[int, Number, Field(ge=1, le=MAX_FILES_LISTED)] = MAX_FILES_LISTED
    order: Literal["asc", "desc"] = "desc"


class BatchesQuery(Query):
    limit: Annotated[int, Number, Field(ge=1, le=MAX_BATCHES_LISTED)] = 20


class FileForm(BaseModel):
    """The fields of an upload beside the `file`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    media_type: ClassVar[str] = "multipart/form-data"
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = Field(None, alias="expires_after[anchor]")
    seconds: Annotated[KeptS, Number] | None = Field(None, alias="expires_after[seconds]")


class UploadBody(FileForm):
    """The same with the file, for the OpenAPI description."""

    file: str = Field(json_schema_extra={"format": "binary"})


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: KeptS


class BatchRequest(Body):
    input_file_id: Id
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class NoBody(Body):
    """The body of a request whose path says everything."""


class FileObject(Answered):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(Answered):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Answered):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchError(Answered):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(Answered):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Answered):
    total: int
    completed: int
    failed: int


class BatchObject(Answered):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Answered):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
