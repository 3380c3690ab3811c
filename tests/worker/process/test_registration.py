"""Over faulty links: a worker resumes work by itself once the link works again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq
from tests.worker.fakes_link import Link
from tests.worker.fakes_loop import WAIT_S, FakeEngine, Worker, first_plan
from tests.worker.fakes_model import FakeModel, fake_runner

from pagoda_proto.steps import PROTOCOL_VERSION, Beat, Hello, Refused, StepResult, Versions, Welcome
from pagoda_worker.config import WorkerConfig
from pagoda_worker.process.control import NO_SIGNS, Progress
from pagoda_worker.process.departure import Departure
from pagoda_worker.process.loop import Identity
from pagoda_worker.process.registration import Registration
from pagoda_worker.process.wire import Link as WireLink

pytestmark = pytest.mark.slow


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Its ROUTER ignores a second connection with a known routing id, and detects no loss by itself."""
    made = FakeEngine("tcp://127.0.0.1:*")
    yield made
    made.close()


@pytest.fixture
def link(engine: FakeEngine) -> Iterator[Link]:
    with Link(int(engine.endpoint.rpartition(":")[2])) as made:
        yield made


@pytest.fixture
def worker(link: Link) -> Iterator[Worker]:
    made = Worker(WorkerConfig(engine=link.endpoint, worker_id="w-1", drain_timeout_s=0.0))
    yield made
    made.end()


def at_work(engine: FakeEngine, lease_s: float = 1.0) -> None:
    engine.admit(lease_s)
    engine.send(first_plan())
    assert engine.result().errors == []


def swallow(*, to_worker: bool, to_engine: bool) -> Callable[[Link], None]:
    return lambda link: link.swallow(to_worker=to_worker, to_engine=to_engine)


FAULTS = {
    "blackhole": swallow(to_worker=True, to_engine=True),
    "nothing reaches the worker": swallow(to_worker=True, to_engine=False),
    "nothing reaches the engine core": swallow(to_worker=False, to_engine=True),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_worker_behind_a_link_that_swallows_is_back_at_work_once_it_heals(
    engine: FakeEngine, link: Link, worker: Worker, fault: Callable[[Link], None]
) -> None:
    at_work(engine)
    first = engine.hello
    assert first is not None
    for _ in range(2):
        assert link.accepted.acquire(timeout=WAIT_S)
    fault(link)
    for _ in range(4):  # two further attempts, which are not answered
        assert link.accepted.acquire(timeout=WAIT_S)
    link.heal()
    at_work(engine, lease_s=60.0)
    assert engine.hello is not None
    assert engine.hello.incarnation == first.incarnation
    assert engine.hello.registration > first.registration


def test_a_worker_whose_connections_were_reset_behind_the_engine_core_s_back_is_back_at_work(
    engine: FakeEngine, link: Link, worker: Worker
) -> None:
    at_work(engine, lease_s=10 * WAIT_S)  # long enough that it is not the lease that expires
    link.reset()
    at_work(engine, lease_s=60.0)


def test_an_attempt_without_an_answer_is_given_up_and_the_next_has_connections_of_its_own(
    engine: FakeEngine, link: Link, worker: Worker
) -> None:
    engine.until(Hello)
    unanswered = engine.route
    at_work(engine)
    assert engine.hello is not None
    assert engine.hello.registration == 2
    assert engine.route != unanswered


def test_a_refused_attempt_is_over_too(engine: FakeEngine, link: Link, worker: Worker) -> None:
    engine.until(Hello)
    engine.send(Refused(reason="a worker of this name is alive"), epoch=0)
    at_work(engine)
    assert engine.hello is not None
    assert engine.hello.registration == 2


def test_a_worker_speaks_with_an_engine_core_of_the_version_before_in_that_one(engine: FakeEngine) -> None:
    engine.version = PROTOCOL_VERSION - 1
    wire = WireLink(engine.endpoint, "w-1", spoken=Versions(PROTOCOL_VERSION - 1, PROTOCOL_VERSION))
    hello = Identity.of_this_process("w-1").hello(fake_runner(FakeModel()).facts)
    departure = Departure(threading.Event(), 0.0)
    with zmq.Context() as context, Registration(context, wire, hello, Progress(), departure, NO_SIGNS) as registration:
        asking = ThreadPoolExecutor().submit(engine.admit)
        welcome = registration.ask(WAIT_S, lambda: False)
        assert isinstance(welcome, Welcome)
        asking.result(WAIT_S)
        assert engine.hello is not None
        assert engine.hello.spoken == Versions(PROTOCOL_VERSION - 1, PROTOCOL_VERSION)
        registration.admit(welcome)
        engine.send(first_plan())
        assert registration.receive(WAIT_S) == first_plan()
        assert registration.send(StepResult(step=1))
        assert engine.result() == StepResult(step=1)
        assert engine.until(Beat)[0].version == PROTOCOL_VERSION - 1
