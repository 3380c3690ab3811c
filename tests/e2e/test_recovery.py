"""A stream goes on with the same tokens when a process under it is killed.

The undisturbed run is the oracle: text, tokens and log-probabilities must be equal to the last bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.e2e.stack import Stack, kill, running_stack
from tests.e2e.streams import MODEL, PLAIN_TOKENS, plain, run_all
from tests.e2e.tiers import pagoda
from tests.gateway.model_dir import byte_level_tokenizer
from tests.worker.adapters.files import DEMO, adapter_of
from tests.worker.models.checkpoints import NATIVE, make_model, save

from pagoda_proto.engine.v1 import engine_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]  # torch alone, on a busy machine, takes minutes
NUM_STREAMS = 6
NAMES = (MODEL, "one", "two")
BEAMS, SEARCHED_TOKENS = 4, 150


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `lora_modules` says of two adapters."""
    out = tmp_path_factory.mktemp("adapters")
    made = {name: adapter_of(DEMO, out / name, seed, size=0.08)[0] for seed, name in enumerate(NAMES[1:])}
    return ",".join(f"{name}={path}" for name, path in made.items())


def named(adapters: str) -> tuple[str, ...]:
    return "--served-model-name", MODEL, "--lora-modules", adapters


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, adapters: str) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("pair"), *named(adapters), workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[Any]:
    """Each request alone."""
    return [asyncio.run(run_all(stack, [request]))[0] for request in requests()]


def check(results: list[Any], undisturbed: list[Any]) -> None:
    for index, (result, expected) in enumerate(zip(results, undisturbed, strict=True)):
        assert result == expected, f"request {index} differs"
        assert all(len(choice.tokens) == PLAIN_TOKENS for choice in result)


def requests() -> list[dict[str, Any]]:
    """Of the model, and of two adapters of it, by turns."""
    return [plain(index) | {"model": NAMES[index % len(NAMES)]} for index in range(NUM_STREAMS)]


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


def test_streams_go_on_when_their_worker_is_asked_to_leave(stack: Stack, undisturbed: list[Any]) -> None:
    deaths, [socket] = stack.stats().worker_deaths, stack.data_dir.rglob("engine.sock")
    asked: list[pb.Worker] = []

    def drain_a_busy_worker() -> None:
        asked.append(max(stack.ready_workers(), key=lambda worker: worker.num_rows))
        done = pagoda("workers", "drain", asked[0].worker_id, "--engine", f"unix:{socket}")
        assert done.returncode == 0, done

    check(asyncio.run(run_all(stack, requests(), drain_a_busy_worker)), undisturbed)
    stack.wait_until(lambda: not psutil.pid_exists(asked[0].pid))
    stack.wait_until(lambda: len(stack.ready_workers()) == 2)
    assert stack.stats().worker_deaths == deaths


def test_streams_far_beyond_the_windows_of_a_model_survive_the_death_of_their_worker(tmp_path: Path) -> None:
    """What its layers no longer keep is computed again from the tokens, as are the blocks that the dead one had."""
    path = save(make_model(*NATIVE["gemma3"]), tmp_path / "model", torch.bfloat16)
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    little = ("--block-size", "16", "--max-tokens-per-step", "32", "--chunk-size", "24", "--threads", "1")
    asked = [one | {"prompt": (one["prompt"] * 60)[:300]} for one in (plain(index) for index in range(4))]
    with running_stack(tmp_path, "--served-model-name", MODEL, *little, model=str(path)) as stack:
        assert "for layers that keep the last " in stack.log.read_text()
        alone = [asyncio.run(run_all(stack, [request]))[0] for request in asked]
        victim = stack.children("worker")[0]
        check(asyncio.run(run_all(stack, asked, partial(kill, victim.pid))), alone)
        assert not victim.is_running()
        assert stack.stats().replays > 0


