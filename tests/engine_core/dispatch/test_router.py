from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator

import pytest
from tests.engine_core.fake_worker import make_hello, runner_of
from tests.fakes import FakeRunner, make_record, reference_tokens

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.dispatch.router import MAX_LOST_LIVES, Router
from pagoda_engine_core.scheduling.decoding import News
from pagoda_engine_core.scheduling.request import Request
from pagoda_engine_core.scheduling.room import Room
from pagoda_engine_core.workers.executor import LeaveCause, WorkerLeft, WorkerState
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Delta, FinishReason, RequestRecord
from pagoda_proto.times import NO_WORKER_WAIT_S

NOW = 50.0


class Bench:
    """A router whose workers' plans are computed at once by FakeRunners."""

    def __init__(self, **config: object) -> None:
        self.router = Router(EngineConfig(**config))
        self.runners: dict[int, FakeRunner] = {}
        self.deltas: list[Delta] = []
        self.now = NOW
        self._epochs = itertools.count(1)

    def join(self, **hello: object) -> int:
        epoch = next(self._epochs)
        worker = self.router.join(epoch, make_hello(f"w{epoch}", **hello))
        self.runners[epoch] = runner_of(worker.hello)
        return epoch

    def add(self, record: RequestRecord) -> Request:
        request = Request(record, max_output_tokens=record.task.params.max_tokens or 1, now=self.now)
        self.router.add(request, self.now)
        return request

    def rooms(self) -> dict[int, Room]:
        return {worker.epoch: worker.scheduler.room() for worker in self.router.plannable(self.now)}

    def dispatch(self) -> None:
        self.deltas += self.router.dispatch(self.rooms(), self.now)

    def step(self, epoch: int, seconds: float = 0.0) -> bool:
        worker = self.router.workers[epoch]
        plan = worker.scheduler.schedule(self.now)
        if plan is None:
            return False
        worker.pace.asked(plan.num_tokens, self.now)
        result = self.runners[epoch].execute(plan)
        news = News()
        worker.scheduler.apply(result, self.now + seconds, news)
        self.router.stepped(worker, result.elapsed_s, self.now + seconds)
        self.deltas += self.router.note_endings(worker, news.tokens.deltas() + news.deltas)
        return True

    def lose(self, epoch: int, cause: LeaveCause = LeaveCause.DIED, step: int = 0) -> None:
        self.deltas += self.router.leave(WorkerLeft(epoch, cause, "test", step), self.now)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while not until():
            self.dispatch()
            if not any([self.step(epoch) for epoch in self.router.workers]):  # noqa: C419 - every worker takes a step
                return

    def held(self, epoch: int) -> set[str]:
        return set(self.router.workers[epoch].requests)

    def tokens(self, record: RequestRecord) -> list[int]:
        return [t for delta in self.deltas if delta.request_id == record.request_id for t in delta.result.token_ids]

    def endings(self) -> dict[str, Delta]:
        return {delta.request_id: delta for delta in self.deltas if delta.ends_request}


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("end", ["computed", "stopped", "stopped in the queue", "expired"])
def test_of_what_has_ended_nothing_stays_until_garbage_is_looked_for(end: str) -> None:
    bench = Bench(queue_timeout_s=5.0)
    request = weakref.ref(bench.add(make_record((1, 2, 3), request_id="a", max_tokens=4)))
    if end in ("computed", "stopped"):
        bench.join()
        bench.dispatch()
        assert bench.step(1)
        bench.run(until=lambda: end == "stopped")
    if end.startswith("stopped"):
        bench.router.abort("a", (), bench.now)
    bench.deltas += bench.router.expire(bench.now + 6.0)
    bench.run()
    assert request() is None


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
    bench.router.workers[1].state = WorkerState.SUSPECT
    bench.add(make_record(prompt))
    bench.run()
    bench.router.workers[1].state = WorkerState.READY
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


@pytest.mark.parametrize("short", ["rows", "tokens", "blocks"])
def test_nobody_waits_behind_strangers_in_a_group(short: str) -> None:
    config = {"rows": {"max_rows": 3}, "tokens": {"max_tokens_per_step": 25}, "blocks": {}}[short]
    bench = Bench(**config)
    epoch = bench.join(num_blocks=10 if short == "blocks" else 64)
    for seed in range(8):
        bench.add(make_record(range(seed, seed + 8), max_tokens=6, seed=seed))
    while len(bench.endings()) < 8:
        bench.dispatch()
        bench.step(epoch)
        worker = bench.router.workers[epoch]
        assert not worker.scheduler.num_waiting or worker.scheduler.totals.preemptions
    assert bench.router.num_waiting == 0


