"""Recomputes a transcript with the model in this process: the same records in, their outcomes out."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from pagoda.offline.local import Local
from pagoda_gateway.generation.job import Job, Shown
from pagoda_gateway.generation.transcripts import Outcomes, Transcript, TranscriptPart, part_of, transcript_of
from pagoda_gateway.generation.updates import ChoiceReader
from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import check_for_model
from pagoda_proto.records import Begun, Delta, FinishReason, RequestRecord
from pagoda_proto.steps import TopLogprobs


class ReplayedRequest:
    """A request in this process, parsed as the gateway parses it; see `OfflineRequest`."""

    def __init__(self, record: RequestRecord, local: Local, shown: Shown) -> None:
        self.record = record
        self.error: PagodaError | None = None
        self.ended = False
        self._outcomes = Outcomes()
        self._choices = [ChoiceReader(i, local.text, record, shown.how) for i in range(record.task.params.n)]
        self._prompt_logprobs: list[TopLogprobs] = []
        self._begun = Begun(model_fingerprint="", numerics_id="")

    @property
    def output(self) -> TranscriptPart:
        choices = [self._outcomes.choice(each.index) for each in self._choices]
        return part_of(self.record, self._begun, choices, self._prompt_logprobs)

    def take(self, delta: Delta) -> int | None:
        choice = self._choices[delta.choice]
        self._begun = delta.tokens.begun or self._begun
        self._prompt_logprobs += delta.tokens.prompt_logprobs or ()
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT) and not choice.text.finished:
            self.error = PagodaError(
                delta.error_code or ErrorCode.CANCELLED, delta.error_message or "the request was aborted"
            )
        stopped = False
        if not choice.text.finished and self.error is None:
            self._outcomes.take(choice.read(delta))
            stopped = choice.text.finished and delta.finish_reason is None
        if self._outcomes.too_many:
            self.error = PagodaError(ErrorCode.REQUEST_TOO_LARGE, "the request is too large for a transcript")
        self.ended = delta.ends_request or self.error is not None
        return delta.choice if stopped else None


def replayed(local: Local, run: Callable[[list[Any]], list[Any]], kept: Transcript) -> Transcript:
    """Recompute `kept` here. `run` runs requests to completion.

    Raises:
        PagodaError: it does not fit the model, or failed.
    """
    shown, adapter = Shown(how=kept.how), local.adapter_of(kept.adapter) if kept.adapter else None
    records = tuple(_record(part.record, local, adapter) for part in kept.parts)
    parts = run([ReplayedRequest(record, local, shown) for record in records])
    job = Job(id=kept.id, created=kept.created, model=kept.model, records=records, shown=shown)
    return transcript_of(job, parts)


def _record(kept: RequestRecord, local: Local, adapter: Adapter | None) -> RequestRecord:
    """Raises PagodaError."""
    check_for_model(kept.task.params, kept.prompt_token_ids, local.limits)
    return msgspec.structs.replace(kept, request_id=secrets.token_hex(16), adapter=adapter)
