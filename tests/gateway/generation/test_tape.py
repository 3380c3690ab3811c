"""All readers of a tape read the same, whenever they start; a store gives back what was on it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import few
from tests.fakes import make_delta
from tests.gateway.fakes_engine import FakeEngine, logprobs_for, play
from tests.gateway.streams import collect, record, tokens_of

from pagoda_gateway.generation.tape import Tape
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Begun, Delta, FinishReason, RequestRecord, Usage
from pagoda_proto.steps import TopLogprobs

TOKENS = (list(range(40, 52)), list(range(60, 66)))


async def recorded(tape: Tape, asked: RequestRecord, batch: int, late: Sequence[int]) -> list[list[Delta]]:
    """What readers get who join after these numbers of batches, and one from the start and one after the end."""
    generation = await tape.recording(FakeEngine(play(*TOKENS, batch=batch))).submit(asked)
    tape.start("fp")
    readers = [asyncio.create_task(collect(await tape.submit(asked)))]
    num_read = 0
    while await generation.next():
        num_read += 1
        readers += [asyncio.create_task(collect(await tape.submit(asked))) for at in late if at == num_read]
        await asyncio.sleep(0)
    tape.end()
    readers.append(asyncio.create_task(collect(await tape.submit(asked))))
    return await asyncio.gather(*readers)


def said(deltas: list[Delta]) -> list[tuple[list[int], list[TopLogprobs], FinishReason | None]]:
    return [
        (
            tokens_of(deltas, choice),
            [entry for delta in deltas if delta.choice == choice for entry in delta.result.logprobs or ()],
            next((delta.finish_reason for delta in deltas if delta.choice == choice and delta.finish_reason), None),
        )
        for choice in range(2)
    ]


@settings(max_examples=few(15), deadline=None)
@given(batch=st.integers(1, 5), late=st.lists(st.integers(1, 12), max_size=3), life=st.sampled_from(["", "7f"]))
def test_all_readers_read_the_same(batch: int, late: list[int], life: str) -> None:
    asked, tape = record(n=2, logprobs=1), Tape("job", life)
    found = asyncio.run(recorded(tape, asked, batch, late))
    again = asyncio.run(read_from(Tape.of("job", tape.dump()), asked))
    expected = [(tokens, logprobs_for(asked, tokens, 1), FinishReason.LENGTH) for tokens in TOKENS]
    assert all(said(deltas) == expected for deltas in [*found, again])
    begun = [delta.result.begun for deltas in [*found, again] for delta in deltas if delta.result.begun is not None]
    assert len(begun) == len(found) + 1
    assert Tape.of("job", tape.dump()).tag() == tape.tag() != Tape("job").tag()


async def read_from(tape: Tape, asked: RequestRecord) -> list[Delta]:
    await tape.started()
    return await collect(await tape.submit(asked))


async def test_a_failure_reaches_all_readers() -> None:
    tape, asked = Tape("job"), record()
    reading = await tape.submit(asked)
    tape.add(make_delta(0, [1], request_id=asked.request_id))
    waiting = asyncio.create_task(reading.next())
    assert tokens_of(await waiting) == [1]
    waiting = asyncio.create_task(reading.next())
    await asyncio.sleep(0)
    tape.fail(PagodaError(ErrorCode.UNAVAILABLE, "gone"))
    for read in (waiting, tape.started(), reading.next()):
        with pytest.raises(PagodaError, match="gone"):
            await read


def test_its_tag_tells_jobs_weights_and_numerics_apart() -> None:
    tags = set()
    for job, begun in [("a", None), ("b", None), ("a", ("x", "y")), ("a", ("x", "z")), ("a", ("w", "y"))]:
        tape = Tape(job)
        made = None if begun is None else Begun(model_fingerprint=begun[0], numerics_id=begun[1])
        delta = make_delta(0, [1], request_id="r", usage=Usage(prompt_tokens=1))
        delta.result.begun = made
        tape.add(delta)
        tags.add(tape.tag())
        assert tape.fits(tape.tag())
        assert tape.fits(Tape(job).tag()), "before its first token a stream is of no weights"
    assert len(tags) == 5
