from __future__ import annotations

import pytest
from tests.engine_core.harness import Harness
from tests.fakes import make_record

from pagoda_engine_core.scheduling import plan, room
from pagoda_engine_core.scheduling.ledger import Cause


def test_rows_that_wait_for_a_message_have_their_place_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plan, room):
        monkeypatch.setattr(module, "MESSAGE_BYTES", 4000)
    harness = Harness(num_blocks=200)
    large = {"allowed_token_ids": tuple(range(10_000, 10_300)), "max_tokens": 4}
    harness.add(make_record([1, 2, 3], n=8, **large))
    another = harness.request(make_record([4, 5, 6], **large))
    harness.step()
    left = harness.scheduler.room()
    assert left.lacks(harness.scheduler.need(another, left)) is Cause.QUEUED_BUDGET
    harness.step()
    left = harness.scheduler.room()
    assert left.lacks(harness.scheduler.need(another, left)) is None
