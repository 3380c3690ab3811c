"""A scheduler, a FakeRunner, and a client that checks what it receives: index by index, one ending per request."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from tests.engine_core.fake_worker import make_hello
from tests.fakes import (
    FakeModel,
    FakeRow,
    FakeRunner,
    ManualClock,
    ReferenceChoice,
    prefix_hashes,
    reference_outputs,
)

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.dispatch.policy import POLICIES
from pagoda_engine_core.scheduling.beams import BeamSearch
from pagoda_engine_core.scheduling.decoding import News
from pagoda_engine_core.scheduling.request import Request
from pagoda_engine_core.scheduling.scheduler import Scheduler
from pagoda_proto.decodes import DecodeList
from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import num_candidates
from pagoda_proto.records import Delta, FinishReason, PriorOutput, RequestRecord, Resume
from pagoda_proto.steps import Decodes, KVGroup, NewRow, StepPlan, StepResult, TopLogprobs

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def causes(delta: Delta | None) -> dict[str, float]:
    """Seconds that the request waited, by cause, from the ledger in its ending."""
    assert delta is not None
    assert delta.ledger is not None
    return {entry.cause: entry.seconds for entry in delta.ledger}


class Client:
    """What arrived for one request."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.tokens: list[list[int]] = [[] for _ in range(record.task.params.n)]
        self.reasons: list[FinishReason | None] = [None] * record.task.params.n
        self.stop_token_ids: list[int | None] = [None] * record.task.params.n
        self.logprobs: list[TopLogprobs] = []
        self.prompt_logprobs: list[list[TopLogprobs]] = []
        self.error_code: ErrorCode | None = None
        self.error_message = ""
        self.last: Delta | None = None  # the ending

    def receive(self, delta: Delta) -> None:
        assert self.last is None, "a delta after the ending"
        assert delta.result.first_index == len(self.tokens[delta.choice]), "a gap or a repetition"
        assert self.reasons[delta.choice] is None or (delta.ends_request and not delta.result.token_ids)
        self.tokens[delta.choice] += delta.result.token_ids
        if delta.result.logprobs is not None:
            assert len(delta.result.logprobs) == len(delta.result.token_ids)
            self.logprobs += delta.result.logprobs
        if delta.result.prompt_logprobs is not None:
            self.prompt_logprobs.append(delta.result.prompt_logprobs)
        if delta.finish_reason is not None:
            self.reasons[delta.choice] = delta.finish_reason
            self.stop_token_ids[delta.choice] = delta.result.stop_token_id
            self.error_code = delta.error_code or self.error_code
            self.error_message = delta.error_message or self.error_message
        if delta.ends_request:
            assert delta.ledger is not None
            assert None not in self.reasons, "the ending came before a choice's"
            assert delta.usage is not None
            assert delta.usage.output_tokens == sum(map(len, self.tokens))
            self.last = delta

    def prior(self) -> list[PriorOutput]:
        """Everything received, as a gateway would send it with the next attempt."""
        return [
            PriorOutput(choice=index, token_ids=list(tokens), finished=self.reasons[index] is not None)
            for index, tokens in enumerate(self.tokens)
        ]

    def check_against_reference(self, model: FakeModel) -> None:
        """Choices that ended by themselves match the reference exactly, all others are a prefix of it."""
        searches = self.record.task.params.use_beam_search
        for index, reference in enumerate((found_outputs if searches else reference_outputs)(self.record, model)):
            if self.reasons[index] in (FinishReason.STOP, FinishReason.LENGTH):
                got = (self.tokens[index], self.reasons[index], self.stop_token_ids[index])
                assert got == reference
            else:
                assert self.tokens[index] == reference.token_ids[: len(self.tokens[index])]
        params, prompt = self.record.task.params, self.record.prompt_token_ids
        assert len(self.logprobs) == (0 if params.logprobs is None else sum(map(len, self.tokens)))
        if params.prompt_logprobs is not None and self.tokens[0]:
            known = list(zip(prefix_hashes(prompt, self.record.adapter), prompt[1:], strict=False))
            expected = [model.logprobs(prefix, token, params.prompt_logprobs) for prefix, token in known]
            assert self.prompt_logprobs == [expected], "prompt log-probabilities go out once"
        else:
            assert self.prompt_logprobs == []


def found_outputs(record: RequestRecord, model: FakeModel) -> list[ReferenceChoice]:
    """The expected output of a beam search: `BeamSearch` run directly on the model."""
    task, params = record.task, record.task.params
    assert params.max_tokens is not None
    search = BeamSearch(params.n, params.length_penalty, task.ends, params.max_tokens, params.logprobs)
    asked = msgspec.structs.replace(params, temperature=0.0, logprobs=num_candidates(params, len(task.ends)))
    while not search.done:
        for place, beam in enumerate(search.running):
            tokens = [*record.prompt_token_ids, *beam.token_ids]
            row = NewRow(
                row_id=0, token_ids=tokens, num_prompt_tokens=1, num_computed=0, block_ids=[], params=asked,
                seed=task.seed, choice=place, eos_token_ids=() if params.ignore_eos else task.eos_token_ids,
            )  # fmt: skip
            prefix = prefix_hashes(tokens)[-1]
            token = model.next_token(prefix, row, len(beam.token_ids))
            search.find(place, model.logprobs(prefix, token, asked.logprobs or 0))
        search.advance()
    return [
        ReferenceChoice(list(beam.token_ids), *((STOP, beam.token_ids[-1]) if at_end else (LENGTH, None)))
        for beam, _, at_end in search.best
    ]


