"""However often and wherever a request is lost, it goes on where it began or says why not, and ends exactly once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.fake_engine_core import next_token
from tests.gateway.streams import record, waits

from pagoda_gateway.engine.model_view import ModelView
from pagoda_gateway.engine.pooled_generation import PooledGeneration
from pagoda_gateway.engine.request_meter import RequestMeter
from pagoda_gateway.engine.request_pool import RequestPool
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.convert import begun_to_pb
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import Begun, Delta, FinishReason, Load, RequestRecord
from pagoda_proto.times import LivedClock

HERE = ModelView(fingerprint="m1", numerics_id="n1", vocab_size=512)
BEGUN = Begun(model_fingerprint="m1", numerics_id="n1", cached_prompt_tokens=2)
NO_ONE = ModelView()


def load_of(view: ModelView, *, draining: bool = False, **fields: int) -> Load:
    about = {"model_fingerprint": view.fingerprint, "numerics_id": view.numerics_id, "vocab_size": view.vocab_size}
    return Load(engine_id="e", draining=draining, **({"num_workers": 1} | fields), **about)


class Bench:
    """A pool whose clock and whose engine core are this test's."""

    def __init__(self, meter: type[RequestMeter] = RequestMeter, **times: float) -> None:
        self.now = 100.0
        self.metrics = GatewayMetrics("m")
        self.sent: list[pb.ClientFrame] = []
        clock = LivedClock(1e9, lambda: self.now)
        self.waits = waits(**times)
        self.pool = RequestPool(
            clock, self.waits, self.metrics, meter(self.metrics, log_requests=True), lambda now: 7.0
        )
        self.place = self.pool.new_place()
        self.meet()

    def meet(self, view: ModelView = HERE, *, usable: bool = True) -> None:
        self.pool.meet(self.place, load_of(view, draining=not usable), self.sent.append)

    def open(self, **params: Any) -> PooledGeneration:
        return self.pool.open(record(**params), counted=True)

    def submits(self, generation: PooledGeneration) -> list[pb.Submit]:
        name = generation.request.record.request_id
        return [f.submit for f in self.sent if f.HasField("submit") and f.submit.record.request_id == name]

    def tokens(self, generation: PooledGeneration, *tokens: int, at: int = 0, begun: Begun | None = BEGUN) -> None:
        delta = pb.Delta(
            request_id=generation.request.record.request_id,
            attempt=generation.request.attempt,
            tokens=pb.Tokens(first_index=at, token_ids=tokens),
        )
        if begun is not None and not at:
            delta.tokens.begun.CopyFrom(begun_to_pb(begun))
        self.pool.on_outputs(self.place, pb.StepOutputs(deltas=[delta]))

    def last(self, generation: PooledGeneration, token: int) -> None:
        delta = pb.Delta(
            request_id=generation.request.record.request_id,
            tokens=pb.Tokens(token_ids=[token]),
            finish_reason=pb.FINISH_REASON_STOP,
            usage=pb.Usage(),
        )
        self.pool.on_outputs(self.place, pb.StepOutputs(deltas=[delta]))

    def reject(self, generation: PooledGeneration, code: str, message: str = "no", retry_after_s: float = 0.0) -> None:
        about = {"request_id": generation.request.record.request_id, "attempt": generation.request.attempt}
        self.pool.on_rejected(pb.Rejected(code=code, message=message, retry_after_s=retry_after_s, **about))

    def accept(self, generation: PooledGeneration, stream: int = 0) -> None:
        about = {"request_id": generation.request.record.request_id, "attempt": generation.request.attempt}
        self.pool.on_accepted(self.place, pb.Accepted(stream=stream, **about))

    def column(self, *entries: tuple[int, int, int]) -> None:
        """Of each entry the number of its stream, its index and its token."""
        streams, indexes, tokens = zip(*entries, strict=True)
        columns = pb.NextTokens(streams=streams, first_indexes=indexes, token_ids=tokens)
        self.pool.on_outputs(self.place, pb.StepOutputs(tokens=columns))

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.pool.tend()


