from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_core.bench import Bench
from tests.engine_core.fake_worker import make_hello
from tests.engine_core.fakes_sink import RecordingSink, ResettableRunner
from tests.fakes import make_record, reference_tokens

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.engine import EngineCore
from pagoda_engine_core.workers.executor import (
    InprocExecutor,
    LeaveCause,
    WorkerChanged,
    WorkerLeft,
    WorkerState,
)
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import FinishReason, PriorOutput, RequestRecord
from pagoda_proto.steps import Drain, ResetWorker, StepPlan, StepResult
from pagoda_proto.times import NO_WORKER_WAIT_S, WORKER_DRAINS_S


def test_a_request_runs_to_its_one_ending(bench: Bench) -> None:
    record = make_record(max_tokens=12)
    bench.submit(record)
    bench.settle()
    assert bench.sink.accepted_ids == [(record.request_id, 0)]
    assert bench.deltas(record.request_id) == reference_tokens(record)
    ending = bench.sink.endings[record.request_id]
    assert ending.finish_reason is FinishReason.LENGTH
    assert ending.usage.output_tokens == 12
    assert sum(entry.seconds for entry in ending.ledger) > 0
    assert bench.engine.idle


def test_choices_of_one_request_all_arrive(bench: Bench) -> None:
    record = make_record(n=4, max_tokens=9, seed=3)
    bench.submit(record)
    bench.settle()
    assert bench.deltas(record.request_id) == reference_tokens(record)


def test_two_steps_are_in_flight_and_never_three(bench: Bench) -> None:
    bench.submit(make_record(max_tokens=10))
    bench.engine.step(0)
    assert len(bench.executor.plans[1]) == 2
    bench.engine.step(0)
    assert len(bench.executor.plans[1]) == 2


def test_a_sink_hears_once_per_pass_of_all_its_requests(bench: Bench) -> None:
    for _ in range(3):
        bench.submit(make_record(max_tokens=3))
    bench.settle()
    assert all(len({delta.request_id for delta in batch}) == 3 for batch in bench.sink.batches)
    assert len(bench.sink.batches) <= 3