def test_who_waits_for_room_is_not_overtaken_on_the_workers_that_could_take_him() -> None:
    bench = Bench(max_rows=2)
    large, small = bench.join(num_blocks=64), bench.join(num_blocks=4)
    for seed in range(2):
        bench.add(make_record(range(40), max_tokens=30, seed=seed))
    bench.dispatch()
    assert len(bench.held(large)) == 2
    head = bench.add(make_record(range(40), max_tokens=4))
    behind = [bench.add(make_record((1, 2), max_tokens=4, seed=seed)) for seed in range(3)]
    bench.step(large)
    bench.dispatch()
    assert bench.held(small) == {behind[0].request_id, behind[1].request_id}  # the head would not fit there anyway
    assert head.ledger.cause in ("queued_rows", "queued_behind")
    bench.router.abort(next(iter(bench.held(large))), (), NOW)
    bench.dispatch()
    assert head.request_id in bench.held(large)
    assert behind[2].request_id not in bench.held(large)


def test_small_requests_do_not_starve_a_large_one() -> None:
    bench = Bench()
    epoch = bench.join(num_blocks=16)
    running = bench.add(make_record(range(40), max_tokens=4))
    bench.dispatch()
    bench.step(epoch)
    head = bench.add(make_record(range(100, 140), max_tokens=4))
    small = bench.add(make_record((1, 2), max_tokens=2))
    bench.dispatch()
    assert bench.held(epoch) == {running.request_id}  # though the small one would fit
    assert head.ledger.cause == "queued_blocks"
    bench.run()
    order = [delta.request_id for delta in bench.deltas if delta.ends_request]
    assert order.index(running.request_id) == 0
    assert set(order) == {running.request_id, head.request_id, small.request_id}


def test_what_has_begun_waits_for_busy_workers_as_long_as_it_takes() -> None:
    bench = Bench(max_rows=1)
    first, second = bench.join(), bench.join()
    requests = [bench.add(make_record((i, 1), max_tokens=200, seed=i)) for i in range(2)]
    bench.dispatch()
    bench.step(first)
    bench.step(second)
    bench.lose(second)
    for _ in range(20):
        bench.now += NO_WORKER_WAIT_S / 4
        bench.deltas += bench.router.expire(bench.now)
        bench.dispatch()
    assert bench.router.num_waiting == 1
    assert not bench.endings()
    bench.run()
    assert {ending.finish_reason for ending in bench.endings().values()} == {FinishReason.LENGTH}
    assert len(bench.endings()) == len(requests)


def test_a_prompt_is_hashed_once_however_long_it_waits() -> None:
    bench = Bench(max_rows=1)
    epochs = [bench.join(block_size=4), bench.join(block_size=8)]
    for seed in range(2):
        bench.add(make_record(max_tokens=40, seed=seed))
    head = bench.add(make_record(range(30)))
    bench.dispatch()
    for epoch in epochs:
        bench.step(epoch)
    before = dict(head.choices[0].chains)
    for _ in range(5):
        bench.dispatch()
        for epoch in epochs:
            bench.step(epoch)
    assert all(head.choices[0].chains[size] is chain for size, chain in before.items())


def test_a_slow_worker_gets_its_share() -> None:
    """A worker that is four times slower gets a fifth of the work."""
    bench = Bench()
    quick, slow = bench.join(), bench.join()
    for seed in range(40):  # makes the speed of both known
        for _ in range(6):
            bench.add(make_record(max_tokens=2, seed=seed))
        bench.dispatch()
        while bench.step(quick, 0.01) + bench.step(slow, 0.04):
            bench.now += 10.0
    for seed in range(30):
        bench.add(make_record(max_tokens=50, seed=seed))
    bench.dispatch()
    assert 3 <= len(bench.held(slow)) <= 10


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


def test_a_failed_step_blames_the_rows_of_that_step_only() -> None:
    bench = Bench(max_steps_in_flight=2)
    epoch = bench.join()
    first = bench.add(make_record(max_tokens=10))
    bench.dispatch()
    worker = bench.router.workers[epoch]
    worker.scheduler.schedule(NOW)
    second = bench.add(make_record(max_tokens=10))
    bench.dispatch()
    assert bench.held(epoch) == {first.request_id, second.request_id}
    worker.scheduler.schedule(NOW)
    bench.lose(epoch, LeaveCause.STEP_FAILED, step=1)
    assert (first.deaths, second.deaths) == (1, 0)