@pytest.fixture
async def bench() -> Bench:
    return Bench()


def ending(generation: PooledGeneration) -> tuple[ErrorCode | None, str]:
    assert generation.request.ended
    assert generation.request.error is not None
    return generation.request.error.code, generation.request.error.message


def tokens_of(generation: PooledGeneration) -> list[list[int]]:
    return [list(output.token_ids) for output in generation.request.resume().prior_outputs]


async def test_tokens_in_columns_are_those_of_the_choice_with_that_number(bench: Bench) -> None:
    one, two = bench.open(n=2), bench.open()
    bench.accept(one, 4)
    bench.accept(two, 6)
    bench.tokens(one, 5)
    bench.column((5, 0, 7), (4, 1, 8), (6, 0, 9), (5, 1, 10))
    assert (tokens_of(one), tokens_of(two)) == ([[5, 8], [7, 10]], [[9]])
    bench.column((5, 1, 10), (5, 1, 99))
    assert tokens_of(one)[1] == [7, 10], "known already"
    bench.column((6, 3, 1))
    assert two.request.attempt == 1, "a hole ends the attempt"


async def test_numbers_are_forgotten_with_the_attempt_that_had_them(bench: Bench) -> None:
    first, second = bench.open(), bench.open()
    bench.accept(first, 0)
    bench.accept(second, 1)
    bench.tokens(first, 5)
    bench.pool.lose(bench.place)
    bench.meet()
    bench.accept(second, 0)  # another session, whose numbers begin anew
    bench.column((0, 0, 6), (1, 0, 7))
    assert (tokens_of(first), tokens_of(second)) == ([[5]], [[6]])
    bench.last(first, 5)
    await first.aclose()
    await second.aclose()
    bench.column((0, 1, 6))
    assert bench.place.streams == {}


@pytest.mark.parametrize("columns", [pb.NextTokens(streams=[0], token_ids=[1]), pb.NextTokens(first_indexes=[0])])
async def test_columns_of_different_lengths_end_the_session(bench: Bench, columns: pb.NextTokens) -> None:
    with pytest.raises(ValueError, match="zip"):
        bench.pool.on_outputs(bench.place, pb.StepOutputs(tokens=columns))


async def test_what_it_began_under_goes_out_with_every_resubmission(bench: Bench) -> None:
    generation = bench.open()
    bench.tokens(generation, 5)
    for _ in range(3):
        bench.pool.lose(bench.place)
        bench.meet()
    first, *later = bench.submits(generation)
    assert not first.resume.HasField("begun")
    assert [submit.resume.begun for submit in later] == [begun_to_pb(BEGUN)] * 3
    assert [submit.attempt for submit in later] == [1, 2, 3]


async def test_without_tokens_nothing_is_bound(bench: Bench) -> None:
    generation = bench.open()
    bench.accept(generation)
    bench.pool.lose(bench.place)
    bench.meet(ModelView(fingerprint="m2", numerics_id="n2", vocab_size=512))
    assert [submit.resume.HasField("begun") for submit in bench.submits(generation)] == [False, False]


async def test_the_first_word_on_where_it_began_stays(bench: Bench) -> None:
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.pool.lose(bench.place)
    bench.meet()
    bench.tokens(generation, 5, 6, begun=Begun(model_fingerprint="m9", numerics_id="n9"))
    assert generation.request.begun == BEGUN


@pytest.mark.parametrize("lost", [False, True])
async def test_another_model_is_named_and_nothing_spliced(bench: Bench, lost: bool) -> None:
    generation, fresh = bench.open(), bench.open()
    bench.tokens(generation, 5)
    if lost:
        bench.pool.lose(bench.place)
    bench.meet(ModelView(fingerprint="m2", numerics_id="n1", vocab_size=512))
    code, message = ending(generation)
    assert code is ErrorCode.STREAM_INTERRUPTED
    assert "'m1'" in message
    assert "'m2'" in message
    assert len(bench.submits(generation)) == 1
    assert not fresh.request.ended  # it had no token: any model will do
    assert len(bench.submits(fresh)) == 1 + lost


