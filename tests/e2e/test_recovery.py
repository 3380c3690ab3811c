"""A stream goes on with the same tokens when a process under it is killed.

The undisturbed run is the oracle: text, tokens and log-probabilities must be equal to the last bit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest
from tests.e2e.stack import Stack, kill, running_stack

pytestmark = pytest.mark.e2e
MODEL = "demo"
NUM_STREAMS = 12
MAX_TOKENS = 390


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("pair"), "--served-model-name", MODEL, workers=2) as running:
        yield running


def make_request(index: int) -> dict[str, Any]:
    """Half of the requests greedy, half sampled; some with penalties, some with two choices."""
    rng = random.Random(index)
    request: dict[str, Any] = {
        "model": MODEL,
        "prompt": [rng.randrange(30, 120) for _ in range(rng.randrange(5, 120))],
        "max_tokens": MAX_TOKENS,
        "logprobs": 2,
        "stream": True,
        "seed": index,
        "temperature": 0.0 if index % 2 else 0.9,
        "extra_body": {"ignore_eos": True},
    }
    if index % 4 == 0:
        request |= {"top_p": 0.95, "frequency_penalty": 0.3, "n": 2}
    return request


async def collect(client: openai.AsyncOpenAI, request: dict[str, Any], started: asyncio.Semaphore) -> list[Any]:
    """Per choice: text, tokens with log-probabilities, finish reason."""
    choices: dict[int, list[Any]] = {}
    announced = False
    async for chunk in await client.completions.create(**request):
        for choice in chunk.choices:
            record = choices.setdefault(choice.index, ["", [], None])
            record[0] += choice.text
            if choice.logprobs is not None:
                record[1] += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
            record[2] = choice.finish_reason or record[2]
            if not announced and len(record[1]) > 10:
                started.release()
                announced = True
    return [choices[index] for index in sorted(choices)]


async def run_all(stack: Stack, requests: list[dict[str, Any]], when_flowing: Any = None) -> list[Any]:
    started = asyncio.Semaphore(0)
    async with stack.async_client() as client:
        streams = [asyncio.create_task(collect(client, request, started)) for request in requests]
        if when_flowing is not None:
            await started.acquire()  # the rest follows at once, and an engine core is ahead of its clients
            await asyncio.to_thread(when_flowing)
        return await asyncio.gather(*streams)


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[Any]:
    """Each request alone."""
    return [asyncio.run(run_all(stack, [make_request(index)]))[0] for index in range(NUM_STREAMS)]


def check(results: list[Any], undisturbed: list[Any]) -> None:
    for index, (result, expected) in enumerate(zip(results, undisturbed, strict=True)):
        assert result == expected, f"request {index} differs"
        assert all(len(choice[1]) == MAX_TOKENS for choice in result)


def requests() -> list[dict[str, Any]]:
    return [make_request(index) for index in range(NUM_STREAMS)]


def test_company_changes_nothing(stack: Stack, undisturbed: list[Any]) -> None:
    check(asyncio.run(run_all(stack, requests())), undisturbed)


def test_streams_survive_the_death_of_a_worker(stack: Stack, undisturbed: list[Any]) -> None:
    deaths = stack.stats().worker_deaths

    def kill_a_busy_worker() -> None:
        kill(max(stack.ready_workers(), key=lambda worker: worker.num_rows).pid)

    check(asyncio.run(run_all(stack, requests(), kill_a_busy_worker)), undisturbed)
    assert stack.stats().worker_deaths == deaths + 1
    assert stack.stats().replays > 0
    stack.wait_until(lambda: len(stack.ready_workers()) == 2)


def test_streams_survive_the_death_of_the_engine_core(stack: Stack, undisturbed: list[Any]) -> None:
    num_continued = 0
    while not num_continued:  # an engine core may be done with everything before a client has its first token
        victim = stack.children("engine-core")[0]
        check(asyncio.run(run_all(stack, requests(), partial(kill, victim.pid))), undisturbed)
        assert not victim.is_running()
        stack.wait_until(lambda: len(stack.ready_workers()) == 2)
        num_continued = stack.stats().output_tokens  # its successor counts from 0


def test_streams_survive_the_death_of_the_only_worker(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: list[Any]
) -> None:
    with running_stack(tmp_path_factory.mktemp("single"), "--served-model-name", MODEL) as single:
        victim = single.children("worker")[0]
        check(asyncio.run(run_all(single, requests(), lambda: kill(victim.pid))), undisturbed)
        assert not victim.is_running()


def test_a_tiny_block_pool_changes_nothing(tmp_path_factory: pytest.TempPathFactory, undisturbed: list[Any]) -> None:
    arguments = ("--served-model-name", MODEL, "--num-blocks", "24", "--max-model-len", "512")
    with running_stack(tmp_path_factory.mktemp("tiny"), *arguments) as tiny:
        check(asyncio.run(run_all(tiny, requests())), undisturbed)
        assert tiny.stats().preemptions > 0
        assert tiny.stats().blocks_used == 0


SWAPPING = ("--num-blocks", "24", "--max-model-len", "512", "--swap-space-gib", "0.05", "--preemption", "swap")


def test_swapping_changes_nothing(tmp_path_factory: pytest.TempPathFactory, undisturbed: list[Any]) -> None:
    with running_stack(tmp_path_factory.mktemp("swap"), "--served-model-name", MODEL, *SWAPPING) as swapping:
        check(asyncio.run(run_all(swapping, requests())), undisturbed)
        stats = swapping.stats()
        assert stats.preemptions >= stats.swap_preemptions > 0
        assert stats.swapped_out_blocks >= stats.swapped_in_blocks > 0
        assert stats.blocks_used == stats.swap_blocks_used == 0


def test_swapped_streams_survive_the_death_of_the_worker_that_keeps_them(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: list[Any]
) -> None:
    with running_stack(tmp_path_factory.mktemp("kept"), "--served-model-name", MODEL, *SWAPPING) as swapping:
        victim = swapping.children("worker")[0]

        def kill_the_keeper() -> None:
            swapping.wait_until(lambda: swapping.stats().swap_blocks_used > 0)
            kill(victim.pid)

        check(asyncio.run(run_all(swapping, requests(), kill_the_keeper)), undisturbed)
        assert not victim.is_running()
        stats = swapping.stats()
        assert (stats.worker_deaths, stats.swap_blocks_used) == (1, 0)
        assert stats.replays > 0


def test_speculation_changes_nothing_also_when_a_worker_dies(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: list[Any]
) -> None:
    arguments = ("--served-model-name", MODEL, "--speculation", "ngram", "--speculation-tokens", "64")
    with running_stack(tmp_path_factory.mktemp("drafts"), *arguments) as drafting:
        victim = drafting.children("worker")[0]
        check(asyncio.run(run_all(drafting, requests(), lambda: kill(victim.pid))), undisturbed)
        stats = drafting.stats()
        assert stats.draft_tokens >= stats.accepted_draft_tokens > 0
        assert stats.worker_deaths == 1