def test_a_token_clears_a_request() -> None:
    bench = Bench()
    requests = [bench.add(make_record((i, 1), max_tokens=20, seed=i)) for i in range(6)]
    for _ in range(12):
        epoch = bench.join()
        bench.dispatch()
        assert len(bench.held(epoch)) == 6  # no request is ever isolated
        bench.step(epoch)
        bench.lose(epoch)
    assert [request.deaths for request in requests] == [1] * 6
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
    """It kills in its first step, so at first no request in the same batch has produced a token either."""
    bench = Bench()
    poison = make_record((66, 6), max_tokens=20)
    innocents = [make_record((i, 1), max_tokens=20, seed=i) for i in range(7)]
    for record in (*innocents, poison):
        bench.add(record)
    lost = 0
    while len(bench.endings()) < 8:
        epoch = bench.join() if not bench.router.workers else next(iter(bench.router.workers))
        bench.dispatch()
        if poison.request_id in bench.held(epoch):
            bench.router.workers[epoch].scheduler.schedule(NOW)
            lost += 1
            bench.lose(epoch)
        else:
            assert bench.step(epoch)
    endings = bench.endings()
    assert endings[poison.request_id].error_code is ErrorCode.REQUEST_FAILED_REPEATEDLY
    assert lost == 3
    for record in innocents:
        assert bench.tokens(record) == reference_tokens(record)[0]


def test_each_ending_of_a_lost_worker_is_told_though_another_request_breaks_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    epoch = bench.join()
    convicted, broken, plain = (bench.add(make_record([i], max_tokens=9)) for i in range(3))
    bench.dispatch()
    assert bench.step(epoch)
    convicted.lost_lives = MAX_LOST_LIVES
    add = bench.router.add

    def breaks(request: Request, now: float) -> None:
        if request is broken:
            raise RuntimeError("this one is odd")
        add(request, now)

    monkeypatch.setattr(bench.router, "add", breaks)
    bench.lose(epoch)
    assert {name: one.error_code for name, one in bench.endings().items()} == {
        convicted.request_id: ErrorCode.INTERNAL,
        broken.request_id: ErrorCode.INTERNAL,
    }
    bench.join()
    bench.run()
    assert bench.tokens(plain.record) == reference_tokens(plain.record)[0]


def make_suspect(bench: Bench, record: RequestRecord) -> Request:
    request = Request(record, max_output_tokens=record.task.params.max_tokens or 1, now=NOW)
    request.deaths = 2
    bench.router.add(request, NOW)
    return request


def test_a_suspect_proves_itself_by_a_token_while_others_run_beside_it() -> None:
    bench = Bench(chunk_size=2)
    epoch = bench.join()
    first, second = (make_suspect(bench, make_record(range(i, i + 6), max_tokens=9)) for i in range(2))
    plain = bench.add(make_record(max_tokens=9))
    bench.dispatch()
    assert bench.held(epoch) == {first.request_id, plain.request_id}  # one suspect at a time; a new request gets in
    bench.step(epoch)
    bench.dispatch()
    assert second.request_id not in bench.held(epoch)
    bench.run(until=lambda: second.request_id in bench.held(epoch))
    assert bench.tokens(first.record)  # one token acquits
    assert first.request_id in bench.held(epoch)
    bench.run()
    assert len(bench.endings()) == 3
    assert all(ending.finish_reason is FinishReason.LENGTH for ending in bench.endings().values())


def test_a_search_proves_itself_by_what_it_finds_and_tells_nobody() -> None:
    bench = Bench()
    epoch = bench.join()
    first, second = (make_suspect(bench, make_record([i], use_beam_search=True, n=2, max_tokens=9)) for i in range(2))
    bench.dispatch()
    assert bench.router.workers[epoch].suspect == first.request_id
    bench.step(epoch)
    bench.dispatch()
    assert (bench.router.workers[epoch].suspect, bench.deltas) == (second.request_id, [])


@pytest.mark.parametrize("same_process", [True, False])
def test_a_link_that_is_cut_again_and_again_convicts_nobody(same_process: bool) -> None:
    """If the same process registers again, its step did not kill it; another process in its place proves nothing."""
    bench = Bench(chunk_size=2)
    one, other = (bench.add(make_record(range(i, i + 6), max_tokens=9)) for i in range(2))
    for life in range(8):
        epoch = bench.join(incarnation="the process" if same_process else f"process {life}")
        bench.dispatch()
        bench.router.workers[epoch].scheduler.schedule(NOW)
        bench.lose(epoch, LeaveCause.SILENT)
    bench.join(incarnation="the process")
    bench.run()
    ended = {name: ending.error_code for name, ending in bench.endings().items()}
    convicted = None if same_process else ErrorCode.REQUEST_FAILED_REPEATEDLY
    assert ended == {one.request_id: convicted, other.request_id: convicted}