@pytest.mark.parametrize("role", ["worker", "engine-core"])
def test_a_search_survives_the_death_of_whoever_works_on_it(stack: Stack, role: str) -> None:
    alone, in_time = [found(stack, index) for index in range(2)], False
    while not in_time:
        before = stack.stats().output_tokens
        with ThreadPoolExecutor() as threads:
            searches = [threads.submit(found, stack, index) for index in range(2)]
            stack.wait_until(lambda before=before: stack.stats().output_tokens > before + BEAMS * 8)
            busy = max(stack.ready_workers(), key=lambda worker: worker.num_rows)
            kill(busy.pid if role == "worker" else stack.children("engine-core")[0].pid)
            in_time = not any(search.done() for search in searches)
        assert [search.result() for search in searches] == alone
        stack.wait_until(lambda: len(stack.ready_workers()) == 2)


def found(stack: Stack, index: int) -> list[list[int]]:
    """What one search over HTTP finds."""
    extra = {"use_beam_search": True, "ignore_eos": True, "return_token_ids": True}
    asked = {"prompt": plain(index)["prompt"], "n": BEAMS, "max_tokens": SEARCHED_TOKENS, "extra_body": extra}
    with stack.client(timeout=240) as client:
        choices = client.completions.create(model=MODEL, **asked).choices
    assert [len(choice.token_ids) for choice in choices] == [SEARCHED_TOKENS] * BEAMS
    return [choice.token_ids for choice in choices]


def test_streams_survive_the_death_of_the_engine_core(stack: Stack, undisturbed: list[Any]) -> None:
    num_continued = 0
    while not num_continued:  # an engine core may be done with everything before a client has its first token
        victim = stack.children("engine-core")[0]
        check(asyncio.run(run_all(stack, requests(), partial(kill, victim.pid))), undisturbed)
        assert not victim.is_running()
        stack.wait_until(lambda: len(stack.ready_workers()) == 2)
        num_continued = stack.stats().output_tokens  # its successor counts from 0


def test_streams_survive_the_death_of_the_only_worker(
    tmp_path_factory: pytest.TempPathFactory, adapters: str, undisturbed: list[Any]
) -> None:
    with running_stack(tmp_path_factory.mktemp("single"), *named(adapters)) as single:
        victim = single.children("worker")[0]
        check(asyncio.run(run_all(single, requests(), lambda: kill(victim.pid))), undisturbed)
        assert not victim.is_running()


def test_a_tiny_block_pool_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, adapters: str, undisturbed: list[Any]
) -> None:
    arguments = (*named(adapters), "--num-blocks", "24", "--max-model-len", "512")
    with running_stack(tmp_path_factory.mktemp("tiny"), *arguments) as tiny:
        check(asyncio.run(run_all(tiny, requests())), undisturbed)
        assert tiny.stats().preemptions > 0
        assert tiny.stats().blocks_used == 0


SWAPPING = ("--num-blocks", "24", "--max-model-len", "512", "--swap-space-gib", "0.05", "--preemption", "swap")


def test_swapping_changes_nothing_also_when_the_worker_dies_that_keeps_what_is_swapped(
    tmp_path_factory: pytest.TempPathFactory, adapters: str, undisturbed: list[Any]
) -> None:
    with running_stack(tmp_path_factory.mktemp("swap"), *named(adapters), *SWAPPING) as swapping:
        check(asyncio.run(run_all(swapping, requests())), undisturbed)
        stats = swapping.stats()
        assert stats.preemptions >= stats.swap_preemptions > 0
        assert stats.swapped_out_blocks >= stats.swapped_in_blocks > 0
        assert stats.blocks_used == stats.swap_blocks_used == 0

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
    tmp_path_factory: pytest.TempPathFactory, adapters: str, undisturbed: list[Any]
) -> None:
    arguments = (*named(adapters), "--speculation", "ngram", "--speculation-tokens", "64")
    with running_stack(tmp_path_factory.mktemp("drafts"), *arguments) as drafting:
        victim = drafting.children("worker")[0]
        check(asyncio.run(run_all(drafting, requests(), lambda: kill(victim.pid))), undisturbed)
        stats = drafting.stats()
        assert stats.draft_tokens >= stats.accepted_draft_tokens > 0
        assert stats.worker_deaths == 1
