"""Pooling requests: computed in chunks over the KV cache, or whole without one; each ends once, with a vector."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.engine_core.fake_worker import make_hello
from tests.fakes import FakeRunner, make_pool_record, pooled_of

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.dispatch.policy import POLICIES
from pagoda_engine_core.scheduling.decoding import News
from pagoda_engine_core.scheduling.ledger import Cause
from pagoda_engine_core.scheduling.plan import MESSAGE_BYTES, row_bytes
from pagoda_engine_core.scheduling.request import Request
from pagoda_engine_core.scheduling.scheduler import Scheduler
from pagoda_proto.channel import MAX_FRAME_BYTES
from pagoda_proto.errors import PagodaError
from pagoda_proto.pooling.params import EMBED, TOKEN_EMBED
from pagoda_proto.records import Delta, FinishReason
from pagoda_proto.steps import RowOutput, StepPlan, StepResult

STEP = 32


class World:
    """A scheduler with a fake worker; `deltas` is keyed by request id."""

    def __init__(self, num_blocks: int, **config: Any) -> None:
        options = {"max_tokens_per_step": STEP, "chunk_size": 16, "prompt_step_s": 0.0}
        self.runner = FakeRunner(num_blocks=num_blocks)
        hello = make_hello(num_blocks=num_blocks, block_size=4, pools=(EMBED,), pooled_width=2)
        self.scheduler = Scheduler(EngineConfig(**options | config), hello, POLICIES["fcfs"], itertools.count(1))
        self.deltas: dict[str, list[Delta]] = {}
        self.plans: list[StepPlan] = []

    def add(self, *prompts: list[int]) -> list[Request]:
        records = [make_pool_record(prompt) for prompt in prompts]
        requests = [Request(record, max_output_tokens=1, now=0.0) for record in records]
        for request in requests:
            assert self.scheduler.add(request, 0.0) == []
        return requests

    def step(self) -> bool:
        plan = self.scheduler.schedule(0.0)
        self.scheduler.check_invariants()
        if plan is None:
            return False
        self.plans.append(plan)
        self.apply(self.runner.execute(plan))
        return True

    def apply(self, result: StepResult) -> None:
        news = News()
        self.scheduler.apply(result, 0.0, news)
        assert not news.tokens
        for delta in news.deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)
        self.scheduler.check_invariants()

    def run(self) -> None:
        while self.step():
            pass


def check_ended(world: World, request: Request) -> None:
    (delta,) = world.deltas[request.request_id]
    assert (delta.pooled, delta.finish_reason) == (pooled_of(request.record.prompt_token_ids), FinishReason.STOP)
    assert delta.usage is not None
    assert (delta.usage.prompt_tokens, delta.usage.output_tokens) == (request.num_prompt_tokens, 0)


def prompts(*sizes: int) -> list[list[int]]:
    return [[100 + i, *range(size - 1)] for i, size in enumerate(sizes)]


@pytest.mark.parametrize("num_blocks", [0, 64])
def test_every_prompt_gets_its_vector_and_one_ending(num_blocks: int) -> None:
    world = World(num_blocks)
    requests = world.add(*prompts(1, 5, 30, 17, 33, 2, 16))
    world.run()
    for request in requests:
        check_ended(world, request)
    assert world.scheduler.num_rows == world.scheduler.num_waiting == 0
    assert world.scheduler.block_counts.blocks_used == 0


def test_with_a_cache_prompts_come_in_chunks_and_share_their_beginnings() -> None:
    world = World(64)
    prompt = list(range(40))
    world.add(prompt)
    world.run()
    assert [chunk.num_tokens for plan in world.plans for chunk in plan.chunks] == [16, 16, 8]
    (request,) = world.add([*prompt[:36], 99])
    world.run()
    (delta,) = world.deltas[request.request_id]
    assert delta.usage is not None
    assert delta.usage.cached_prompt_tokens == 36
    assert delta.pooled == pooled_of([*prompt[:36], 99])


def test_without_blocks_steps_are_filled_with_whole_prompts_in_order() -> None:
    world = World(0)
    world.add(*prompts(20, 10, 5, 2, 50, 3))
    world.run()
    steps = [[chunk.num_tokens for chunk in plan.chunks] for plan in world.plans if plan.chunks]
    assert steps == [[20, 10], [5, 2], [50], [3]]  # a prompt longer than a step gets one to itself


def test_who_waits_for_a_whole_step_says_so() -> None:
    world = World(0)
    first, second = world.add(*prompts(20, 20))
    world.scheduler.schedule(0.0)
    assert first.ledger.cause is Cause.PREFILL
    assert second.ledger.cause is Cause.QUEUED_BUDGET


def test_a_room_takes_what_fits_whole() -> None:
    world = World(0)
    big, small = (Request(make_pool_record(p), max_output_tokens=1, now=0.0) for p in prompts(40, 4))
    room = world.scheduler.room()
    assert room.lacks(world.scheduler.need(big, room)) is None
    room.take(world.scheduler.need(big, room))
    assert room.full
    assert room.lacks(world.scheduler.need(small, room)) is Cause.QUEUED_BUDGET


def test_what_rows_are_read_as_fits_into_one_message() -> None:
    """Per-token vectors take at most 4 MiB for a prompt, and 48 MiB for all prompts that may end in one step."""
    world = World(0, max_rows=64, max_tokens_per_step=1 << 20)
    records = [make_pool_record([1] * 100, request_id=f"{i}", output=TOKEN_EMBED) for i in range(20)]
    world.scheduler._pooled_width = 10240
    requests = [Request(record, max_output_tokens=1, now=0.0) for record in records]
    room, begun = world.scheduler.room(), 0
    while room.lacks(need := world.scheduler.need(requests[begun], room)) is None:
        room.take(need)
        world.scheduler.add(requests[begun], 0.0)
        begun += 1
    assert begun == MESSAGE_BYTES // (100 * 10240 * 4 + row_bytes(requests[0].choices[0]))
    again = world.scheduler.room()
    assert again.lacks(world.scheduler.need(requests[begun], again)) is Cause.QUEUED_BUDGET
    small = Request(make_pool_record([1] * 100, request_id="small"), max_output_tokens=1, now=0.0)
    assert again.lacks(world.scheduler.need(small, again)) is None
    assert MESSAGE_BYTES < MAX_FRAME_BYTES


def test_an_abort_ends_it_once_and_frees_all() -> None:
    world = World(64)
    (request,) = world.add(list(range(40)))
    plan = world.scheduler.schedule(0.0)
    assert plan is not None
    (delta,) = world.scheduler.abort(request.request_id, (), 0.0)
    assert (delta.pooled, delta.finish_reason, delta.ends_request) == (b"", FinishReason.ABORT, True)
    world.apply(world.runner.execute(plan))
    world.run()
    assert request.request_id not in world.deltas
    assert world.scheduler.block_counts.blocks_used == 0


def test_a_lost_worker_costs_nothing_but_time() -> None:
    world, other = World(64), World(0)
    (request,) = world.add(list(range(40)))
    assert world.step()
    (taken,) = world.scheduler.take_back(1.0)
    assert other.scheduler.add(taken, 1.0) == []
    other.run()
    check_ended(other, request)
    usage = other.deltas[request.request_id][0].usage
    assert usage is not None
    assert usage.replays == 1


def test_rows_that_lack_blocks_give_way_and_come_back() -> None:
    world = World(12)
    requests = world.add(*prompts(40, 40, 40))
    world.run()
    for request in requests:
        check_ended(world, request)


@pytest.mark.parametrize(
    "output",
    [
        RowOutput(1, [5]),
        RowOutput(1, []),
        RowOutput(1, [], pooled=b"123"),
        RowOutput(1, [3], pooled=b"1234"),
        RowOutput(1, [], pooled=bytes(4 * 1024 * 1024 + 4)),
    ],
)
def test_a_worker_that_answers_something_else_is_refused(output: RowOutput) -> None:
    world = World(0)
    world.add([1, 2, 3])
    plan = world.scheduler.schedule(0.0)
    assert plan is not None
    with pytest.raises(PagodaError, match="must yield"):
        world.scheduler.apply(StepResult(step=plan.step, outputs=[output]), 0.0, News())


def test_one_token_that_is_left_over_is_no_token_to_sample() -> None:
    """A prompt's last single token is planned among the decodes, but its result is a vector."""
    world = World(64)
    (request,) = world.add(list(range(17)))
    world.run()
    check_ended(world, request)
    assert [plan.decodes.count for plan in world.plans if plan.num_rows] == [0, 1]
    world.add(list(range(50, 67)))
    assert world.step()
    plan = world.scheduler.schedule(0.0)
    assert plan is not None
    with pytest.raises(PagodaError, match="must yield a vector"):
        world.scheduler.apply(StepResult(step=plan.step, tokens=[7]), 0.0, News())
