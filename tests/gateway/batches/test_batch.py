"""A batch's state transitions, and its form in OpenAI's API."""

from __future__ import annotations

import pytest
from openai.types import Batch as OpenAIBatch

from pagoda_gateway.batches import batch as states
from pagoda_gateway.batches.batch import WINDOW_S, Batch, Counts, Fault, Status, new_batch
from pagoda_gateway.batches.schemas import BatchObject
from pagoda_proto.errors import PagodaError

NEW = new_batch("/v1/completions", "file-1", {"a": "b"}, 3600, 1000.5)
BEGUN = states.begun(NEW, "m", 3, 1001.0)


def shown(batch: Batch) -> OpenAIBatch:
    content = states.shown(batch)
    BatchObject.model_validate(content)
    return OpenAIBatch.model_validate(content, strict=True)


def test_from_the_beginning_to_the_end() -> None:
    new = shown(NEW)
    assert (new.status, new.created_at, new.expires_at) == ("validating", 1000, 1000 + WINDOW_S)
    assert (new.metadata, new.endpoint, new.completion_window) == ({"a": "b"}, "/v1/completions", "24h")
    assert (new.output_file_id, new.error_file_id, new.errors) == (None, None, None)
    begun = shown(BEGUN)
    assert (begun.status, begun.in_progress_at, begun.model) == ("in_progress", 1001, "m")
    assert begun.request_counts is not None
    assert begun.request_counts.total == 3
    finalizing = states.finalizing(BEGUN, Status.COMPLETED, Counts(3, 2, 1), 1002.0)
    assert (shown(finalizing).status, shown(finalizing).output_file_id) == ("finalizing", None)
    ended = shown(states.ended(finalizing, 1003.0))
    assert (ended.status, ended.finalizing_at, ended.completed_at) == ("completed", 1002, 1003)
    assert (ended.output_file_id, ended.error_file_id) == (NEW.output_id, NEW.errors_id)


@pytest.mark.parametrize(("counts", "files"), [(Counts(3, 3, 0), (True, False)), (Counts(3, 0, 3), (False, True))])
def test_only_files_with_something_in_them_are_shown(counts: Counts, files: tuple[bool, bool]) -> None:
    ended = shown(states.ended(states.finalizing(BEGUN, Status.EXPIRED, counts, 1002.0), 1003.0))
    assert (ended.output_file_id is not None, ended.error_file_id is not None) == files
    assert (ended.status, ended.expired_at, ended.completed_at) == ("expired", 1003, None)


def test_a_batch_that_was_refused_says_why() -> None:
    failed = shown(states.refused(NEW, [Fault("invalid_json_line", "no JSON", 7)], 1001.0))
    assert (failed.status, failed.failed_at) == ("failed", 1001)
    assert failed.errors is not None
    assert failed.errors.data is not None
    assert (failed.errors.data[0].code, failed.errors.data[0].line) == ("invalid_json_line", 7)


def test_cancelling_goes_with_everything_that_is_not_over() -> None:
    for batch in (NEW, BEGUN):
        cancelling = states.cancelling(batch, 1002.0)
        assert (shown(cancelling).status, shown(cancelling).cancelling_at) == ("cancelling", 1002)
        assert states.cancelling(cancelling, 1005.0) == cancelling
        assert states.begun(cancelling, "m", 3, 1003.0).status is Status.CANCELLING
    finalizing = states.finalizing(BEGUN, Status.CANCELLED, Counts(3, 2, 1), 1002.0)
    ended = states.ended(finalizing, 1004.0)
    assert (shown(ended).status, shown(ended).cancelled_at) == ("cancelled", 1004)
    for batch in (finalizing, ended):
        with pytest.raises(PagodaError, match="cannot be cancelled"):
            states.cancelling(batch, 1005.0)


def test_what_comes_too_late_changes_nothing() -> None:
    finalizing = states.finalizing(BEGUN, Status.COMPLETED, Counts(3, 3, 0), 1002.0)
    ended = states.ended(finalizing, 1003.0)
    failed = states.refused(NEW, [Fault("empty_file", "no lines")], 1001.0)
    for batch in (finalizing, ended, failed):
        assert states.begun(batch, "other", 9, 1009.0) == batch
        assert states.refused(batch, [], 1009.0) == batch
        assert states.counted(batch, Counts(3, 1, 0)) == batch
        assert states.finalizing(batch, Status.EXPIRED, Counts(3, 0, 3), 1009.0) == batch
    assert states.begun(BEGUN, "other", 9, 1009.0) == states.refused(BEGUN, [], 1009.0) == BEGUN
    for batch in (NEW, BEGUN, ended, failed):
        assert states.ended(batch, 1009.0) == batch
