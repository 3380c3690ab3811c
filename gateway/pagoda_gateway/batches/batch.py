"""The state of a batch, and the only transitions it may make. Pure: the caller passes the time.

A transition that comes too late changes nothing: its caller had not seen that others have moved the batch on.

validating ─▶ in_progress ─▶ finalizing ─▶ completed
    │              │             ├───────▶ expired
    ▼              ▼             ├───────▶ failed (its input went away)
  failed       cancelling ───────┴───────▶ cancelled
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from pagoda_gateway.batches.files import new_file_id
from pagoda_proto.errors import ErrorCode, PagodaError

WINDOW, WINDOW_S = "24h", 24 * 3600


class Status(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ANSWERING = frozenset({Status.VALIDATING, Status.IN_PROGRESS, Status.CANCELLING})
ENDED = frozenset({Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED})


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a batch failed. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Times are in Unix seconds. `model` is the served name, "" until the input has been read; `ending` is its status
    once its files are written. The files' ids are fixed from the start, so that every gateway writes the same ones.
    """

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    output_id: str
    errors_id: str
    output_kept_s: int
    metadata: dict[str, str] | None = None
    model: str = ""
    status: Status = Status.VALIDATING
    ending: Status | None = None
    faults: tuple[Fault, ...] = ()
    counts: Counts = Counts()
    in_progress_at: int | None = None
    cancelling_at: int | None = None
    finalizing_at: int | None = None
    ended_at: int | None = None

    def has_ended(self) -> bool:
        return self.status in ENDED


def results_log(batch_id: str) -> str:
    return f"batch.{batch_id}"


def new_batch(
    endpoint: str, input_file_id: str, metadata: Mapping[str, str] | None, output_kept_s: int, now: float
) -> Batch:
    return Batch(
        id=f"batch_{secrets.token_hex(16)}",
        endpoint=endpoint,
        input_file_id=input_file_id,
        created_at=int(now),
        expires_at=int(now) + WINDOW_S,
        output_id=new_file_id(),
        errors_id=new_file_id(),
        output_kept_s=output_kept_s,
        metadata=None if metadata is None else dict(metadata),
    )


def begun(batch: Batch, model: str, total: int, now: float) -> Batch:
    """Its input is valid. A batch that is being cancelled stays in that status."""
    if batch.status not in ANSWERING or batch.in_progress_at is not None:
        return batch
    status = Status.IN_PROGRESS if batch.status is Status.VALIDATING else batch.status
    return _with(batch, model=model, status=status, counts=Counts(total), in_progress_at=int(now))


def refused(batch: Batch, faults: Sequence[Fault], now: float) -> Batch:
    """Its input is invalid; no line was answered."""
    if batch.status not in ANSWERING or batch.in_progress_at is not None:
        return batch
    return _with(batch, status=Status.FAILED, faults=tuple(faults), ended_at=int(now))


def cancelling(batch: Batch, now: float) -> Batch:
    """Raises PagodaError if it is too late."""
    if batch.status not in ANSWERING:
        why = f"a batch that is {batch.status} cannot be cancelled"
        raise PagodaError(ErrorCode.INVALID_ARGUMENT, why, "batch_id")
    if batch.status is Status.CANCELLING:
        return batch
    return _with(batch, status=Status.CANCELLING, cancelling_at=int(now))


def counted(batch: Batch, counts: Counts) -> Batch:
    """Update the counts so far."""
    return _with(batch, counts=counts) if batch.status in ANSWERING else batch


def finalizing(batch: Batch, ending: Status, counts: Counts, now: float, faults: Sequence[Fault] = ()) -> Batch:
    """No more lines will be answered; its files are about to be written."""
    if batch.status not in ANSWERING:
        return batch
    return _with(
        batch, status=Status.FINALIZING, ending=ending, counts=counts, finalizing_at=int(now), faults=tuple(faults)
    )


def ended(batch: Batch, now: float) -> Batch:
    """Its files are written."""
    if batch.status is not Status.FINALIZING or batch.ending is None:
        return batch
    return _with(batch, status=batch.ending, ended_at=int(now))


def _with(batch: Batch, **fields: Any) -> Batch:
    return msgspec.structs.replace(batch, **fields)


def shown(batch: Batch) -> dict[str, Any]:
    """As OpenAI's API shows it."""
    faults = [{"code": f.code, "line": f.line, "message": f.message, "param": f.param} for f in batch.faults]
    counts, finished = batch.counts, batch.has_ended() and batch.finalizing_at is not None
    times = {f"{status}_at": batch.ended_at if batch.status is status else None for status in sorted(ENDED)}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or None,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": batch.input_file_id,
        "completion_window": WINDOW,
        "status": batch.status.value,
        "output_file_id": batch.output_id if finished and counts.completed else None,
        "error_file_id": batch.errors_id if finished and counts.failed else None,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "cancelling_at": batch.cancelling_at,
        **times,
        "request_counts": msgspec.to_builtins(counts),
        "metadata": batch.metadata,
    }
