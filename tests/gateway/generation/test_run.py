"""A run needs an engine but no HTTP; however it ends, its ending is reported once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

import pytest
from tests.gateway.fakes_engine import FakeEngine, FakeGeneration, Script, breaking, failing, play
from tests.gateway.model_dir import write_model_dir
from tests.gateway.streams import record

from pagoda_gateway.generation.job import Job, Shown
from pagoda_gateway.generation.run import Outcome, Run
from pagoda_gateway.generation.updates import Gathered, Update
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import RequestRecord, Usage


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText.load(write_model_dir(tmp_path_factory.mktemp("model")))


class Watched:
    """A run over a scripted engine, and the reports of its ending."""

    def __init__(self, text: ModelText, script: Script, *records: RequestRecord, **shown: bool) -> None:
        self.told: list[tuple[Usage, Outcome]] = []
        self.engine = FakeEngine(script)
        job = Job(id="j", created=0, model="m", records=records or (record(),), shown=Shown(**shown))
        self.run = Run(job, text, lambda usage, outcome: self.told.append((usage, outcome)))

    async def read(self) -> list[Update]:
        """Read all updates."""
        found: list[Update] = []
        async with aclosing(self.run) as run:
            await run.start(self.engine)
            while updates := await run.next():
                found += updates
        await self.run.aclose()
        return found

    @property
    def outcome(self) -> Outcome:
        ((_, outcome),) = self.told
        return outcome


def ids(text: ModelText, said: str) -> list[int]:
    return text.encode(said, add_special_tokens=False)


async def test_updates_add_up_and_usage_is_told_at_the_end(text: ModelText) -> None:
    watched = Watched(text, play(ids(text, "one two"), ids(text, "x")), record(n=2), record(n=2))
    gathered = [Gathered() for _ in range(4)]
    for update in await watched.read():
        gathered[update.choice].add(update)
    assert ["".join(each.texts) for each in gathered] == ["one two", "x"] * 2
    num_output = 2 * len(ids(text, "one two") + ids(text, "x"))
    usage = Usage(prompt_tokens=6, cached_prompt_tokens=4, output_tokens=num_output)
    assert watched.told == [(usage, Outcome.FINISHED)]


async def test_what_the_cache_gave_is_known_with_the_first_tokens(text: ModelText) -> None:
    watched = Watched(text, play(ids(text, "one two")), stream=True)
    async with aclosing(watched.run) as run:
        await run.start(watched.engine)
        assert run.usage().cached_prompt_tokens == 0
        assert await run.next()
        assert run.usage().cached_prompt_tokens == 2
    assert watched.outcome is Outcome.ABANDONED


def both(first: Script, *rest: Script) -> Script:
    """One script per record, in order."""
    scripts = iter((first, *rest))
    return lambda record: next(scripts)(record)


ENDINGS: list[tuple[Callable[[list[int]], Script], Outcome]] = [
    (lambda tokens: play(tokens), Outcome.FINISHED),
    (lambda tokens: breaking(*tokens), Outcome.FAILED),
    (lambda tokens: lambda record: [RuntimeError("bug")], Outcome.FAILED),
    (lambda tokens: lambda record: [], Outcome.FAILED),
    (lambda tokens: both(play(tokens), breaking()), Outcome.FAILED),
    (lambda tokens: failing(ErrorCode.OVERLOADED), Outcome.REFUSED),
    (lambda tokens: both(play(tokens), failing()), Outcome.REFUSED),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("script", "outcome"), ENDINGS, ids=range(len(ENDINGS)))
async def test_every_ending_is_told_once(
    text: ModelText, script: Callable[[list[int]], Script], outcome: Outcome, stream: bool
) -> None:
    watched = Watched(text, script(ids(text, "ab")), record(), record(), stream=stream)
    if outcome is Outcome.FINISHED:
        await watched.read()
    else:
        with pytest.raises((PagodaError, RuntimeError)):
            await watched.read()
    assert watched.outcome is outcome
    assert all(generation.closed.is_set() for generation in watched.engine.generations)


@pytest.mark.parametrize("num_records", [1, 3])
@pytest.mark.parametrize("at", ["submit", "read", "cancelled"])
async def test_a_reader_that_leaves_or_is_cancelled_abandons_it(text: ModelText, at: str, num_records: int) -> None:
    never = asyncio.Event()
    scripted = play(ids(text, "ab"))
    watched = Watched(text, lambda record: [*scripted(record)[:1], never], *(record() for _ in range(num_records)))
    if at == "submit":
        held = watched.engine.submit

        async def submit(record: RequestRecord) -> FakeGeneration:
            if record is not watched.run.job.records[-1]:
                return await held(record)
            watched.engine.submitted.set()
            await never.wait()
            raise AssertionError

        watched.engine.submit = submit  # type: ignore[method-assign]
    if at == "read":
        async with aclosing(watched.run) as run:
            await run.start(watched.engine)
            assert await run.next()
    else:
        reading = asyncio.create_task(watched.read())
        await watched.engine.submitted.wait()
        if at == "cancelled":
            for generation in watched.engine.generations:
                await generation.waiting.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert watched.outcome is Outcome.ABANDONED
    assert all(generation.closed.is_set() for generation in watched.engine.generations)


async def test_a_reader_that_is_interrupted_reads_on(text: ModelText) -> None:
    """Cancelling a call loses no update of any prompt."""
    released = asyncio.Event()
    scripted = play(ids(text, "a"))
    watched = Watched(text, lambda record: [released, *scripted(record)], record(), record())
    async with aclosing(watched.run) as run:
        await run.start(watched.engine)
        interrupted = asyncio.create_task(run.next())
        for generation in watched.engine.generations:
            await generation.waiting.wait()
        interrupted.cancel()
        await asyncio.gather(interrupted, return_exceptions=True)
        released.set()
        assert {update.choice for update in await run.next()} == {0, 1}
        assert await run.next() == []
    assert watched.outcome is Outcome.FINISHED


@pytest.mark.parametrize("at", ["submit", "read"])
async def test_a_run_whose_time_is_over_ends_in_words(text: ModelText, at: str) -> None:
    never = asyncio.Event()
    scripted = play(ids(text, "ab"))
    watched = Watched(text, lambda record: [*scripted(record)[: at == "read"], never], record())
    watched.run = Run(watched.run.job.due(time.time() + 0.2, 0.2), text, lambda *told: watched.told.append(told))
    if at == "submit":

        async def submit(record: RequestRecord) -> FakeGeneration:
            assert record.queue_timeout_s == 0.2, "until then it may wait to begin"
            await never.wait()
            raise AssertionError

        watched.engine.submit = submit  # type: ignore[method-assign]
    with pytest.raises(PagodaError) as raised:
        await watched.read()
    assert raised.value.code is ErrorCode.DEADLINE_EXCEEDED
    assert watched.outcome is Outcome.FAILED
    assert all(generation.closed.is_set() for generation in watched.engine.generations)


async def test_what_is_read_late_is_late_though_it_was_there(text: ModelText) -> None:
    watched = Watched(text, play(ids(text, "ab")), record())
    watched.run = Run(watched.run.job.due(time.time() + 0.2, 0.2), text, lambda *told: watched.told.append(told))
    async with aclosing(watched.run):
        await watched.run.start(watched.engine)
        await asyncio.sleep(0.25)  # as if its reader were busy
        with pytest.raises(PagodaError) as raised:
            await watched.run.next()
    assert raised.value.code is ErrorCode.DEADLINE_EXCEEDED
    assert watched.outcome is Outcome.FAILED