async def test_each_request_is_judged_by_what_it_began_under_itself(bench: Bench) -> None:
    old, new = bench.open(), bench.open()
    bench.tokens(old, 5)
    bench.meet(ModelView(fingerprint="m2", numerics_id="n2", vocab_size=512))
    bench.tokens(new, 5, begun=Begun(model_fingerprint="m2", numerics_id="n2"))
    bench.pool.lose(bench.place)
    bench.meet(ModelView(fingerprint="m2", numerics_id="n2", vocab_size=512))
    assert old.request.ended
    assert len(bench.submits(new)) == 2


async def test_a_prompt_does_not_go_to_another_vocabulary(bench: Bench) -> None:
    generation = bench.open()
    bench.pool.lose(bench.place)
    bench.meet(ModelView(fingerprint="m2", numerics_id="n1", vocab_size=600))
    code, message = ending(generation)
    assert code is ErrorCode.UNAVAILABLE
    assert "512" in message
    assert "600" in message


async def test_other_numerics_are_waited_out(bench: Bench) -> None:
    """The engine core stands; a worker of the old kind may still come, for longer than an engine core is waited for."""
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.pool.lose(bench.place)
    others = ModelView(fingerprint="m1", numerics_id="n2", vocab_size=512)
    bench.meet(others)
    bench.after(bench.waits.resume_s + 1)
    bench.meet(others)
    assert len(bench.submits(generation)) == 1
    bench.meet(HERE)
    assert len(bench.submits(generation)) == 2


async def test_other_numerics_to_the_end_are_named(bench: Bench) -> None:
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.pool.lose(bench.place)
    bench.meet(ModelView(fingerprint="m1", numerics_id="n2", vocab_size=512))
    bench.after(1.0)
    bench.after(bench.waits.no_worker_s)
    code, message = ending(generation)
    assert code is ErrorCode.STREAM_INTERRUPTED
    assert "'n1'" in message
    assert "'n2'" in message
    assert len(bench.submits(generation)) == 1


async def test_an_engine_core_that_knows_no_worker_yet_may_hold_it(bench: Bench) -> None:
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.pool.lose(bench.place)
    bench.meet(NO_ONE)
    assert len(bench.submits(generation)) == 2


@pytest.mark.parametrize("code", ["overloaded", "unavailable"])
async def test_a_refusal_of_what_was_lost_is_tried_again(bench: Bench, code: str) -> None:
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.pool.lose(bench.place)
    bench.meet()
    for attempt in (1, 2, 3):
        bench.reject(generation, code, retry_after_s=0.5)
        assert len(bench.submits(generation)) == 1 + attempt
        bench.meet()  # a load says nothing about when to come again
        bench.after(0.4)
        assert len(bench.submits(generation)) == 1 + attempt
        bench.after(0.2)
        assert len(bench.submits(generation)) == 2 + attempt
    bench.accept(generation)
    assert not generation.request.ended


async def test_refused_to_the_end_it_tells_the_engine_cores_own_reason(bench: Bench) -> None:
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.pool.lose(bench.place)
    bench.meet()
    bench.reject(generation, "unavailable", "no worker for 120 s")
    bench.after(bench.waits.resume_s)
    code, message = ending(generation)
    assert code is ErrorCode.STREAM_INTERRUPTED
    assert "no worker for 120 s" in message
    assert "lost" not in message


async def test_refused_after_it_was_taken_it_tells_that_reason_too(bench: Bench) -> None:
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.pool.lose(bench.place)
    bench.meet()
    bench.accept(generation)
    bench.after(120.0)
    bench.reject(generation, "unavailable", "no worker for 120 s")
    assert ending(generation) == (ErrorCode.STREAM_INTERRUPTED, "no worker for 120 s")


