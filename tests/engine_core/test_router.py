from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from tests.engine_core.fake_worker import make_hello, runner_of
from tests.fakes import FakeRunner, make_record, reference_tokens

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.executor import LeaveCause, WorkerState
from pagoda_engine_core.request import Request
from pagoda_engine_core.router import Router
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Delta, FinishReason, RequestRecord

NOW = 50.0


class Bench:
    """A router whose groups' plans are computed at once by FakeRunners."""

    def __init__(self, **config: object) -> None:
        self.router = Router(EngineConfig(**config))
        self.runners: dict[int, FakeRunner] = {}
        self.deltas: list[Delta] = []
        self._epochs = itertools.count(1)

    def join(self, **hello: object) -> int:
        epoch = next(self._epochs)
        group = self.router.join(epoch, make_hello(f"w{epoch}", **hello))
        self.runners[epoch] = runner_of(group.hello)
        return epoch

    def add(self, record: RequestRecord) -> Request:
        request = Request(record, max_output_tokens=record.params.max_tokens or 1, now=NOW)
        self.router.add(request, NOW)
        return request

    def dispatch(self) -> None:
        self.deltas += self.router.dispatch(NOW)

    def step(self, epoch: int) -> bool:
        group = self.router.groups[epoch]
        plan = group.scheduler.schedule(NOW)
        if plan is None:
            return False
        result = self.runners[epoch].execute(plan)
        self.deltas += self.router.ended(group, group.scheduler.apply(result, NOW))
        return True

    def lose(self, epoch: int, cause: LeaveCause = LeaveCause.DIED) -> None:
        self.deltas += self.router.leave(epoch, cause, NOW)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while not until():
            self.dispatch()
            if not any([self.step(epoch) for epoch in self.router.groups]):  # noqa: C419 - every group takes a step
                return

    def held(self, epoch: int) -> set[str]:
        return set(self.router.groups[epoch].requests)

    def tokens(self, record: RequestRecord) -> list[int]:
        return [t for delta in self.deltas if delta.request_id == record.request_id for t in delta.token_ids]

    def endings(self) -> dict[str, Delta]:
        return {delta.request_id: delta for delta in self.deltas if delta.ends_request}


def test_load_is_spread_over_groups() -> None:
    bench = Bench()
    epochs = [bench.join(), bench.join(), bench.join()]
    for i in range(9):
        bench.add(make_record((i, 1, 2)))
    bench.dispatch()
    assert [len(bench.held(epoch)) for epoch in epochs] == [3, 3, 3]


def test_a_known_prefix_draws_a_request_to_its_worker() -> None:
    bench = Bench()
    bench.join()
    known = bench.join()
    prompt = range(40)
    bench.router.groups[1].state = WorkerState.SUSPECT
    bench.add(make_record(prompt))
    bench.run()
    bench.router.groups[1].state = WorkerState.READY
    twin, other = bench.add(make_record(prompt)), bench.add(make_record(range(100, 140)))
    bench.dispatch()
    assert bench.held(known) == {twin.request_id}
    assert bench.held(1) == {other.request_id}


def test_a_prefix_does_not_outweigh_any_load() -> None:
    bench = Bench()
    first, second = bench.join(), bench.join()
    prompt = range(40)
    for _ in range(8):
        bench.add(make_record(prompt))
        bench.dispatch()
        for epoch in (first, second):
            bench.step(epoch)
    assert bench.held(first)
    assert bench.held(second)


def test_requests_wait_here_until_a_group_can_begin_them() -> None:
    bench = Bench(max_tokens_per_step=16)
    first = bench.join()
    requests = [bench.add(make_record(range(10))) for _ in range(6)]
    bench.dispatch()
    assert len(bench.held(first)) == 2  # a step's worth
    second = bench.join()
    bench.dispatch()
    assert len(bench.held(second)) == 2
    assert bench.router.num_waiting == 6
    assert bench.router.queued_tokens == 60
    bench.run()
    assert set(bench.endings()) == {request.request_id for request in requests}
    assert (bench.router.num_waiting, bench.router.queued_tokens, bench.router.num_running) == (0, 0, 0)


def test_a_request_goes_where_it_fits() -> None:
    bench = Bench()
    bench.join(num_blocks=4)
    large = bench.join(num_blocks=64)
    request = bench.add(make_record(range(100)))
    small = bench.add(make_record())
    bench.dispatch()
    assert request.request_id in bench.held(large)
    assert small.request_id in bench.held(1)
    with pytest.raises(PagodaError) as raised:
        bench.router.check_fits(Request(make_record(range(300)), max_output_tokens=8, now=NOW))
    assert raised.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_priority_orders_the_queue() -> None:
    bench = Bench(policy="priority", max_tokens_per_step=4)
    late = bench.add(make_record(range(8), priority=5))
    early = bench.add(make_record(range(8), priority=-5))
    epoch = bench.join()
    bench.dispatch()
    assert bench.held(epoch) == {early.request_id}
    assert late.request_id not in bench.held(epoch)


