"""Requests outlive sessions: whatever happens to the stream, each token of an undisturbed run arrives exactly once."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.fakes import make_delta
from tests.gateway.fake_engine_core import FakeEngineCore, Run, expected_tokens, running_engine, until
from tests.gateway.streams import Connect, collect, record, sample, tokens_of, waits

from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.engine.interface import EngineClient
from pagoda_gateway.engine.link import IS_DOUBLE
from pagoda_gateway.engine.session import EngineAddress
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Delta, FinishReason


async def test_tokens_logprobs_and_usage(engine: FakeEngineCore, client: SessionClient) -> None:
    typed: EngineClient = client
    request = record(logprobs=1, prompt_logprobs=0)
    deltas = await collect(await typed.submit(request))
    assert tokens_of(deltas) == expected_tokens(request)
    assert [e.top_ids for d in deltas for e in d.result.logprobs or ()] == [[t] for t in expected_tokens(request)]
    assert [len(d.result.prompt_logprobs) for d in deltas if d.result.prompt_logprobs] == [2]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.output_tokens == 12
    assert client.num_open == 0
    assert client.load.max_model_len == 4096
    assert sample(client, "generation_tokens_total") == 12
    assert sample(client, "time_to_first_token_seconds_count") == 1
    assert sample(client, "request_success_total", finished_reason="length") == 1


async def test_many_requests_share_one_session(engine: FakeEngineCore, client: SessionClient) -> None:
    requests = [record(n=1 + i % 3) for i in range(20)]
    results = await asyncio.gather(*[collect(await client.submit(r)) for r in requests])
    for request, deltas in zip(requests, results, strict=True):
        for choice in range(request.task.params.n):
            assert tokens_of(deltas, choice) == expected_tokens(request, choice)


@pytest.mark.parametrize("how", ["kill", "break"])
@pytest.mark.parametrize("num_before", [0, 1, 5, 11])
async def test_resume_is_identical(engine: FakeEngineCore, client: SessionClient, how: str, num_before: int) -> None:
    engine.steps = asyncio.Semaphore(num_before)
    request = record(n=2, logprobs=0, prompt_logprobs=0)
    generation = await client.submit(request)
    reading = asyncio.create_task(collect(generation))
    await engine.wait_sent(2 * num_before)
    if how == "kill":
        await engine.kill()
        engine.steps = None
        await engine.start()
    else:
        engine.steps = None
        engine.break_streams()
    deltas = await reading
    for choice in (0, 1):
        assert tokens_of(deltas, choice) == expected_tokens(request, choice)
        entries = [e.top_ids for d in deltas if d.choice == choice for e in d.result.logprobs or ()]
        assert entries == [[t] for t in expected_tokens(request, choice)]
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.output_tokens == 24
    assert engine.submits[-1].attempt == 1
    assert len([d for d in deltas if d.result.prompt_logprobs]) <= 2
    assert sample(client, "requests_resumed_total") == 1


async def test_resume_while_the_consumer_is_slow(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(6)
    request = record(n=2)
    generation = await client.submit(request)
    await engine.wait_sent(12)
    await engine.kill()
    engine.steps = None
    await engine.start()
    await engine.wait_sent(24)
    await until(lambda: client.num_open == 0)
    deltas = await generation.next()
    assert len(deltas) == 2  # merged: one object per choice, however long nobody reads
    assert {d.choice: d.result.token_ids for d in deltas} == {i: expected_tokens(request, i) for i in (0, 1)}
    assert await generation.next() == []


async def test_a_silent_engine_core_is_a_lost_one(engine: FakeEngineCore, connect: Connect) -> None:
    """As after SIGSTOP: the connection stays open, but nothing arrives."""
    client = connect(silent_s=0.5)
    engine.pulse_s = 0.05
    engine.steps = asyncio.Semaphore(3)
    request = record()
    reading = asyncio.create_task(collect(await client.submit(request)))
    await engine.wait_sent(3)
    await asyncio.sleep(0.6)
    assert client.connected  # idle does not count as silent
    engine.silent = True
    await until(lambda: not client.connected)
    engine.silent = False
    engine.steps = None
    assert tokens_of(await reading) == expected_tokens(request)
    assert [s.attempt for s in engine.submits] == [0, 1]


async def test_several_losses_in_a_row(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(0)
    request = record()
    reading = asyncio.create_task(collect(await client.submit(request)))
    for i in range(8):
        engine.steps.release()
        await engine.wait_sent(i + 1)
        engine.break_streams()
        await until(lambda: len(engine.submits) >= i + 2)  # noqa: B023
    engine.steps = None
    await engine.kill()
    await engine.start()
    assert tokens_of(await reading) == expected_tokens(request)


async def test_a_request_that_never_gets_on_is_given_up(engine: FakeEngineCore, connect: Connect) -> None:
    client = connect(losing_s=0.5)
    engine.steps = asyncio.Semaphore(0)
    reading = asyncio.create_task(collect(await client.submit(record())))
    while not reading.done():
        engine.break_streams()
        submits = len(engine.submits)
        await until(lambda: len(engine.submits) > submits or reading.done())  # noqa: B023
    [last] = await reading
    assert last.error_code is ErrorCode.UNAVAILABLE
    assert "again and again" in last.error_message


async def test_a_long_prefill_outlives_any_number_of_losses(engine: FakeEngineCore, client: SessionClient) -> None:
    """The limit is the time without a token, not the number of times an engine core died."""
    engine.steps = asyncio.Semaphore(0)
    request = record()
    reading = asyncio.create_task(collect(await client.submit(request)))
    for i in range(30):
        engine.break_streams()
        await until(lambda: len(engine.submits) >= i + 2)  # noqa: B023
    engine.steps = None
    engine.break_streams()
    assert tokens_of(await reading) == expected_tokens(request)


async def test_ten_engine_cores_die_under_one_stream(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(0)
    request = record(max_tokens=32, logprobs=0)
    reading = asyncio.create_task(collect(await client.submit(request)))
    for i in range(10):
        for _ in range(2):
            engine.steps.release()
        await engine.wait_sent(2 * i + 2)
        await engine.kill()
        await engine.start()
        await until(lambda: len(engine.submits) == i + 2)  # noqa: B023
    engine.steps = None
    engine.break_streams()
    deltas = await reading
    assert tokens_of(deltas) == expected_tokens(request)
    assert [e.top_ids for d in deltas for e in d.result.logprobs or ()] == [[t] for t in expected_tokens(request)]


async def test_random_losses_under_streams_of_four_choices(engine: FakeEngineCore, client: SessionClient) -> None:
    """`collect` checks contiguity, one ending per choice and one ending of the request."""
    rng = random.Random(3)
    engine.steps = asyncio.Semaphore(0)
    requests = [record(n=4, max_tokens=rng.randrange(1, 24)) for _ in range(8)]
    reading = asyncio.gather(*[collect(await client.submit(request)) for request in requests])
    while not reading.done():
        for _ in range(rng.randrange(1, 40)):
            engine.steps.release()
        await asyncio.sleep(rng.random() * 0.02)
        if rng.random() < 0.3:
            await engine.kill()
            await engine.start()
        elif rng.random() < 0.5:
            engine.break_streams()
        else:
            engine.migrate_all()
    for request, deltas in zip(requests, await reading, strict=True):
        for choice in range(4):
            assert tokens_of(deltas, choice) == expected_tokens(request, choice)


@pytest.mark.parametrize(("num_before", "code"), [(0, ErrorCode.UNAVAILABLE), (3, ErrorCode.STREAM_INTERRUPTED)])
async def test_no_engine_core_comes_back(
    engine: FakeEngineCore, connect: Connect, num_before: int, code: ErrorCode
) -> None:
    client = connect(resume_s=0.2)
    engine.steps = asyncio.Semaphore(num_before)
    request = record(n=2)
    generation = await client.submit(request)
    await engine.wait_sent(2 * num_before)
    await until(lambda: sample(client, "generation_tokens_total") == 2 * num_before)
    await engine.kill()
    deltas = await collect(generation)
    assert tokens_of(deltas) == expected_tokens(request)[:num_before]
    assert {d.error_code for d in deltas if d.finish_reason} == {code}
    assert client.num_open == 0
    assert client.load.num_workers == 0


async def test_submit_without_an_engine_core(connect: Connect) -> None:
    client = connect(connect_s=0.05, restart_s=7.0)
    with pytest.raises(PagodaError) as error:
        await client.submit(record())
    assert error.value.code is ErrorCode.UNAVAILABLE
    assert error.value.message == "the engine core is not connected"
    assert 6.0 < error.value.retry_after_s < 7.0  # when a restart is due


async def test_a_restart_refuses_nobody(engine: FakeEngineCore, connect: Connect) -> None:
    """A request waits for an engine core that was connected before, however short the wait for one that never was."""
    client = connect(connect_s=0.01)
    await until(lambda: client.connected)
    await collect(await client.submit(record()))
    await engine.kill()
    await until(lambda: not client.connected)
    request = record()
    submitting = asyncio.create_task(client.submit(request))
    await asyncio.sleep(0.2)
    await engine.start()
    assert tokens_of(await collect(await submitting)) == expected_tokens(request)


async def test_submit_waits_for_a_connection(address: str, client: SessionClient) -> None:
    request = record()
    submitting = asyncio.create_task(client.submit(request))
    await asyncio.sleep(0)
    async with running_engine(address):
        assert tokens_of(await collect(await submitting)) == expected_tokens(request)


async def test_rejection(engine: FakeEngineCore, client: SessionClient) -> None:
    def refuse(submit: pb.Submit) -> pb.ServerFrame:
        fields = {"code": "overloaded", "message": "full", "param": "prompt", "retry_after_s": 3.5}
        return pb.ServerFrame(
            rejected=pb.Rejected(request_id=submit.record.request_id, attempt=submit.attempt, **fields)
        )

    engine.on_submit = refuse
    with pytest.raises(PagodaError) as error:
        await client.submit(record())
    assert (error.value.code, error.value.message, error.value.param) == (ErrorCode.OVERLOADED, "full", "prompt")
    assert error.value.retry_after_s == 3.5
    assert client.num_open == 0
    assert sample(client, "admission_rejections_total", reason="overloaded") == 1
    engine.on_submit = None
    assert await collect(await client.submit(record()))


async def test_duplicates_stale_attempts_and_strangers_are_ignored(
    engine: FakeEngineCore, client: SessionClient
) -> None:
    def repeat(run: Run, delta: Delta) -> list[Any]:
        stale = make_delta(delta.result.first_index, [0], request_id=delta.request_id, attempt=9)
        stranger = make_delta(0, [0], request_id="nobody")
        return [stale, stranger, delta, delta]

    engine.script = repeat
    request = record()
    assert tokens_of(await collect(await client.submit(request))) == expected_tokens(request)


async def test_a_gap_is_mended_by_submitting_again(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.script = lambda run, delta: [] if (run.attempt, delta.result.first_index) == (0, 4) else [delta]
    request = record()
    deltas = await collect(await client.submit(request))
    assert tokens_of(deltas) == expected_tokens(request)
    assert [s.attempt for s in engine.submits] == [0, 1]
    assert list(engine.submits[1].resume.prior_outputs[0].token_ids) == expected_tokens(request)[:4]


async def test_endless_gaps_end_the_request(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.script = lambda run, delta: [] if delta.result.first_index == 4 else [delta]
    request = record()
    deltas = await collect(await client.submit(request))
    assert tokens_of(deltas) == expected_tokens(request)[:4]
    assert deltas[-1].error_code is ErrorCode.PROTOCOL_ERROR


async def test_migrate_from_a_draining_engine_core_waits_for_the_next(
    engine: FakeEngineCore, client: SessionClient
) -> None:
    engine.steps = asyncio.Semaphore(3)
    request = record()
    reading = asyncio.create_task(collect(await client.submit(request)))
    await engine.wait_sent(3)
    engine.set_load(draining=True)
    engine.migrate_all()
    await until(lambda: bool(client._pool.num_parked))
    engine.steps = None
    await engine.kill()
    engine.set_load(draining=False)
    await engine.start()
    assert tokens_of(await reading) == expected_tokens(request)
    assert [s.attempt for s in engine.submits] == [0, 1]


async def test_migrate_within_an_engine_core_goes_on_at_once(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(3)
    request = record()
    reading = asyncio.create_task(collect(await client.submit(request)))
    await engine.wait_sent(3)
    engine.steps = None
    engine.migrate_all()
    assert tokens_of(await reading) == expected_tokens(request)


async def test_a_resumed_request_refused_as_unavailable_tries_again(
    engine: FakeEngineCore, client: SessionClient
) -> None:
    def refuse_first_retry(submit: pb.Submit) -> pb.ServerFrame | None:
        if submit.attempt != 1:
            return None
        rejected = pb.Rejected(request_id=submit.record.request_id, attempt=1, code="unavailable", message="no worker")
        return pb.ServerFrame(rejected=rejected)

    engine.on_submit = refuse_first_retry
    engine.steps = asyncio.Semaphore(2)
    request = record()
    reading = asyncio.create_task(collect(await client.submit(request)))
    await engine.wait_sent(2)
    engine.steps = None
    engine.break_streams()
    assert tokens_of(await reading) == expected_tokens(request)
    assert [s.attempt for s in engine.submits] == [0, 1, 2]


async def test_another_model_does_not_go_on_with_a_request(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(2)
    request = record()
    generation = await client.submit(request)
    reading = asyncio.create_task(collect(generation))
    await until(lambda: generation.request.begun is not None)
    await engine.kill()
    engine.set_load(model_fingerprint="m2")
    await engine.start()
    deltas = await reading
    assert deltas[-1].error_code is ErrorCode.STREAM_INTERRUPTED


async def test_abort_of_one_choice_and_then_all(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(2)
    generation = await client.submit(record(n=2))
    await engine.wait_sent(4)
    await generation.abort([1])
    await generation.abort()
    deltas = await collect(generation)
    assert {d.choice: d.finish_reason for d in deltas if d.finish_reason} == {
        0: FinishReason.ABORT,
        1: FinishReason.ABORT,
    }
    assert deltas[-1].usage is not None


async def test_an_aborted_choice_stays_ended_after_a_resume(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(2)
    request = record(n=2)
    generation = await client.submit(request)
    await until(lambda: generation.request.num_output_tokens == 4)
    await generation.abort([1])
    await engine.kill()
    engine.steps = None
    await engine.start()
    deltas = await collect(generation, aborted=frozenset({1}))
    assert tokens_of(deltas) == expected_tokens(request)
    assert [(p.choice, p.finished) for p in engine.submits[-1].resume.prior_outputs] == [(0, False), (1, True)]


async def test_abort_while_there_is_no_engine_core_ends_here(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(2)
    generation = await client.submit(record())
    await engine.wait_sent(2)
    await engine.kill()
    await until(lambda: not client.connected)
    await generation.abort()
    deltas = await collect(generation)
    assert deltas[-1].finish_reason is FinishReason.ABORT
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.output_tokens == len(tokens_of(deltas))


async def test_aclose_aborts_and_forgets(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(1)
    request = record()
    generation = await client.submit(request)
    reading = asyncio.create_task(generation.next())
    await reading
    await generation.aclose()
    await generation.aclose()
    assert client.num_open == 0
    await engine.aborted.wait()
    assert engine.aborts[0].request_id == request.request_id
    assert engine.running == {}
    assert sample(client, "request_success_total", finished_reason="abort") == 1


async def test_a_cancelled_submit_leaves_nothing(engine: FakeEngineCore, client: SessionClient) -> None:
    got = asyncio.Event()

    def swallow(submit: pb.Submit) -> pb.ServerFrame:
        got.set()
        return pb.ServerFrame(outputs=pb.StepOutputs())

    engine.on_submit = swallow
    submitting = asyncio.create_task(client.submit(record()))
    await got.wait()
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)
    assert client.num_open == 0
    await engine.aborted.wait()


async def test_a_cancelled_next_loses_nothing(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(0)
    request = record()
    generation = await client.submit(request)
    waiting = asyncio.create_task(generation.next())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    for _ in range(request.task.params.max_tokens or 0):
        engine.steps.release()
    assert tokens_of(await collect(generation)) == expected_tokens(request)


async def test_a_code_of_another_version_ends_its_own_request_only(
    engine: FakeEngineCore, client: SessionClient
) -> None:
    bad = pb.Delta(finish_reason=pb.FINISH_REASON_ERROR, error_code="code of another version")

    def poison_once(run: Run, delta: Delta) -> list[Any]:
        if (run.attempt, delta.result.first_index) != (0, 3):
            return [delta]
        bad.request_id = delta.request_id
        return [pb.ServerFrame(outputs=pb.StepOutputs(deltas=[bad]))]

    engine.script = poison_once
    deltas = await collect(await client.submit(record()))
    assert ErrorCode.INTERNAL in [delta.error_code for delta in deltas]
    engine.script = None
    request = record()
    assert tokens_of(await collect(await client.submit(request))) == expected_tokens(request)
    assert len(engine.submits) == 2


async def test_closing_ends_open_requests(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(1)
    generation = await client.submit(record())
    assert (await generation.next())[0].result.token_ids
    await client.aclose()
    [last] = await generation.next()
    assert last.error_code is ErrorCode.STREAM_INTERRUPTED
    assert client.dead_tasks() == ["engine session", "engine clock"]


async def test_the_death_of_one_of_two_engine_cores_is_the_others_work(tmp_path: Path) -> None:
    """No request waits for the dead one, which gets its share again once it is back."""
    places = [f"unix:{tmp_path}/{name}" for name in "ab"]
    client = SessionClient([EngineAddress(place) for place in places], GatewayMetrics("m"), waits())
    async with running_engine(places[0]) as first, running_engine(places[1]) as second:
        client.start()
        await until(lambda: client.load.num_workers == 2)
        first.steps, second.steps = asyncio.Semaphore(20), (going_on := asyncio.Semaphore(20))
        requests = [msgspec.structs.replace(record(n=2), prompt_token_ids=[i]) for i in range(8)]
        reading = [asyncio.create_task(collect(await client.submit(request))) for request in requests]
        await first.wait_sent(20)
        assert first.submits
        assert second.submits
        await first.kill()
        await until(lambda: client.load.num_workers == 1)
        first.steps = None
        for _ in range(1000):
            going_on.release()
        for request, deltas in zip(requests, await asyncio.gather(*reading), strict=True):
            assert [tokens_of(deltas, choice) for choice in (0, 1)] == [
                expected_tokens(request, choice) for choice in (0, 1)
            ]
        assert not client.problem
        second.steps = None
        await first.start()
        await until(lambda: client.load.num_workers == 2)
        asked = len(first.submits)
        async with asyncio.timeout(20):
            for i in itertools.count():
                await collect(await client.submit(msgspec.structs.replace(record(), prompt_token_ids=[i % 400])))
                if len(first.submits) > asked:
                    break
    await client.aclose()
    assert client.num_open == 0


async def test_one_engine_core_by_two_addresses_is_one(engine: FakeEngineCore, address: str) -> None:
    again = address.replace("unix:/", "unix:/./")
    client = SessionClient([EngineAddress(address), EngineAddress(again)], GatewayMetrics("m"), waits())
    client.start()
    await until(lambda: len(engine.metadata) >= 2)
    for _ in range(3):
        request = record()
        assert tokens_of(await collect(await client.submit(request))) == expected_tokens(request)
    await until(lambda: sorted(link.problem for link in client._links) == ["", IS_DOUBLE])
    assert client.load.num_workers == 1
    assert not client.problem
    await client.aclose()
