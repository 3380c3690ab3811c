from __future__ import annotations

from tests.engine_core.bench import Bench
from tests.engine_core.fake_worker import make_hello
from tests.fakes import make_record, reference_tokens

from pagoda_engine_core.workers.executor import LeaveCause, WorkerLeft
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import Begun, PriorOutput, RequestRecord
from pagoda_proto.times import NO_WORKER_WAIT_S


def begin(bench: Bench, record: RequestRecord) -> Begun:
    """Submit, let the worker of epoch 1 run two steps, and return the Begun that came with the first token."""
    bench.submit(record)
    bench.engine.step(0)
    for _ in range(2):
        bench.executor.answer(1)
        bench.engine.step(0)
    told = [delta.result.begun for batch in bench.sink.batches for delta in batch if delta.result.begun is not None]
    assert len(told) == 1
    return told[0]


def lose(bench: Bench, epoch: int) -> None:
    bench.executor.plans.pop(epoch)
    bench.executor.events.append(WorkerLeft(epoch, LeaveCause.DIED, "gone"))
    bench.engine.step(0)


def test_the_first_tokens_say_under_what_they_were_made(bench: Bench) -> None:
    assert begin(bench, make_record(n=2, max_tokens=9)) == Begun(
        model_fingerprint="fake", numerics_id="fake-numerics", cached_prompt_tokens=0
    )


def test_what_has_begun_keeps_the_numerics_of_a_lost_worker(bench: Bench) -> None:
    record = make_record(max_tokens=9)
    begin(bench, record)
    lose(bench, 1)
    bench.pass_time(0.5)
    assert bench.executor.held[-1] == "fake-numerics"
    bench.executor.join(2, make_hello("w2"))
    bench.settle()
    assert bench.deltas(record.request_id) == reference_tokens(record)
    lose(bench, 2)
    bench.pass_time(0.5)
    assert bench.executor.held[-1] == ""


def test_a_begun_request_never_goes_on_with_other_numerics(bench: Bench) -> None:
    record = make_record(max_tokens=9)
    begun = begin(bench, record)
    bench.executor.join(2, make_hello("w2", numerics_id="other"))  # a real executor would refuse it
    bench.engine.step(0)
    lose(bench, 1)
    plain = make_record(max_tokens=4)
    bench.submit(plain)
    bench.settle()
    assert bench.deltas(plain.request_id) == reference_tokens(plain)
    assert record.request_id not in bench.sink.endings
    bench.pass_time(NO_WORKER_WAIT_S + 1)
    ending = bench.sink.endings[record.request_id]
    assert ending.error_code is ErrorCode.STREAM_INTERRUPTED
    assert repr(begun.numerics_id) in ending.error_message
    assert "'other'" in ending.error_message


def test_what_has_begun_waits_longer_where_workers_take_long_to_start() -> None:
    bench = Bench()
    bench.executor.join(1, make_hello(start_s=300.0))
    bench.settle()
    saved, lost = make_record(max_tokens=9), make_record(max_tokens=9)
    begin(bench, saved)
    lose(bench, 1)
    bench.pass_time(NO_WORKER_WAIT_S + 400)
    assert saved.request_id not in bench.sink.endings
    bench.executor.join(2, make_hello("w2", start_s=200.0))
    bench.settle()
    assert bench.deltas(saved.request_id) == reference_tokens(saved)

    bench.submit(lost)
    bench.engine.step(0)
    bench.executor.answer(2)
    bench.engine.step(0)
    lose(bench, 2)
    bench.pass_time(NO_WORKER_WAIT_S + 601)
    assert bench.sink.endings[lost.request_id].error_code is ErrorCode.STREAM_INTERRUPTED


def test_a_resumed_request_goes_on_only_where_it_began() -> None:
    bench = Bench()
    record = make_record(max_tokens=9)
    (expected,) = reference_tokens(record)
    begun = Begun(model_fingerprint="fake", numerics_id="fake-numerics", cached_prompt_tokens=3)
    bench.sink.prime(record.request_id, 0, expected[:4])
    bench.submit(record, 1, prior=[PriorOutput(choice=0, token_ids=expected[:4])], begun=begun)
    bench.pass_time(0.5)
    assert bench.executor.held[-1] == "fake-numerics"  # before any worker joined
    bench.executor.join(1, make_hello())
    bench.settle()
    assert bench.deltas(record.request_id) == [expected]
    assert bench.sink.endings[record.request_id].usage.cached_prompt_tokens == 3
    assert not any(delta.result.begun for batch in bench.sink.batches for delta in batch)


def test_a_request_that_began_with_another_model_is_refused_by_name(bench: Bench) -> None:
    begun = Begun(model_fingerprint="another", numerics_id="fake-numerics")
    prior = [PriorOutput(choice=0, token_ids=[1])]
    request_id = bench.submit(make_record(max_tokens=9), 1, prior=prior, begun=begun)
    bench.settle()
    error = bench.sink.rejections[request_id]
    assert error.code is ErrorCode.STREAM_INTERRUPTED
    assert "'another'" in error.message
    assert "'fake'" in error.message