@pytest.mark.parametrize(
    ("record", "attempt", "code", "param"),
    [
        (make_record(()), 0, ErrorCode.INVALID_ARGUMENT, "prompt"),
        (make_record((1, 999)), 0, ErrorCode.INVALID_ARGUMENT, "prompt"),
        (make_record(stop_token_ids=(256,)), 0, ErrorCode.INVALID_ARGUMENT, "stop_token_ids"),
        (make_record(eos_token_ids=(300,)), 0, ErrorCode.INVALID_ARGUMENT, "eos_token_ids"),
        (make_record(max_tokens=2000), 0, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "max_tokens"),
        (make_record(range(1, 200), max_tokens=300), 0, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "max_tokens"),
        (make_record(request_id="x" * 200), 0, ErrorCode.INVALID_ARGUMENT, "request_id"),
        (make_record(priority=-101), 0, ErrorCode.INVALID_ARGUMENT, "priority"),
        (make_record(seed=2**64), 0, ErrorCode.INVALID_ARGUMENT, "seed"),
        (make_record(queue_timeout_s=-1.0), 0, ErrorCode.INVALID_ARGUMENT, "queue_timeout_s"),
        (make_record(weight=0), 0, ErrorCode.INVALID_ARGUMENT, "weight"),
        (make_record(tenant="x" * 257), 0, ErrorCode.INVALID_ARGUMENT, "tenant"),
        (make_record(), -1, ErrorCode.INVALID_ARGUMENT, "attempt"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_rejected_with_the_field(
    bench: Bench, record: RequestRecord, attempt: int, code: ErrorCode, param: str
) -> None:
    bench.submit(record, attempt)
    bench.settle()
    error = bench.sink.rejections[record.request_id]
    assert (error.code, error.param) == (code, param)
    assert not bench.sink.accepted_ids
    assert bench.engine.idle


@pytest.mark.parametrize(
    ("prior", "param"),
    [
        ([PriorOutput(choice=1, token_ids=[1])], "prior_outputs[1]"),
        ([PriorOutput(choice=0, token_ids=[1]), PriorOutput(choice=0, token_ids=[2])], "prior_outputs"),
        ([PriorOutput(choice=0, token_ids=[1] * 9)], "prior_outputs[0]"),
        ([PriorOutput(choice=0, token_ids=[-1])], "prior_outputs[0]"),
    ],
)
def test_prior_outputs_are_checked(bench: Bench, prior: list[PriorOutput], param: str) -> None:
    request_id = bench.submit(make_record(max_tokens=8), attempt=1, prior=prior)
    bench.settle()
    assert bench.sink.rejections[request_id].param == param


@pytest.mark.parametrize("taken", range(13))
def test_a_resubmitted_request_continues_with_the_same_tokens(bench: Bench, taken: int) -> None:
    record = make_record(max_tokens=12, seed=5)
    (expected,) = reference_tokens(record)
    bench.sink.prime(record.request_id, 0, expected[:taken])
    bench.submit(record, 3, prior=[PriorOutput(choice=0, token_ids=expected[:taken])])
    bench.settle()
    assert bench.deltas(record.request_id) == [expected]
    assert bench.sink.endings[record.request_id].attempt == 3


def test_a_higher_attempt_replaces_silently_and_a_lower_one_is_rejected(bench: Bench) -> None:
    record = make_record(max_tokens=10)
    first, second = RecordingSink(), RecordingSink()
    bench.engine.submit(record, first, 1)
    bench.engine.step(0)
    bench.engine.submit(record, second, 2)
    bench.submit(record, 2)
    bench.settle()
    assert second.choices(record.request_id) == reference_tokens(record)
    assert not first.endings
    assert not first.rejections
    assert bench.sink.rejections[record.request_id].param == "request_id"


def test_the_queue_is_bounded_in_requests_and_tokens() -> None:
    bench = Bench(max_queued_requests=3, max_queued_tokens=100)
    for _ in range(3):
        bench.submit(make_record())
    full = bench.submit(make_record())
    bench.settle()
    assert bench.sink.rejections[full].code is ErrorCode.OVERLOADED
    assert bench.sink.retry_after_s[full] == 0  # unknown: no step was ever done
    bench = Bench(max_queued_tokens=100)
    bench.submit(make_record(range(60)))
    large = bench.submit(make_record(range(60)))
    bench.settle()
    assert bench.sink.rejections[large].code is ErrorCode.OVERLOADED


def test_without_a_worker_requests_wait_and_are_checked_when_one_comes() -> None:
    bench = Bench()
    good, bad = make_record(max_tokens=4), make_record((1, 1000))
    bench.submit(good)
    bench.submit(bad)
    bench.settle()
    assert bench.engine.load().num_waiting == 2
    assert not bench.sink.accepted_ids
    bench.executor.join(1, make_hello())
    bench.settle()
    assert bench.deltas(good.request_id) == reference_tokens(good)
    assert bench.sink.rejections[bad.request_id].param == "prompt"


def test_without_a_worker_a_request_waits_no_longer_than_its_timeout() -> None:
    bench = Bench(queue_timeout_s=5.0)
    slow, fast = bench.submit(make_record()), bench.submit(make_record(queue_timeout_s=1.0))
    bench.settle()
    bench.pass_time(1.5)
    assert bench.sink.rejections[fast].code is ErrorCode.UNAVAILABLE
    assert slow not in bench.sink.rejections
    bench.pass_time(4.0)
    assert bench.sink.rejections[slow].code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize("held", [True, False])
def test_patience_is_not_spent_while_the_engine_core_itself_was_stopped(held: bool) -> None:
    bench = Bench(queue_timeout_s=5.0)
    if not held:
        bench.executor.join(1, make_hello())
        bench.settle()
        bench.executor.events.append(WorkerLeft(1, LeaveCause.LEFT, "gone"))
        bench.engine.step(0)
    request_id = bench.submit(make_record())
    bench.settle()
    bench.clock.advance(600.0)
    bench.pass_time(4.0)
    assert not {**bench.sink.rejections, **bench.sink.endings}
    bench.pass_time(2.0)
    assert request_id in {**bench.sink.rejections, **bench.sink.endings}


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_what_has_begun_waits_for_a_worker_far_longer_than_its_queue_timeout(bench: Bench, num_tokens: int) -> None:
    request_id = bench.submit(make_record(queue_timeout_s=2.0, max_tokens=50))
    bench.engine.step(0)
    for _ in range(num_tokens):
        bench.executor.answer(1)
        bench.engine.step(0)
    bench.executor.events.append(WorkerLeft(1, LeaveCause.DIED, "gone"))
    bench.executor.plans.pop(1)
    bench.engine.step(0)
    bench.pass_time(NO_WORKER_WAIT_S - 5)
    assert not bench.sink.endings
    bench.pass_time(10)
    ending = bench.sink.endings[request_id]
    code = ErrorCode.STREAM_INTERRUPTED if num_tokens else ErrorCode.UNAVAILABLE
    assert (ending.finish_reason, ending.error_code) == (FinishReason.ERROR, code)
    assert "no worker came" in ending.error_message
    assert bench.engine.idle


def test_what_has_begun_is_not_measured_by_the_bounds_of_the_queue() -> None:
    bench = Bench(max_queued_requests=2, max_queued_tokens=30)
    records = [make_record(range(10), max_tokens=8, seed=i) for i in range(6)]
    for record in records:
        (expected,) = reference_tokens(record)
        bench.sink.prime(record.request_id, 0, expected[:2])
        bench.submit(record, 1, prior=[PriorOutput(choice=0, token_ids=expected[:2])])
    bench.settle()
    assert not bench.sink.rejections
    bench.executor.join(1, make_hello())
    bench.settle()
    for record in records:
        assert bench.deltas(record.request_id) == reference_tokens(record)


def test_a_worker_that_joins_has_work_from_its_next_step() -> None:
    bench = Bench(max_rows=4)
    bench.executor.join(1, make_hello("w1"))
    for seed in range(12):
        bench.submit(make_record(max_tokens=30, seed=seed))
    bench.engine.step(0)
    bench.executor.answer_all()
    bench.engine.step(0)
    bench.executor.join(2, make_hello("w2"))
    bench.engine.step(0)
    bench.engine.step(0)
    first, *_ = [message for epoch, message in bench.executor.sent if epoch == 2]
    assert isinstance(first, StepPlan)
    assert len(first.new_rows) == 4
    bench.settle()
    assert len(bench.sink.endings) == 12


def test_aborts_free_everything(bench: Bench) -> None:
    running, partly = make_record(max_tokens=50), make_record(max_tokens=6, n=2)
    bench.submit(running)
    bench.submit(partly)
    bench.engine.step(0)
    bench.engine.abort(running.request_id)
    bench.engine.abort(partly.request_id, (1,))
    bench.engine.abort("unknown")
    bench.settle()
    assert bench.sink.endings[running.request_id].finish_reason is FinishReason.ABORT
    assert bench.sink.reasons[partly.request_id, 1] is FinishReason.ABORT
    assert bench.deltas(partly.request_id)[0] == reference_tokens(partly)[0]
    assert bench.engine.stats().blocks.blocks_used == 0


def test_an_abort_from_elsewhere_is_ignored(bench: Bench) -> None:
    record = make_record()
    bench.submit(record)
    bench.engine.step(0)
    bench.engine.abort(record.request_id, sink=RecordingSink())
    bench.settle()
    assert bench.deltas(record.request_id) == reference_tokens(record)


def test_an_abort_while_nobody_can_check_is_a_cancellation() -> None:
    bench = Bench()
    request_id = bench.submit(make_record())
    bench.engine.abort(request_id)
    bench.settle()
    assert bench.sink.rejections[request_id].code is ErrorCode.CANCELLED
    assert bench.engine.idle


def test_some_choices_can_be_aborted_while_nobody_can_check() -> None:
    bench = Bench()
    some, every = make_record(n=3, max_tokens=5), make_record(n=2)
    bench.submit(some)
    bench.submit(every)
    bench.engine.abort(some.request_id, (0, 2))
    bench.engine.abort(every.request_id, (0,))
    bench.engine.abort(every.request_id, (1,))
    bench.settle()
    assert bench.sink.rejections[every.request_id].code is ErrorCode.CANCELLED
    bench.executor.join(1, make_hello())
    bench.settle()
    assert bench.deltas(some.request_id) == [[], reference_tokens(some)[1], []]
    assert [bench.sink.reasons[some.request_id, choice] for choice in range(3)] == ["abort", "length", "abort"]


def test_abandoning_a_sink_ends_its_requests_only(bench: Bench) -> None:
    gone, stays = RecordingSink(), make_record()
    bench.engine.submit(make_record(max_tokens=50), gone)
    bench.submit(stays)
    bench.engine.step(0)
    bench.engine.abandon(gone)
    bench.settle()
    assert not gone.endings
    assert bench.deltas(stays.request_id) == reference_tokens(stays)
    assert bench.engine.idle
    assert bench.engine.stats().blocks.blocks_used == 0


def test_a_sink_that_raises_loses_its_own_requests_only(bench: Bench) -> None:
    class Broken(RecordingSink):
        def deltas(self, deltas: object) -> None:
            raise RuntimeError("broken sink")

    record = make_record()
    bench.engine.submit(make_record(max_tokens=50), Broken())
    bench.submit(record)
    bench.settle()
    assert bench.deltas(record.request_id) == reference_tokens(record)
    assert bench.engine.idle


def test_results_of_a_lost_life_are_ignored(bench: Bench) -> None:
    record = make_record(max_tokens=10)
    bench.submit(record)
    bench.engine.step(0)
    bench.executor.events.append(WorkerLeft(1, LeaveCause.DIED, "gone"))
    bench.engine.step(0)
    bench.executor.join(2, make_hello())
    bench.executor.answer(1)
    bench.settle()
    assert bench.deltas(record.request_id) == reference_tokens(record)
    assert bench.sink.endings[record.request_id].usage.replays == 1


def test_a_suspect_worker_gets_no_new_work_until_it_is_heard_again(bench: Bench) -> None:
    bench.executor.events.append(WorkerChanged(1, WorkerState.SUSPECT))
    bench.engine.step(0)
    assert bench.engine.load().num_workers == 0
    record = make_record()
    bench.submit(record)
    bench.settle()
    assert not bench.executor.plans[1]
    bench.executor.events.append(WorkerChanged(1, WorkerState.READY))
    bench.settle()
    assert bench.deltas(record.request_id) == reference_tokens(record)


def test_draining_a_worker_moves_its_requests(bench: Bench) -> None:
    record = make_record(max_tokens=10)
    bench.submit(record)
    bench.engine.step(0)
    bench.executor.join(2, make_hello("w1"))
    bench.engine.step(0)
    bench.engine.drain_worker("w0")
    bench.engine.step(0)
    assert (1, Drain()) not in bench.executor.sent
    bench.pass_time(0.25)
    assert (1, Drain()) in bench.executor.sent
    bench.settle()
    assert bench.deltas(record.request_id) == reference_tokens(record)
    assert any(epoch == 2 and isinstance(message, StepPlan) for epoch, message in bench.executor.sent)


def test_nothing_is_planned_when_there_is_nothing_to_do(bench: Bench) -> None:
    bench.submit(make_record())
    bench.settle()
    sent = len(bench.executor.sent)
    assert not bench.engine.step(0)
    assert len(bench.executor.sent) == sent


def test_closing_migrates_what_runs_and_rejects_what_comes_later(bench: Bench) -> None:
    running = bench.submit(make_record(max_tokens=50))
    bench.engine.step(0)
    bench.engine.close()
    late = bench.submit(make_record())
    assert bench.sink.migrated == [(running, 0)]
    assert bench.sink.rejections[late].code is ErrorCode.UNAVAILABLE
    assert bench.executor.closed
    with pytest.raises(Exception, match="stopped"):
        bench.engine.call(lambda: None).result(0)


def test_handing_back_stops_admission_but_not_the_loop(bench: Bench) -> None:
    running = bench.submit(make_record(max_tokens=50))
    bench.engine.step(0)
    handed = bench.engine.hand_back("test")
    late = bench.submit(make_record())
    bench.settle()
    assert handed.done()
    assert sorted(bench.sink.migrated) == sorted([(running, 0), (late, 0)])
    assert not bench.sink.rejections
    assert bench.engine.load().draining


def test_an_engine_core_that_drains_goes_on_and_gives_back_what_comes(bench: Bench) -> None:
    record = make_record(max_tokens=10)
    bench.submit(record)
    bench.engine.step(0)
    bench.engine.drain("test")
    late = bench.submit(make_record())
    bench.settle()
    assert bench.sink.migrated == [(late, 0)]
    assert bench.deltas(record.request_id) == reference_tokens(record)
    assert not bench.engine.num_open


def test_a_worker_that_leaves_keeps_what_nobody_has_room_for(bench: Bench) -> None:
    record = make_record(max_tokens=30)
    bench.submit(record)
    bench.engine.step(0)
    bench.executor.answer_all()
    bench.executor.events.append(WorkerChanged(1, WorkerState.DRAINING))
    waits = make_record()
    bench.submit(waits)
    bench.engine.step(0)
    assert bench.engine.load().num_workers == 0
    assert bench.engine.load().num_running == 1
    for _ in range(5):
        bench.executor.answer_all()
        bench.engine.step(0)
    assert len(bench.deltas(record.request_id)[0]) >= 5
    bench.executor.join(2, make_hello("w1"))  # takes this request and the waiting ones
    bench.engine.step(0)
    bench.engine.step(0)
    assert bench.engine.stats().totals["replays"] == 1
    bench.settle()
    for each in (record, waits):
        assert bench.deltas(each.request_id) == reference_tokens(each)
    assert bench.executor.sent.count((1, Drain())) == 1


def test_a_worker_that_leaves_in_vain_is_sent_away_when_its_time_is_up(bench: Bench) -> None:
    record = make_record(max_tokens=20)
    bench.submit(record)
    bench.engine.step(0)
    bench.engine.drain_worker("w0")
    bench.pass_time(WORKER_DRAINS_S - 1)
    assert (1, Drain()) not in bench.executor.sent
    bench.pass_time(1.5)
    assert (1, Drain()) in bench.executor.sent
    bench.executor.join(2, make_hello("w1"))
    bench.settle()
    assert bench.deltas(record.request_id) == reference_tokens(record)


def test_call_passes_results_and_errors(bench: Bench) -> None:
    good, bad = bench.engine.call(lambda: 7), bench.engine.call(lambda: 1 // 0)
    bench.settle()
    assert good.result(0) == 7
    with pytest.raises(ZeroDivisionError):
        bad.result(0)


def test_load_listeners_hear_of_changes_only(bench: Bench) -> None:
    heard: list[None] = []
    bench.engine.on_load(lambda: heard.append(None))
    for _ in range(5):
        bench.engine.step(0)
    assert not heard
    bench.submit(make_record())
    bench.settle()
    assert heard
    load = bench.engine.load()
    assert (load.num_workers, load.vocab_size, load.max_model_len) == (1, 256, 1024)
    assert load.model_fingerprint == "fake"


def test_the_offline_way_is_the_same_engine_in_the_callers_thread() -> None:
    engine = EngineCore(EngineConfig(), InprocExecutor(ResettableRunner(), make_hello()))
    sink = RecordingSink()
    records = [make_record(range(i + 1), max_tokens=7, n=2, seed=i) for i in range(5)]
    for record in records:
        engine.submit(record, sink)
    while not engine.idle:
        engine.step(0)
    for record in records:
        assert sink.choices(record.request_id) == reference_tokens(record)
    engine.close()


def test_a_runner_that_always_raises_ends_the_request_and_not_the_engine() -> None:
    class Fragile(ResettableRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            if any(66 in row.token_ids for row in self.rows.values()) or any(66 in r.token_ids for r in plan.new_rows):
                raise MemoryError("66")
            return super().execute(plan)

    engine = EngineCore(EngineConfig(), InprocExecutor(Fragile(), make_hello()))
    sink = RecordingSink()
    records = [make_record((i + 1, 2, 3), max_tokens=2, allowed_token_ids=(1, 2)) for i in range(4)]
    poison = make_record((66,))
    for record in (*records, poison):
        engine.submit(record, sink)
    while not engine.idle:
        engine.step(0)
    assert sink.endings[poison.request_id].error_code is ErrorCode.REQUEST_FAILED_REPEATEDLY
    for record in records:
        assert sink.choices(record.request_id) == reference_tokens(record)
    engine.close()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_happens_every_request_ends_once_with_the_right_tokens(data: st.DataObject) -> None:
    bench = Bench(max_attempts=1000)
    records = [make_record(range(i + 1), max_tokens=6, n=1 + i % 2, seed=i) for i in range(6)]
    waiting, epochs, last = list(records), set[int](), 0
    for _ in range(data.draw(st.integers(5, 40))):
        match data.draw(st.sampled_from(["submit", "join", "leave", "answer", "step", "step"])):
            case "submit" if waiting:
                bench.submit(waiting.pop())
            case "join":
                last += 1
                bench.executor.join(last, make_hello(f"w{last}", num_blocks=12))
                epochs.add(last)
            case "leave" if epochs:
                epoch = data.draw(st.sampled_from(sorted(epochs)))
                epochs.remove(epoch)
                bench.executor.plans.pop(epoch)
                bench.executor.events.append(WorkerLeft(epoch, data.draw(st.sampled_from(LeaveCause)), "test"))
            case "answer":
                bench.executor.answer_all()
            case "step":
                bench.clock.advance(0.01)
                bench.engine.step(0)
    for record in waiting:
        bench.submit(record)
    bench.executor.join(last + 1, make_hello(num_blocks=12))
    bench.settle()
    for record in records:
        assert bench.deltas(record.request_id) == reference_tokens(record)
        assert bench.sink.endings[record.request_id].finish_reason is FinishReason.LENGTH
    assert bench.engine.idle
    assert bench.engine.stats().blocks.blocks_used == 0


@pytest.mark.parametrize("max_tokens", [2, 60])
def test_a_refused_request_is_told_when_the_queue_will_be_done(max_tokens: int) -> None:
    """The estimate counts output tokens: it is right within a factor of two however long the answers are."""
    bench = Bench(max_queued_requests=20, max_rows=2)
    bench.executor.join(1, make_hello())

    def work(until: Callable[[], bool]) -> float:
        began = bench.clock()
        while not until():
            bench.executor.answer_all()
            bench.clock.advance(0.2)
            bench.engine.step(0)
        return bench.clock() - began

    for seed in range(12):  # traffic that shows the pace and the answers' length
        bench.submit(make_record(max_tokens=max_tokens, seed=seed))
    work(lambda: len(bench.sink.endings) == 12)
    queue = [bench.submit(make_record(max_tokens=max_tokens, seed=seed)) for seed in range(22)]
    bench.engine.step(0)
    for _ in range(20):
        refused = bench.submit(make_record())
        bench.engine.step(0)
        if refused in bench.sink.rejections:
            break
    told_s = bench.sink.retry_after_s[refused]
    needed_s = work(lambda: set(queue) <= {*bench.sink.endings, *bench.sink.rejections})
    assert needed_s / 2 < told_s < needed_s * 2


def test_broken_books_are_found_while_nothing_runs(bench: Bench) -> None:
    bench.submit(make_record())
    bench.settle()
    bench.pass_time(6.0)
    assert (1, ResetWorker()) not in bench.executor.sent
    record = make_record()
    bench.submit(record)
    bench.settle()
    bench.engine._router.workers[1].scheduler._kv.groups[0].pool.ref_counts[3] += 1
    bench.pass_time(6.0)
    assert (1, ResetWorker()) in bench.executor.sent
    again = make_record()
    bench.executor.join(2, make_hello())
    bench.submit(again)
    bench.settle()
    assert bench.deltas(again.request_id) == reference_tokens(again)
