"""An exception in a scheduler or from a worker's answer costs one request or one worker's life, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from tests.engine_core.bench import Bench
from tests.engine_core.fake_worker import make_hello
from tests.engine_core.fakes_sink import RecordingSink
from tests.fakes import make_record, reference_tokens

from pagoda_engine_core.workers.executor import LeaveCause, StepDone, WorkerLeft
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import FinishReason, RequestRecord
from pagoda_proto.steps import ResetWorker, StepResult


def check_it_lost_a_life_and_nobody_a_token(bench: Bench, record: RequestRecord) -> None:
    assert (1, ResetWorker()) in bench.executor.sent
    bench.executor.plans.clear()
    bench.executor.join(2, make_hello())
    bench.settle()
    assert bench.deltas(record.request_id) == reference_tokens(record)


@pytest.mark.parametrize("asked", ["schedule", "room"])
def test_a_scheduler_that_raises_costs_its_worker_a_life_and_nobody_a_token(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    record = make_record(max_tokens=10)
    bench.submit(record)
    bench.engine.step(0)
    worker = bench.engine._router.workers[1]
    monkeypatch.setattr(worker.scheduler, asked, lambda *now: 1 / 0)
    bench.submit(make_record())  # a waiting request, so that room is asked for
    bench.executor.answer_all()
    bench.settle()
    assert (1, ResetWorker()) in bench.executor.sent
    assert bench.engine.stats().totals["scheduler_failures"] == 1
    bench.executor.join(2, make_hello())
    bench.settle()
    assert bench.deltas(record.request_id) == reference_tokens(record)


def test_what_came_before_a_row_that_raises_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows before it: one that ended in the same step, and one that continues."""
    ends, goes_on, odd = (make_record(max_tokens=count) for count in (1, 6, 6))
    for record in (ends, goes_on, odd):
        bench.submit(record)
    bench.engine.step(0)
    scheduler = bench.engine._router.workers[1].scheduler
    apply_row = scheduler._apply_row
    monkeypatch.setattr(
        scheduler, "_apply_row", lambda choice, *a: apply_row(choice, *a) if choice.request.record != odd else 1 / 0
    )
    bench.executor.answer(1)
    bench.engine.step(0)
    assert bench.engine.stats().totals["scheduler_failures"] == 1
    bench.executor.plans.clear()
    bench.executor.join(2, make_hello())
    bench.settle()
    for record in (ends, goes_on, odd):
        assert bench.deltas(record.request_id) == reference_tokens(record)
        assert bench.sink.endings[record.request_id].finish_reason is FinishReason.LENGTH
    assert bench.engine.idle


@pytest.mark.parametrize("field", ["elapsed_s", "forward_s"])
@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_result_with_impossible_times_costs_its_worker_a_life_and_nobody_else(
    bench: Bench, field: str, seconds: float
) -> None:
    record = make_record(range(100), max_tokens=10)
    bench.submit(record)
    bench.engine.step(0)
    result = bench.executor.runners[1].execute(bench.executor.plans[1].popleft())
    bench.executor.events.append(StepDone(1, msgspec.structs.replace(result, **{field: seconds})))
    bench.engine.step(0)
    check_it_lost_a_life_and_nobody_a_token(bench, record)


def test_a_request_that_cannot_be_placed_ends_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = bench.engine._router.workers[1]
    add = worker.scheduler.add
    odd, plain = make_record(), make_record()
    monkeypatch.setattr(worker.scheduler, "add", lambda r, now: 1 / (r.request_id != odd.request_id) and add(r, now))
    bench.submit(odd)
    bench.submit(plain)
    bench.settle()
    assert bench.sink.endings[odd.request_id].error_code is ErrorCode.INTERNAL
    assert bench.deltas(plain.request_id) == reference_tokens(plain)
    assert bench.engine.idle


def test_requests_that_cannot_be_taken_back_end_with_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    request_id = bench.submit(make_record(n=2))
    bench.engine.step(0)
    monkeypatch.setattr(bench.engine._router.workers[1].scheduler, "take_back", lambda now: 1 / 0)
    bench.executor.events.append(WorkerLeft(1, LeaveCause.DIED, "gone"))
    bench.engine.step(0)
    assert bench.sink.endings[request_id].error_code is ErrorCode.INTERNAL
    assert bench.engine.idle


def test_a_result_that_answers_no_plan_resets_the_worker(bench: Bench) -> None:
    record = make_record(max_tokens=10)
    bench.submit(record)
    bench.engine.step(0)
    bench.executor.events.append(StepDone(1, StepResult(step=9)))
    bench.engine.step(0)
    check_it_lost_a_life_and_nobody_a_token(bench, record)


@pytest.mark.parametrize("how", ["abort", "abandon", "replace"])
def test_a_scheduler_that_cannot_abort_costs_its_worker_a_life_and_nobody_a_token(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    other, record = make_record(max_tokens=10), make_record(max_tokens=10)
    bench.submit(other)
    sink = RecordingSink()
    bench.engine.submit(record, sink)
    bench.engine.step(0)
    monkeypatch.setattr(bench.engine._router.workers[1].scheduler, "abort", lambda *_: 1 / 0)
    match how:
        case "abort":
            bench.engine.abort(record.request_id)
        case "abandon":
            bench.engine.abandon(sink)
        case _:
            bench.engine.submit(record, sink, attempt=1)
    bench.engine.step(0)
    assert (1, ResetWorker()) in bench.executor.sent
    bench.executor.plans.clear()
    bench.executor.join(2, make_hello())
    bench.settle()
    assert bench.deltas(other.request_id) == reference_tokens(other)
    reasons = {"abort": [FinishReason.ABORT], "abandon": [], "replace": [FinishReason.LENGTH]}
    assert list(sink.reasons.values()) == reasons[how]
    assert bench.engine.idle


def test_requests_move_from_a_large_worker_to_a_small_one() -> None:
    """The small worker has no blocks with the ids that the requests hold on the large one."""
    bench = Bench()
    bench.executor.join(1, make_hello("large", num_blocks=64))
    records = [make_record(range(10 * i, 10 * i + 10), max_tokens=12) for i in range(3)]
    for record in records:
        bench.submit(record)
    for _ in range(3):
        bench.engine.step(0)
        bench.executor.answer_all()
    bench.executor.join(2, make_hello("small", num_blocks=8))
    bench.engine.step(0)
    bench.engine.drain_worker("large")
    bench.settle()
    for record in records:
        assert bench.sink.endings[record.request_id].error_code is None
        assert bench.deltas(record.request_id) == reference_tokens(record)
    assert bench.engine.stats().totals["replays"]