class Harness:
    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        num_swap_blocks: int = 0,
        swap_block_s: float = 0.0,
        kv_groups: tuple[KVGroup, ...] = (),
        max_adapters: int = 1,
        model: FakeModel | None = None,
        poison_token_id: int | None = None,
        poison_at: int = 0,
        hint: Callable[[FakeRow], int] = lambda row: 0,
        accept: Callable[[FakeRow, int], int] = lambda row, allowed: 0,
        **config: Any,
    ) -> None:
        self.model = model or FakeModel()
        one = (KVGroup(num_blocks, num_swap_blocks=num_swap_blocks, swap_block_s=swap_block_s),)
        self.kv_groups = kv_groups or (one if num_blocks else ())
        self.block_size = block_size
        self.max_adapters = max_adapters
        self.config = EngineConfig(**({"max_steps_in_flight": 1, "max_rows": 16} | config))
        self.clock = ManualClock()
        self.clients: dict[str, Client] = {}
        self.plans: list[StepPlan] = []
        self._behaviour: dict[str, Any] = {
            "poison_token_id": poison_token_id, "poison_at": poison_at, "hint": hint, "accept": accept,
        }  # fmt: skip
        self._row_ids: Iterator[int] = itertools.count()
        self.results: deque[StepResult] = deque()
        self.new_worker()

    def new_worker(self) -> None:
        self.runner = FakeRunner(
            0,
            self.block_size,
            self.model,
            max_rows=self.config.max_rows,
            max_tokens_per_step=self.config.max_tokens_per_step,
            kv_groups=self.kv_groups,
            max_adapters=self.max_adapters,
            **self._behaviour,
        )
        hello = make_hello(
            kv_groups=self.kv_groups,
            block_size=self.block_size,
            max_adapters=self.max_adapters,
        )
        self.scheduler = Scheduler(self.config, hello, POLICIES[self.config.policy], self._row_ids)
        self.results.clear()
        self._decodes = DecodeList()

    @property
    def has_work(self) -> bool:
        """Whether a choice waits, a row can advance, or a row must be dropped."""
        scheduler = self.scheduler
        advancing = any(choice.distance for choice in scheduler._rows.running)
        return bool(scheduler._rows.waiting or scheduler._rows.dropped) or advancing

    def request(self, record: RequestRecord, *, attempt: int = 0, prior: Sequence[PriorOutput] = ()) -> Request:
        limit = record.task.params.max_tokens
        assert limit is not None
        return Request(
            record,
            max_output_tokens=limit,
            now=self.clock(),
            attempt=attempt,
            resume=Resume(prior_outputs=tuple(prior)),
        )

    def add(self, record: RequestRecord, *, attempt: int = 0, prior: Sequence[PriorOutput] = ()) -> Request:
        request = self.request(record, attempt=attempt, prior=prior)
        if attempt == 0:
            client = self.clients[record.request_id] = Client(record)
            for output in prior:  # as if an earlier attempt had delivered it
                client.tokens[output.choice] = list(output.token_ids)
                if output.finished:
                    client.reasons[output.choice] = FinishReason.ABORT
        self.receive(self.scheduler.add(request, self.clock()))
        return request

    def receive(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.clients[delta.request_id].receive(delta)

    def plan(self) -> StepPlan | None:
        """Schedule one step and have the worker execute it; its result waits for `land`. Returns the plan, with a chunk
        for every decoding row."""
        plan = self.scheduler.schedule(self.clock())
        if plan is None:
            return None
        self.results.append(self.runner.execute(plan))
        self.plans.append(msgspec.structs.replace(plan, chunks=self._decodes.chunks(plan), decodes=Decodes()))
        return self.plans[-1]

    def land(self, forward_s: float = 0.0) -> list[Delta]:
        """Apply the oldest result, as if the worker had taken `forward_s` for it."""
        result = msgspec.structs.replace(self.results.popleft(), forward_s=forward_s)
        deltas = self.apply(result)
        self.receive(deltas)
        return deltas

    def apply(self, result: StepResult) -> list[Delta]:
        news = News()
        self.scheduler.apply(result, self.clock(), news)
        return news.tokens.deltas() + news.deltas

    def step(self) -> StepPlan:
        """Plan a step that must not be empty, and apply its result."""
        plan = self.plan()
        assert plan is not None
        self.land()
        return plan

    def lose_worker(self) -> list[Request]:
        """The worker dies; a new one takes over everything."""
        requests = self.scheduler.take_back(self.clock())
        self.scheduler.check_invariants()
        assert not self.has_work
        assert self.scheduler.block_counts.blocks_used == self.scheduler.block_counts.swap_blocks_used == 0
        self.new_worker()
        for request in requests:
            self.receive(self.scheduler.add(request, self.clock()))
        return requests

    def move(self, request: Request) -> None:
        """The request leaves while the worker continues with the others, and is added again, as to another worker."""
        self.scheduler.release(request.request_id, self.clock())
        self.scheduler.check_invariants()
        assert request.num_rows == 0
        self.receive(self.scheduler.add(request, self.clock()))

    def drain(self, max_steps: int = 3000) -> None:
        """Run until nothing is left, with as many steps in flight as allowed."""
        for _ in range(max_steps):
            while self.scheduler.steps_in_flight < self.config.max_steps_in_flight and self.plan():
                pass
            if not self.results:
                break
            self.land()
            self.scheduler.check_invariants()
        assert self.scheduler.num_waiting == self.scheduler.num_running == self.scheduler.queued_tokens == 0, "stuck"
        assert self.scheduler.block_counts.blocks_used == self.scheduler.block_counts.swap_blocks_used == 0
        assert not self.runner.rows, "the worker was not told to drop these rows"

    def check_all(self) -> None:
        for client in self.clients.values():
            assert client.last is not None, "no ending"
            client.check_against_reference(self.model)