async def test_each_loss_has_a_wait_of_its_own(bench: Bench) -> None:
    """Also when all that came between two losses was a refusal."""
    generation = bench.open()
    bench.tokens(generation, 5)
    for _ in range(4):
        bench.pool.lose(bench.place)
        bench.after(0.9 * bench.waits.resume_s)
        bench.meet()
        bench.reject(generation, "unavailable", "no worker yet")
    assert not generation.request.ended
    bench.after(0.2 * bench.waits.resume_s)
    assert "no worker yet" in ending(generation)[1]


async def test_none_that_takes_over_is_called_lost(bench: Bench) -> None:
    generation, fresh = bench.open(), bench.open()
    bench.tokens(generation, 5)
    bench.pool.lose(bench.place)
    bench.after(bench.waits.resume_s - 0.1)
    assert not generation.request.ended
    bench.after(0.2)
    assert ending(generation)[0] is ErrorCode.STREAM_INTERRUPTED
    assert ending(fresh)[0] is ErrorCode.UNAVAILABLE
    assert generation.request.error is not None
    assert generation.request.error.retry_after_s == 7.0
    assert "lost" in ending(generation)[1]


async def test_losses_without_a_token_are_bounded_by_time(bench: Bench) -> None:
    generation = bench.open()
    num_losses = 0
    while not generation.request.ended:
        bench.after(2.0)
        bench.pool.lose(bench.place)
        bench.meet()
        num_losses += 1
    assert num_losses == int(bench.waits.losing_s / 2.0) + 2
    generation = bench.open()
    for i in range(3 * num_losses):  # a token now and then, and there is no bound
        bench.after(2.0)
        bench.pool.lose(bench.place)
        bench.meet()
        if i % 10 == 0:
            bench.tokens(generation, 1, at=generation.request.num_output_tokens)
    assert not generation.request.ended


async def test_a_stop_string_found_while_lost_ends_it_here_with_what_is_known(bench: Bench) -> None:
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.pool.lose(bench.place)
    await generation.abort([0])
    *_, last = await generation.next()
    assert last.usage is not None
    assert (last.usage.cached_prompt_tokens, last.usage.output_tokens) == (2, 1)
    assert bench.pool.num_open == bench.pool.num_parked == 0


class NoTokens(RequestMeter):
    def tokens(self, generation: PooledGeneration, delta: Delta, now: float) -> None:
        raise RuntimeError("cannot count")


class NoEndings(RequestMeter):
    def ended(self, generation: PooledGeneration, now: float) -> None:
        raise RuntimeError("cannot count")


@pytest.mark.parametrize("meter", [NoTokens, NoEndings])
async def test_what_raises_about_one_request_ends_it_once_and_no_other(meter: type[RequestMeter]) -> None:
    bench = Bench(meter)
    generation, other = bench.open(), bench.open()
    reading = asyncio.create_task(generation.next())
    await asyncio.sleep(0)
    bench.last(generation, 5)
    deltas = await asyncio.wait_for(reading, 30)
    assert [(d.result.token_ids, d.finish_reason) for d in deltas] == [([5], FinishReason.STOP)]
    assert await generation.next() == []
    assert bench.pool.num_open == 1
    assert not other.request.ended


async def test_a_request_opened_in_a_gap_of_the_session_is_not_forgotten(bench: Bench) -> None:
    bench.pool.lose(bench.place)
    generation = bench.open()
    assert bench.submits(generation) == []
    bench.meet()
    assert len(bench.submits(generation)) == 1


EVENTS = st.lists(
    st.sampled_from(["open", "step", "step", "step", "lose", "meet", "drain", "other", "move", "hole", "no", "wait"]),
    max_size=60,
)


