"""However often and wherever a request is lost, it continues where it was or says why not, and ends exactly once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.engine.pool_bench import BEGUN, HERE, Bench, ending, tokens_of
from tests.gateway.fake_engine_core import next_token
from tests.gateway.streams import record

from pagoda_gateway.engine.cores import Core
from pagoda_gateway.engine.model_view import ModelView
from pagoda_gateway.engine.pooled_generation import PooledGeneration
from pagoda_gateway.engine.refusals import Kind
from pagoda_gateway.engine.request_meter import RequestMeter
from pagoda_proto.convert import begun_to_pb
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import Begun, Delta, FinishReason, RequestRecord

NO_ONE = ModelView()


@pytest.fixture
async def bench() -> Bench:
    return Bench()


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
    bench.lose()
    bench.meet()
    bench.accept(second, 0)  # another session, whose stream numbers start again
    bench.column((0, 0, 6), (1, 0, 7))
    assert (tokens_of(first), tokens_of(second)) == ([[5]], [[6]])
    bench.last(first, 5)
    await first.aclose()
    await second.aclose()
    bench.column((0, 1, 6))
    assert bench.pool._streams == {bench.core: {}}


@pytest.mark.parametrize("columns", [pb.NextTokens(streams=[0], token_ids=[1]), pb.NextTokens(first_indexes=[0])])
async def test_columns_of_different_lengths_end_the_session(bench: Bench, columns: pb.NextTokens) -> None:
    with pytest.raises(ValueError, match="zip"):
        bench.pool.on_outputs(bench.core, pb.StepOutputs(tokens=columns))


async def test_what_it_began_under_goes_out_with_every_resubmission(bench: Bench) -> None:
    generation = bench.open()
    bench.tokens(generation, 5)
    for _ in range(3):
        bench.lose()
        bench.meet()
    first, *later = bench.submits(generation)
    assert not first.resume.HasField("begun")
    assert [submit.resume.begun for submit in later] == [begun_to_pb(BEGUN)] * 3
    assert [submit.attempt for submit in later] == [1, 2, 3]


async def test_without_tokens_nothing_is_bound(bench: Bench) -> None:
    generation = bench.open()
    bench.accept(generation)
    bench.lose()
    bench.meet(ModelView(fingerprint="m2", numerics_id="n2", vocab_size=512))
    assert [submit.resume.HasField("begun") for submit in bench.submits(generation)] == [False, False]


async def test_the_first_word_on_where_it_began_stays(bench: Bench) -> None:
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.lose()
    bench.meet()
    bench.tokens(generation, 5, 6, begun=Begun(model_fingerprint="m9", numerics_id="n9"))
    assert generation.request.begun == BEGUN


@pytest.mark.parametrize("lost", [False, True])
async def test_another_model_is_named_and_nothing_spliced(bench: Bench, lost: bool) -> None:
    generation, fresh = bench.open(), bench.open()
    bench.tokens(generation, 5)
    if lost:
        bench.lose()
    bench.meet(ModelView(fingerprint="m2", numerics_id="n1", vocab_size=512))
    code, message = ending(generation)
    assert code is ErrorCode.STREAM_INTERRUPTED
    assert "'m1'" in message
    assert "'m2'" in message
    assert len(bench.submits(generation)) == 1
    assert not fresh.request.ended  # it has no token yet, so any model will do
    assert len(bench.submits(fresh)) == 1 + lost


async def test_each_request_is_judged_by_what_it_began_under_itself(bench: Bench) -> None:
    old, new = bench.open(), bench.open()
    bench.tokens(old, 5)
    bench.meet(ModelView(fingerprint="m2", numerics_id="n2", vocab_size=512))
    bench.tokens(new, 5, begun=Begun(model_fingerprint="m2", numerics_id="n2"))
    bench.lose()
    bench.meet(ModelView(fingerprint="m2", numerics_id="n2", vocab_size=512))
    assert old.request.ended
    assert len(bench.submits(new)) == 2


async def test_a_prompt_does_not_go_to_another_vocabulary(bench: Bench) -> None:
    generation = bench.open()
    bench.lose()
    bench.meet(ModelView(fingerprint="m2", numerics_id="n1", vocab_size=600))
    code, message = ending(generation)
    assert code is ErrorCode.UNAVAILABLE
    assert "512" in message
    assert "600" in message


async def test_other_numerics_are_waited_out(bench: Bench) -> None:
    """The engine core is up; a worker with the old numerics may join even later than an engine core is waited for."""
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.lose()
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
    bench.lose()
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
    bench.lose()
    bench.meet(NO_ONE)
    assert len(bench.submits(generation)) == 2


@pytest.mark.parametrize("code", ["overloaded", "unavailable"])
async def test_a_refusal_of_what_was_lost_is_tried_again(bench: Bench, code: str) -> None:
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.lose()
    bench.meet()
    for attempt in (1, 2, 3):
        bench.reject(generation, code, retry_after_s=0.5)
        assert len(bench.submits(generation)) == 1 + attempt
        bench.meet()  # a load report does not replace retry_after_s
        bench.after(0.4)
        assert len(bench.submits(generation)) == 1 + attempt
        bench.after(0.2)
        assert len(bench.submits(generation)) == 2 + attempt
    bench.accept(generation)
    assert not generation.request.ended


async def test_refused_to_the_end_it_tells_the_engine_cores_own_reason(bench: Bench) -> None:
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.lose()
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
    bench.lose()
    bench.meet()
    bench.accept(generation)
    bench.after(120.0)
    bench.reject(generation, "unavailable", "no worker for 120 s")
    assert ending(generation) == (ErrorCode.STREAM_INTERRUPTED, "no worker for 120 s")


async def test_each_loss_has_a_wait_of_its_own(bench: Bench) -> None:
    """Also if only a refusal came between two losses."""
    generation = bench.open()
    bench.tokens(generation, 5)
    for _ in range(4):
        bench.lose()
        bench.after(0.9 * bench.waits.resume_s)
        bench.meet()
        bench.reject(generation, "unavailable", "no worker yet")
    assert not generation.request.ended
    bench.after(0.2 * bench.waits.resume_s)
    assert "no worker yet" in ending(generation)[1]


async def test_none_that_takes_over_is_called_lost(bench: Bench) -> None:
    generation, fresh = bench.open(), bench.open()
    bench.tokens(generation, 5)
    bench.lose()
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
        bench.lose()
        bench.meet()
        num_losses += 1
    assert num_losses == int(bench.waits.losing_s / 2.0) + 2
    generation = bench.open()
    for i in range(3 * num_losses):  # with an occasional token there is no bound
        bench.after(2.0)
        bench.lose()
        bench.meet()
        if i % 10 == 0:
            bench.tokens(generation, 1, at=generation.request.num_output_tokens)
    assert not generation.request.ended


async def test_what_tells_nothing_before_its_end_may_be_lost_now_and_then(bench: Bench) -> None:
    """As in a beam search or a pooling request: each time it was computed for long before the loss."""
    generation = bench.open()
    for _ in range(9):
        bench.core.heard_at = bench.now + 1e6
        bench.after(bench.waits.losing_s + 1.0)
        bench.lose()
        bench.meet()
    assert not generation.request.ended


async def test_a_stop_string_found_while_lost_ends_it_here_with_what_is_known(bench: Bench) -> None:
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.lose()
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


async def test_what_fits_into_no_frame_ends_and_takes_no_other_along(bench: Bench) -> None:
    """Neither when opened, nor when lost together with others, nor after being parked."""
    before, beside = bench.open(), bench.open()
    huge = msgspec.structs.replace(record(), priority=2**31)
    opened = bench.pool.open(huge, counted=True)
    assert ending(opened)[0] is ErrorCode.INTERNAL
    before.request.record = msgspec.structs.replace(before.request.record, priority=2**31)
    bench.lose()
    bench.meet()
    assert ending(before)[0] is ErrorCode.INTERNAL
    assert [submit.attempt for submit in bench.submits(beside)] == [0, 1]
    assert bench.pool.num_open == 1


async def test_a_request_opened_in_a_gap_of_the_session_is_not_forgotten(bench: Bench) -> None:
    bench.lose()
    generation = bench.open()
    assert bench.submits(generation) == []
    bench.meet()
    assert len(bench.submits(generation)) == 1


async def test_a_refusal_of_all_is_known_of_its_kind(bench: Bench) -> None:
    generation = bench.open()
    kind = Kind.of("", generation.request.record)
    bench.reject(generation, "overloaded")
    assert bench.meter.refusals.repeated(kind) is None, "a smaller one might be taken"
    bench.reject(bench.open(), "overloaded", "full", retry_after_s=3.0, of_all=True)
    error = bench.meter.refusals.repeated(kind)
    assert error is not None
    assert (error.code, error.message, error.retry_after_s) == (ErrorCode.OVERLOADED, "full", 3.0)
    value, name = bench.metrics.registry.get_sample_value, {"model_name": "m"}
    assert value("pagoda_admission_rejections_total", name | {"reason": "overloaded"}) == 3
    assert value("pagoda_request_success_total", name | {"finished_reason": "error"}) == 3


async def test_of_all_is_what_all_said(bench: Bench) -> None:
    bench = Bench(num_cores=2)
    for first, second, known in ((True, False, False), (False, True, False), (True, True, True)):
        generation = bench.open()
        bench.reject(generation, "overloaded", of_all=first)
        assert not generation.request.ended, "there is another one to ask"
        bench.reject(generation, "overloaded", of_all=second)
        assert generation.request.ended
        assert (bench.meter.refusals.repeated(Kind.of("", generation.request.record)) is not None) == known


async def test_where_policies_differ_nothing_is_known_of_others() -> None:
    bench = Bench(num_cores=2)
    for core, policy in zip(bench.cores, ("fair", "fcfs"), strict=True):
        core.load = msgspec.structs.replace(core.load, policy=policy)
    generation = bench.open()
    for _ in bench.cores:
        bench.reject(generation, "overloaded", of_all=True)
    assert generation.request.ended
    kinds = [Kind.of(policy, generation.request.record) for policy in ("fair", "fcfs")]
    assert [bench.meter.refusals.repeated(kind) for kind in kinds] == [None, None], "one takes them by tenants"


async def test_what_no_user_asked_says_nothing_of_users(bench: Bench) -> None:
    generation = bench.pool.open(record(), counted=False)
    bench.reject(generation, "overloaded", of_all=True)
    assert bench.meter.refusals.repeated(Kind.of("", generation.request.record)) is None


KINDS = ["open", "step", "step", "step", "lose", "meet", "drain", "idle", "other", "move", "hole", "no", "wait"]
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1)), max_size=60)
OTHER = ModelView(fingerprint="m1", numerics_id="n2", vocab_size=512)


class Story:
    """Any sequence of events; requests are answered as engine cores that begin with m1 and n1 would."""

    def __init__(self, num_cores: int) -> None:
        self.bench = Bench(num_cores=num_cores, resume_s=3.0, no_worker_s=6.0, losing_s=9.0)
        self.generations: list[PooledGeneration] = []

    def happen(self, event: str, number: int) -> None:
        bench = self.bench
        core = bench.cores[number % len(bench.cores)]
        if event == "open":
            self.generations.append(bench.open(n=2, max_tokens=6))
        elif event == "lose":
            bench.lose(core)
        elif event in ("meet", "drain", "idle", "other"):
            view = OTHER if event == "other" else HERE
            bench.meet(view, usable=event != "drain", num_workers=event != "idle", core=core)
        elif event == "wait":
            bench.after(1.0)
        else:
            for generation in self.generations:
                self._to_one(generation, event, core)

    def _to_one(self, generation: PooledGeneration, event: str, core: Core) -> None:
        """An engine core speaks only about attempts sent to it, even where the request has since moved."""
        request = generation.request
        name = request.record.request_id
        attempts = [attempt for (of, attempt), place in self.bench.place.items() if of == name and place is core]
        if core.send is None or not attempts or request.ended:
            return
        about = {"request_id": name, "attempt": attempts[-1]}
        if event == "move":
            self.bench.pool.on_migrate(core, pb.Migrate(**about))
        elif event == "no":
            self.bench.pool.on_rejected(core, pb.Rejected(code="overloaded", message="no", **about))
        else:
            self._tokens(generation, about, core, hole=event == "hole")

    def _tokens(self, generation: PooledGeneration, about: dict[str, Any], core: Core, *, hole: bool) -> None:
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
        self.bench.pool.on_outputs(core, pb.StepOutputs(deltas=deltas))


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


@pytest.mark.parametrize("num_cores", [1, 2])
@given(events=EVENTS)
@settings(max_examples=150, deadline=None)
def test_any_story_ends_each_request_once_with_a_prefix_of_its_tokens(
    events: list[tuple[str, int]], num_cores: int
) -> None:
    async def tell() -> None:
        story = Story(num_cores)
        for event in events:
            story.happen(*event)
        for generation in story.generations:
            for submit in story.bench.submits(generation):
                assert submit.resume.HasField("begun") == bool(submit.resume.prior_outputs)
        for number in range(num_cores):
            story.happen("lose", number)
        for _ in range(7):
            story.happen("wait", 0)
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
