from __future__ import annotations

import msgspec
import pytest
from tests.engine_core.fake_worker import make_hello

from pagoda_engine_core.workers.registration import MAX_REMEMBERED_PROCESSES, Registry
from pagoda_proto.params import ModelLimits


def test_epochs_rise_and_the_first_worker_sets_the_model() -> None:
    registry = Registry()
    hello = make_hello()
    assert registry.refusal(hello, ()) is None
    assert [registry.grant(hello) for _ in range(3)] == [1, 2, 3]
    assert registry.limits == ModelLimits(256, 1024)
    assert registry.model_fingerprint == "fake"


def test_a_model_length_that_was_asked_for_binds_every_worker() -> None:
    registry = Registry(max_model_len=2000)
    refused = registry.refusal(make_hello(), ())
    assert refused is not None
    assert refused.reason.startswith("max_model_len: 2000")
    longer = make_hello(max_model_len=4000)
    assert registry.refusal(longer, ()) is None
    registry.grant(longer)
    assert registry.limits == ModelLimits(256, 2000)
    assert registry.refusal(make_hello(max_model_len=2000), ()) is None


@pytest.mark.parametrize("field", ["worker_id", "incarnation", "device"])
@pytest.mark.parametrize("name", ["", "a\nb", "x" * 129, "\x00", "\x1b[31mcpu"])
def test_names_must_be_printable_and_short(field: str, name: str) -> None:
    refused = Registry().refusal(make_hello(**{"worker_id": "w0", field: name}), ())
    assert refused is not None
    assert refused.final
    assert refused.reason.startswith(f"{field}: ")


def test_duplicates_and_other_numerics_may_try_again_later() -> None:
    registry = Registry()
    first = make_hello("w0")
    registry.grant(first)
    twin, other = make_hello("w0"), make_hello("w1", numerics_id="other")
    for hello in (twin, other):
        refused = registry.refusal(hello, [first])
        assert refused is not None
        assert not refused.final
    assert registry.refusal(twin, []) is None
    assert registry.refusal(other, []) is not None
    registry.hold("")
    assert registry.refusal(other, []) is None
    registry.hold("a third one")
    assert registry.refusal(other, []) is not None


def test_only_the_newest_registration_of_a_process_counts() -> None:
    registry = Registry()
    first, second, third = (make_hello(incarnation="a", registration=number) for number in (1, 2, 3))
    assert not registry.is_stale(second)
    registry.grant(second)
    assert [registry.is_stale(hello) for hello in (first, second, third)] == [True, True, False]
    assert registry.refusal(msgspec.structs.replace(third, worker_id="taken"), [make_hello("taken")]) is not None
    assert [registry.is_stale(hello) for hello in (second, third)] == [True, False]  # it may retry
    assert not registry.is_stale(make_hello(incarnation="b", registration=1))
    for number in range(MAX_REMEMBERED_PROCESSES):
        registry.grant(make_hello(incarnation=str(number)))
    assert len(registry._newest) == MAX_REMEMBERED_PROCESSES


def test_the_model_stays_also_when_nobody_is_left() -> None:
    registry = Registry()
    registry.grant(make_hello())
    refused = registry.refusal(make_hello(model_fingerprint="other"), [])
    assert refused is not None
    assert refused.final