class Story:
    """Any sequence of events; what is sent is answered as an engine core that begins with m1 and n1 would."""

    def __init__(self) -> None:
        self.bench = Bench(resume_s=3.0, no_worker_s=6.0, losing_s=9.0)
        self.view = HERE
        self.usable = True
        self.there = True
        self.generations: list[PooledGeneration] = []

    def happen(self, event: str) -> None:
        bench, pool = self.bench, self.bench.pool
        if event == "open":
            self.generations.append(bench.open(n=2, max_tokens=6))
        elif event == "lose":
            pool.lose(self.bench.place)
            self.there = False
        elif event in ("meet", "drain", "other"):
            self.view = HERE if event != "other" else ModelView(fingerprint="m1", numerics_id="n2", vocab_size=512)
            self.there, self.usable = True, event != "drain"
            bench.meet(self.view, usable=self.usable)
        elif event == "wait":
            bench.after(1.0)
        else:
            for generation in self.generations:
                self._to_one(generation, event)

    def _to_one(self, generation: PooledGeneration, event: str) -> None:
        """Only what this engine core has been sent can it speak of."""
        submits = self.bench.submits(generation)
        if not (
            self.there
            and submits
            and submits[-1].attempt == generation.request.attempt
            and not generation.request.ended
        ):
            return
        about = {"request_id": generation.request.record.request_id, "attempt": generation.request.attempt}
        if event == "move":
            self.bench.pool.on_migrate(pb.Migrate(**about))
        elif event == "no":
            self.bench.reject(generation, "overloaded")
        else:
            self._tokens(generation, about, hole=event == "hole")

    def _tokens(self, generation: PooledGeneration, about: dict[str, Any], *, hole: bool) -> None:
        priors = {prior.choice: prior.token_ids for prior in generation.request.resume().prior_outputs}
        deltas = []
        for choice in range(2):
            known = list(priors.get(choice, ()))
            if len(known) >= 6:
                continue
            token = next_token(generation.request.record, choice, known)
            tokens = pb.Tokens(first_index=len(known) + hole, token_ids=[token])
            delta = pb.Delta(choice=choice, tokens=tokens, **about)
            if not priors:
                delta.tokens.begun.CopyFrom(begun_to_pb(BEGUN))
            if len(known) == 5 and not hole:
                delta.finish_reason = pb.FINISH_REASON_LENGTH
            deltas.append(delta)
        if deltas and not hole and all(delta.finish_reason for delta in deltas):
            deltas[-1].usage.output_tokens = 12
        self.bench.pool.on_outputs(self.bench.place, pb.StepOutputs(deltas=deltas))


async def read(generation: PooledGeneration) -> list[Delta]:
    deltas: list[Delta] = []
    while batch := await generation.next():
        deltas += batch
    return deltas


def check(record: RequestRecord, deltas: list[Delta]) -> None:
    got: dict[int, list[int]] = {0: [], 1: []}
    for delta in deltas:
        assert delta.result.first_index == len(got[delta.choice])
        for token in delta.result.token_ids:
            assert token == next_token(record, delta.choice, got[delta.choice])
            got[delta.choice].append(token)
    assert [delta.ends_request for delta in deltas].count(True) == 1
    assert deltas[-1].ends_request
    ended = [delta.choice for delta in deltas if delta.finish_reason is not None]
    assert sorted(ended) == [0, 1]


@given(EVENTS)
@settings(max_examples=200, deadline=None)
def test_any_story_ends_each_request_once_with_a_prefix_of_its_tokens(events: list[str]) -> None:
    async def tell() -> None:
        story = Story()
        for event in events:
            story.happen(event)
        for generation in story.generations:
            for submit in story.bench.submits(generation):
                assert submit.resume.HasField("begun") == bool(submit.resume.prior_outputs)
        story.happen("lose")
        for _ in range(7):
            story.happen("wait")
        assert story.bench.pool.num_open == story.bench.pool.num_parked == 0
        for generation in story.generations:
            check(generation.request.record, await read(generation))
        value = story.bench.metrics.registry.get_sample_value
        ended = [
            value("pagoda_request_success_total", {"model_name": "m", "finished_reason": reason})
            for reason in FinishReason
        ]
        assert sum(n or 0 for n in ended) == len(story.generations)

    asyncio.run(tell())