@pytest.mark.parametrize("cause", list(LeaveCause))
def test_a_lost_worker_costs_no_token_and_deaths_count_only_for_what_ran(cause: LeaveCause) -> None:
    bench = Bench(max_rows=2)
    first = bench.join()
    requests = [bench.add(make_record((i, 1), max_tokens=10, seed=i)) for i in range(4)]
    bench.dispatch()
    bench.step(first)
    bench.step(first)
    assert bench.router.num_running == 2
    bench.lose(first, cause)
    blamed = int(cause.blames)
    assert [request.deaths for request in requests] == [blamed, blamed, 0, 0]
    assert bench.router.totals()["replays"] == 2
    bench.join()
    bench.run()
    for request in requests:
        assert bench.tokens(request.record) == reference_tokens(request.record)[0]


def test_replays_go_before_new_requests() -> None:
    bench = Bench(max_tokens_per_step=8)
    first = bench.join()
    replayed = bench.add(make_record(range(8)))
    bench.dispatch()
    bench.step(first)
    bench.lose(first)
    bench.router.add(Request(make_record(range(8)), max_output_tokens=8, now=NOW - 10), NOW)
    second = bench.join()
    bench.dispatch()
    assert bench.held(second) == {replayed.request_id}


def test_what_kills_workers_is_found_out_and_costs_nobody_else() -> None:
    bench = Bench()
    poison = make_record((66, 6), max_tokens=20)
    innocents = [make_record((i, 1), max_tokens=20, seed=i) for i in range(7)]
    for record in (*innocents, poison):
        bench.add(record)
    together: list[int] = []
    while len(bench.endings()) < 8:
        if not bench.router.groups:
            bench.join()
        bench.dispatch()
        (epoch,) = bench.router.groups
        held = bench.held(epoch)
        assert bench.step(epoch)
        if poison.request_id in held:
            together.append(len(held))
            bench.lose(epoch)
    endings = bench.endings()
    assert endings[poison.request_id].error_code is ErrorCode.REQUEST_FAILED_REPEATEDLY
    assert together == [8, 8, 1]  # the third time it was alone
    for record in innocents:
        assert bench.tokens(record) == reference_tokens(record)[0]


def test_a_suspect_runs_alone_and_others_go_on_elsewhere() -> None:
    bench = Bench()
    suspect = Request(make_record(max_tokens=6), max_output_tokens=6, now=NOW)
    suspect.deaths = 2
    busy, free = bench.join(), bench.join()
    for _ in range(2):
        bench.add(make_record(max_tokens=20))
    bench.dispatch()
    assert [len(bench.held(epoch)) for epoch in (busy, free)] == [1, 1]
    bench.router.add(suspect, NOW)
    bench.add(make_record())
    bench.dispatch()
    assert sorted(len(bench.held(epoch)) for epoch in (busy, free)) == [1, 2]  # one of them is let run empty
    bench.run(until=lambda: any(suspect.request_id in bench.held(epoch) for epoch in (busy, free)))
    alone = next(epoch for epoch in (busy, free) if suspect.request_id in bench.held(epoch))
    bench.add(make_record())
    bench.dispatch()
    assert bench.held(alone) == {suspect.request_id}
    bench.run()
    assert bench.endings()[suspect.request_id].finish_reason is FinishReason.LENGTH
    assert len(bench.endings()) == 5
    bench.add(make_record())
    bench.run()
    assert len(bench.endings()) == 6


def test_waiting_requests_can_be_aborted_and_expire() -> None:
    bench = Bench(queue_timeout_s=5)
    aborted, partly = bench.add(make_record()), bench.add(make_record(n=2))
    patient = bench.add(make_record(queue_timeout_s=60))
    assert bench.router.abort(aborted.request_id, (), NOW)[0].finish_reason is FinishReason.ABORT
    assert not bench.router.abort(partly.request_id, (1,), NOW)[0].ends_request
    assert bench.router.abort("unknown", (), NOW) == []
    assert bench.router.expire(NOW + 4) == []
    (ending,) = bench.router.expire(NOW + 6)
    assert (ending.request_id, ending.error_code) == (partly.request_id, ErrorCode.UNAVAILABLE)
    assert bench.router.num_waiting == 1
    assert bench.router.take_all(NOW) == [patient]
    assert bench.router.num_waiting == 0


def test_the_ledger_says_whether_a_worker_was_missing_or_busy() -> None:
    bench = Bench(max_tokens_per_step=4)
    first = bench.add(make_record(range(4), max_tokens=1))
    bench.join()
    second = bench.add(make_record(range(4), max_tokens=1))
    bench.dispatch()
    assert first.ledger.cause == "queued_behind"
    assert second.ledger.cause == "queued_behind"
    alone = Bench()
    assert alone.add(make_record()).ledger.cause == "queued_no_worker"
