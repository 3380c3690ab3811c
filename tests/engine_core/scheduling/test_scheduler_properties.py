"""Whatever happens in whatever order, every request ends once, with the tokens of an undisturbed run.

The fake worker checks the KV of every row in every step (in groups with a window, the KV inside it), so that a misused
block fails in the step that misuses it.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine_core.harness import Harness
from tests.fakes import FakeModel, FakeRow, make_record, mix

from pagoda_engine_core.scheduling import plan
from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.records import RequestRecord
from pagoda_proto.steps import KVGroup, StepPlan

LONG_PROMPT = [(7 * i) % 13 for i in range(24)]
BLOCK_SIZE = 4
NUM_BLOCKS = 10  # room for one long request; two of them must preempt


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    """Prompts are prefixes of one text, or differ from one in the last token, so prefix cache hits are frequent."""
    prompt = LONG_PROMPT[: draw(st.integers(1, len(LONG_PROMPT)))]
    if draw(st.booleans()):
        prompt = [*prompt[:-1], draw(st.integers(13, 16))]  # 16 is poison
    max_tokens = draw(st.sampled_from([12, 12, 1, 2, 5, 9]))
    if draw(st.integers(0, 3)) == 0:
        return draw(searches(prompt, max_tokens))
    return make_record(
        prompt,
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.sampled_from([(), (), (3, 5, 8), tuple(range(0, 32, 3))])),
        ignore_eos=draw(st.sampled_from([True, True, False])),
        logprobs=draw(st.sampled_from([None, None, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        eos_token_ids=draw(st.sampled_from([(), (1, 2)])),
        seed=draw(st.integers(0, 3)),
        cache_salt=draw(st.sampled_from(["", "", "b"])),
        adapter=draw(st.sampled_from([None, None, *ADAPTERS])),
        priority=draw(st.integers(-1, 1)),
    )


@st.composite
def searches(draw: st.DrawFn, prompt: list[int], max_tokens: int) -> RequestRecord:
    return make_record(
        prompt,
        n=draw(st.sampled_from([1, 2, 3, 3])),
        use_beam_search=True,
        length_penalty=draw(st.sampled_from([1.0, 0.0, 3.0])),
        max_tokens=max_tokens,
        stop_token_ids=draw(st.sampled_from([(), (3, 5, 8), tuple(range(0, 32, 3))])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        eos_token_ids=draw(st.sampled_from([(), (1, 2)])),
        cache_salt=draw(st.sampled_from(["", "b"])),
        priority=draw(st.integers(-1, 1)),
    )


def sometimes_hint(row: FakeRow) -> int:
    return max(0, mix(row.hashes[-1], 5) % 9 - 2)


def sometimes_accept(row: FakeRow, allowed: int) -> int:
    return min(allowed, mix(row.hashes[-1], 6) % 7)


ADAPTERS = [Adapter(digit * 64, f"/adapters/{digit}") for digit in "123"]


def check_size(planned: StepPlan | None) -> None:
    rows = planned.new_rows if planned is not None else []
    tokens, params = sum(len(row.token_ids) for row in rows), [row.params for row in rows]
    assert len(rows) <= 1 or tokens * plan.TOKEN_BYTES + len(msgspec.msgpack.encode(params)) <= plan.MESSAGE_BYTES


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.integers(1, 3),
        chunk_size=st.sampled_from([1, 3, 8, 64, 64]),
        max_tokens=st.sampled_from([2, 7, 64, 64]),
        max_rows=st.sampled_from([1, 3, 16, 16]),
        prefix_cache=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        eos_at=st.sampled_from([None, 2]),
        speculation_tokens=st.sampled_from([0, 2, 5, 16]),
        max_adapters=st.sampled_from([1, 2, 8]),
        swap=st.sampled_from([(0, "auto"), (5, "swap"), (40, "swap"), (40, "auto"), (40, "recompute")]),
        windows=st.sampled_from([(0,), (0,), (0, 9), (0, 5), (8,), (0, 12, 3), (13, 4)]),
        message_bytes=st.sampled_from([plan.MESSAGE_BYTES, 1000, 500]),
    )
    def start(
        self,
        depth,
        chunk_size,
        max_tokens,
        max_rows,
        prefix_cache,
        policy,
        eos_at,
        speculation_tokens,
        max_adapters,
        swap,
        windows,
        message_bytes,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(plan, "MESSAGE_BYTES", message_bytes)
        self.depth = depth
        self.harness = Harness(
            kv_groups=tuple(KVGroup(NUM_BLOCKS - 2 * (kept > 0), kept, swap[0]) for kept in windows),
            max_adapters=max_adapters,
            preemption=swap[1],
            block_size=BLOCK_SIZE,
            model=FakeModel(vocab_size=32, eos_at=eos_at),
            poison_token_id=16,
            poison_at=2,
            hint=sometimes_hint,
            accept=sometimes_accept,
            speculation_tokens=speculation_tokens,
            max_steps_in_flight=depth,
            chunk_size=chunk_size,
            max_tokens_per_step=max_tokens,
            max_rows=max_rows,
            prefix_cache=prefix_cache,
            policy=policy,
        )

    @rule(arrivals=st.lists(records(), min_size=1, max_size=4))
    def add(self, arrivals: list[RequestRecord]) -> None:
        for record in arrivals:
            self.harness.add(record)

    @rule()
    def plan(self) -> None:
        if self.harness.scheduler.steps_in_flight < self.depth:
            check_size(self.harness.plan())

    @precondition(lambda self: self.harness.results)
    @rule()
    def land(self) -> None:
        self.harness.land()

    @rule(steps=st.integers(1, 4))
    def few_steps(self, steps: int) -> None:
        self.many_steps(steps)

    @rule(steps=st.integers(4, 20))
    def many_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.plan()
            if len(self.harness.results) == self.depth:
                self.harness.land()

    @precondition(lambda self: self.harness.clients)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.harness.clients)))
        choices = data.draw(st.sampled_from([(), (0,), (1,), (0, 2)]))
        self.harness.receive(self.harness.scheduler.abort(request_id, choices, self.harness.clock()))

    @precondition(lambda self: self.harness.clients)
    @rule(data=st.data())
    def resubmit(self, data: st.DataObject) -> None:
        """A gateway abandons an attempt and resubmits the record with the output received so far."""
        request_id = data.draw(st.sampled_from(list(self.harness.clients)))
        client = self.harness.clients[request_id]
        if client.last is None:
            self.harness.scheduler.abort(request_id, (), self.harness.clock())  # its deltas go nowhere
            self.harness.add(client.record, attempt=1, prior=client.prior())

    @precondition(lambda self: self.harness.scheduler.num_running)
    @rule(bad_luck=st.integers(0, 3))
    def lose_worker(self, bad_luck: int) -> None:
        if bad_luck == 3:
            self.harness.lose_worker()

    @precondition(lambda self: self.harness.scheduler.num_running)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        self.harness.move(data.draw(st.sampled_from(list(self.harness.scheduler._requests.values()))))

    @rule(dropped=st.booleans())
    def reset_prefix_cache(self, dropped: bool) -> None:
        if dropped:
            self.harness.scheduler.reset_prefix_cache()

    @rule(seconds=st.sampled_from([0.5, 8.0]))
    def time_passes(self, seconds: float) -> None:
        self.harness.clock.advance(seconds)

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()
            self.patch.undo()
            self.harness.check_all()


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestScheduler = SchedulerMachine.TestCase
