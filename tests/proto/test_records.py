from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from tests.fakes import make_delta, make_record
from tests.proto.strategies import DELTAS, LOADS, PRIORS, RECORDS

from pagoda_proto.records import Delta, FinishReason, Load, PriorOutput, RequestRecord, Usage


@pytest.mark.parametrize(
    ("struct", "strategy"),
    [(RequestRecord, RECORDS), (PriorOutput, PRIORS), (Delta, DELTAS), (Load, LOADS)],
    ids=["record", "prior", "delta", "load"],
)
def test_records_can_be_stored_and_read_back(struct: type, strategy: object) -> None:
    @given(strategy)  # type: ignore[arg-type]
    def check(value: object) -> None:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=struct) == value

    check()


def test_a_record_is_never_changed() -> None:
    record = make_record()
    with pytest.raises(AttributeError):
        record.priority = 1  # type: ignore[misc]
    with pytest.raises(AttributeError):
        record.task.seed = 1  # type: ignore[misc]


def test_the_delta_with_usage_ends_the_request() -> None:
    delta = make_delta(0, [1], finish_reason=FinishReason.STOP)
    assert not delta.ends_request, "another choice may still run"
    delta.usage = Usage(prompt_tokens=0)
    assert delta.ends_request


def test_finish_reasons_are_the_words_clients_know() -> None:
    assert {reason.value for reason in FinishReason} == {"stop", "length", "abort", "error"}