def test_a_death_that_was_one_stays_one_when_somebody_silent_comes_back() -> None:
    bench = Bench(chunk_size=2)
    request = bench.add(make_record(range(6), max_tokens=9))
    far = bench.join(incarnation="far")
    bench.dispatch()
    bench.router.workers[far].scheduler.schedule(NOW)
    bench.lose(far, LeaveCause.SILENT)
    epoch = bench.join()
    bench.run(until=lambda: bool(bench.tokens(request.record)))
    for _ in range(2):
        bench.lose(epoch)
        epoch = bench.join()
        bench.dispatch()
        bench.router.workers[epoch].scheduler.schedule(NOW)
    bench.join(incarnation="far")
    assert request.deaths == 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_makes_workers_silent_and_kills_none_is_set_apart(num_workers: int) -> None:
    """It ends once it has cost enough lives; no other request does."""
    bench = Bench()
    poison, *innocents = (make_record(range(i, i + 6), max_tokens=9) for i in range(8))
    for record in (*innocents, poison):
        bench.add(record)
    epochs = {bench.join(incarnation=f"process {number}"): f"process {number}" for number in range(num_workers)}
    lost = 0
    while poison.request_id not in bench.endings():
        bench.dispatch()
        for epoch, incarnation in list(epochs.items()):
            if poison.request_id in bench.held(epoch):
                bench.router.workers[epoch].scheduler.schedule(NOW)
                lost += 1
                bench.lose(epoch, LeaveCause.SILENT)
                del epochs[epoch]
                epochs[bench.join(incarnation=incarnation)] = incarnation
            else:
                bench.step(epoch)
    bench.run()
    assert lost <= 20
    for record in innocents:
        assert bench.tokens(record) == reference_tokens(record)[0]


def test_only_the_unproven_suspect_is_convicted() -> None:
    bench = Bench(chunk_size=2)
    epoch = bench.join()
    suspect = make_suspect(bench, make_record(range(6)))
    bystander = bench.add(make_record())
    bystander.deaths = 1
    bench.dispatch()
    bench.step(epoch)
    bench.lose(epoch)
    assert bench.endings()[suspect.request_id].error_code is ErrorCode.REQUEST_FAILED_REPEATEDLY
    assert bystander.deaths == 2
    for _ in range(3):
        epoch = bench.join()
        bench.dispatch()
        bench.step(epoch)
        bench.lose(epoch, LeaveCause.RENEWED)
    assert bystander.request_id not in bench.endings()


def test_what_no_worker_ever_makes_a_token_of_ends_whoever_is_to_blame() -> None:
    bench = Bench(chunk_size=1)
    request = bench.add(make_record())
    for count in range(MAX_LOST_LIVES):
        assert not bench.endings(), count
        epoch = bench.join()
        bench.dispatch()
        bench.step(epoch)
        bench.lose(epoch, LeaveCause.RESET)
    assert bench.endings()[request.request_id].error_code is ErrorCode.INTERNAL


def test_a_request_expires_at_its_own_time_whatever_came_before_it() -> None:
    bench = Bench(queue_timeout_s=60)
    for seconds in (40, 0, 20, 0, 5):
        bench.add(make_record(request_id=f"{seconds}-{bench.router.num_waiting}", queue_timeout_s=seconds))
    expired = {
        second: [ending.request_id for ending in bench.router.expire(NOW + second)] for second in (4, 6, 19, 21, 59, 61)
    }
    assert expired == {4: [], 6: ["5-4"], 19: [], 21: ["20-2"], 59: ["40-0"], 61: ["0-1", "0-3"]}
    bench.now = NOW + 100
    bench.add(make_record(request_id="later", queue_timeout_s=1))
    assert [ending.request_id for ending in bench.router.expire(NOW + 102)] == ["later"]


def test_waiting_requests_can_be_aborted_and_expire() -> None:
    bench = Bench(queue_timeout_s=60)
    aborted, partly = bench.add(make_record()), bench.add(make_record(n=2, queue_timeout_s=5))
    patient = bench.add(make_record())
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
