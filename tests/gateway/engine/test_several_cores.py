"""What one of several engine cores cannot continue, another one continues at once."""

from __future__ import annotations

import pytest
from tests.gateway.engine.pool_bench import Bench, ending, tokens_of

from pagoda_gateway.engine.model_view import ModelView
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import ErrorCode

OTHER = ModelView(fingerprint="m2", numerics_id="n1", vocab_size=512)


async def test_what_one_engine_core_had_goes_on_at_another_at_once() -> None:
    bench = Bench(num_cores=2)
    generations = [bench.open() for _ in range(8)]
    for generation in generations:
        bench.tokens(generation, 5)
    first, second = bench.core_and_other(generations[0])
    stayed = [generation for generation in generations if bench.core_of(generation) is second]
    bench.lose(first)
    assert {bench.core_of(generation) for generation in generations} == {second}
    assert [generation.request.attempt for generation in stayed] == [0] * len(stayed)
    assert bench.submits(generations[0])[-1].resume.prior_outputs[0].token_ids == [5]
    bench.tokens(generations[0], 6, at=1)
    assert tokens_of(generations[0]) == [[5, 6]]


async def test_what_the_first_says_late_is_void() -> None:
    bench = Bench(num_cores=2)
    generation = bench.open()
    first = bench.core_of(generation)
    bench.lose(first)
    bench.meet(core=first)
    name = generation.request.record.request_id
    late = pb.Delta(request_id=name, attempt=1, tokens=pb.Tokens(token_ids=[9]))
    bench.pool.on_outputs(first, pb.StepOutputs(deltas=[late]))
    assert tokens_of(generation) == []


async def test_who_has_no_workers_gives_its_requests_to_who_has() -> None:
    bench = Bench(num_cores=2)
    generation = bench.open()
    first, second = bench.core_and_other(generation)
    bench.meet(core=second, num_workers=0)
    bench.meet(core=first, num_workers=0)
    assert bench.core_of(generation) is first, "nobody has any"
    bench.meet(core=second)
    assert (bench.core_of(generation), generation.request.attempt) == (second, 1)
    assert [frame.abort.request_id for frame in bench.sent if frame.HasField("abort")] == [
        generation.request.record.request_id
    ]


async def test_who_is_to_leave_gives_each_request_to_who_can_go_on_with_it_now() -> None:
    bench = Bench(num_cores=2)
    generations = [bench.open() for _ in range(8)]
    first, second = bench.core_and_other(generations[0])
    bench.tokens(generations[0], 5)
    moving = sum(bench.core_of(generation) is first for generation in generations)
    bench.meet(ModelView(fingerprint="m1", numerics_id="n2", vocab_size=512), core=second)
    bench.meet(core=first, usable=False)
    assert bench.core_of(generations[0]) is first, "the other one would make other tokens"
    assert sum(bench.core_of(generation) is first for generation in generations) == 1
    bench.meet(core=second)
    assert {bench.core_of(generation) for generation in generations} == {second}
    assert len([frame for frame in bench.sent if frame.HasField("abort")]) == moving


async def test_who_is_to_leave_goes_on_while_nobody_else_works() -> None:
    bench = Bench(num_cores=2)
    generation = bench.open()
    first, second = bench.core_and_other(generation)
    bench.meet(core=second, num_workers=0)
    bench.meet(core=first, usable=False)
    assert (bench.core_of(generation), generation.request.attempt) == (first, 0)
    bench.tokens(generation, 5)
    assert tokens_of(generation) == [[5]]


async def test_who_is_there_and_gets_nowhere_is_left_while_another_works() -> None:
    bench = Bench(num_cores=2, stuck_s=10.0, losing_s=1000.0)
    generation = bench.open()
    first, second = bench.core_and_other(generation)
    first.heard_at = second.heard_at = bench.now + 1000.0
    bench.after(9.0)
    assert bench.core_of(generation) is first
    bench.after(1.5)
    assert bench.core_of(generation) is second
    assert bench.core_of(bench.open()) is second, "the first is avoided for a while"
    second.got_on_at = bench.now
    bench.lose(second)
    assert bench.core_of(generation) is first, "where no other is left, it is tried again"


async def test_who_is_silent_is_left_while_another_works() -> None:
    bench = Bench(num_cores=2, suspect_s=2.5)
    generation, late = bench.open(), bench.open()
    first, second = bench.core_and_other(generation)
    bench.after(2.0)
    second.heard_at = bench.now
    assert bench.core_of(generation) is first
    bench.after(1.0)
    assert {bench.core_of(generation), bench.core_of(late), bench.core_of(bench.open())} == {second}
    bench.after(10.0)
    assert bench.core_of(generation) is second, "the first is silent, too"
    assert not generation.request.ended


async def test_where_nobody_gets_on_a_request_is_moved_but_seldom() -> None:
    bench = Bench(num_cores=2, stuck_s=10.0, losing_s=1000.0)
    generations = [bench.open(), bench.open()]
    for _ in range(60):
        bench.after(1.0)
    assert all(not generation.request.ended for generation in generations)
    assert max(generation.request.attempt for generation in generations) <= 6


async def test_another_model_at_one_engine_core_sends_its_requests_to_the_other() -> None:
    bench = Bench(num_cores=2)
    generations = [bench.open() for _ in range(8)]
    for generation in generations:
        bench.tokens(generation, 5)
    changed = bench.core_of(generations[0])
    bench.meet(OTHER, core=changed)
    assert changed not in {bench.core_of(generation) for generation in generations}
    (other,) = {bench.core_of(generation) for generation in generations}
    bench.meet(OTHER, core=other)
    assert {ending(generation)[0] for generation in generations} == {ErrorCode.STREAM_INTERRUPTED}


async def test_what_no_other_can_go_on_with_is_left_where_it_is() -> None:
    bench = Bench(num_cores=2, suspect_s=2.5)
    first, second = bench.cores
    bench.meet(OTHER, core=second)
    bench.meet(core=second, num_workers=0)
    generation = bench.open()
    bench.tokens(generation, 5)
    bench.meet(OTHER, core=second)
    for _ in range(30):
        bench.meet(core=first, num_workers=0)
        bench.meet(OTHER, core=second)
    assert (bench.core_of(generation), generation.request.attempt) == (first, 0), "its workers come back, or do not"
    bench.meet(core=first)
    for _ in range(30):  # the first one is silent
        second.heard_at = bench.now + 0.1
        bench.after(0.1)
    assert (generation.request.attempt, first.losses) == (0, 0)


@pytest.mark.parametrize("code", ["overloaded", "unavailable"])
async def test_a_new_request_is_refused_by_all_or_by_none(code: str) -> None:
    bench = Bench(num_cores=2)
    generation = bench.open()
    _, second = bench.core_and_other(generation)
    bench.reject(generation, code)
    assert not generation.request.ended
    assert (bench.core_of(generation), generation.request.attempt) == (second, 0)
    bench.reject(generation, code, "no room here")
    assert ending(generation)[1] == "no room here"


async def test_what_is_wrong_with_a_request_is_wrong_everywhere() -> None:
    bench = Bench(num_cores=2)
    generation = bench.open()
    bench.reject(generation, "invalid_argument")
    assert ending(generation)[0] is ErrorCode.INVALID_ARGUMENT
