"""A stream continues with the same tokens when a process that serves it is killed.

The undisturbed run is the oracle: text, tokens and log-probabilities must be equal to the last bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.e2e.stack import Stack, kill, running_stack
from tests.e2e.streams import MODEL, plain, run_all
from tests.gateway.model_dir import byte_level_tokenizer
from tests.worker.adapters.files import DEMO, adapter_of
from tests.worker.models.checkpoints import FALLBACK, NATIVE, make_model, save

from pagoda.cli import main
from pagoda_proto.engine.v1 import engine_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]  # torch alone, on a busy machine, takes minutes
NUM_STREAMS, TOKENS = 6, 160
NAMES = (MODEL, "one", "two")
BEAMS, SEARCHED_TOKENS = 4, 120
MOST_ROUNDS = 5


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> str:
    return adapters_of(DEMO, tmp_path_factory.mktemp("adapters"))


def adapters_of(model: Path, out: Path) -> str:
    """The value of `lora_modules` for two adapters."""
    made = {name: adapter_of(model, out / name, seed, size=0.08)[0] for seed, name in enumerate(NAMES[1:])}
    return ",".join(f"{name}={path}" for name, path in made.items())


def named(adapters: str) -> tuple[str, ...]:
    return "--served-model-name", MODEL, "--lora-modules", adapters


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, adapters: str) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("pair"), *named(adapters), workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[Any]:
    return alone(stack, requests())


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A mixture of experts, and two adapters of it."""
    out = tmp_path_factory.mktemp("experts")
    path = tiny("qwen3_moe", out)
    with running_stack(out, *named(adapters_of(path, out)), model=str(path), workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def of_experts(experts: Stack) -> list[Any]:
    return alone(experts, requests())


@pytest.fixture(scope="module", params=[("stack", "undisturbed"), ("experts", "of_experts")], ids=["dense", "experts"])
def either(request: pytest.FixtureRequest) -> tuple[Stack, list[Any]]:
    """A running stack, and the result of each request there, run alone."""
    stack, results = map(request.getfixturevalue, request.param)
    return stack, results


def tiny(family: str, out: Path) -> Path:
    """A tiny model of a family, with a tokenizer."""
    path = save(make_model(*(NATIVE | FALLBACK)[family]), out / "model", torch.bfloat16)
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    return path


def alone(stack: Stack, asked: list[dict[str, Any]]) -> list[Any]:
    """The result of each request, run alone."""
    return [asyncio.run(run_all(stack, [request]))[0] for request in asked]


def check(results: list[Any], undisturbed: list[Any]) -> None:
    for index, (result, expected) in enumerate(zip(results, undisturbed, strict=True)):
        assert result == expected, f"request {index} differs"
        assert all(len(choice.tokens) == TOKENS for choice in result)


def requests() -> list[dict[str, Any]]:
    """Requests for the model and for two adapters of it, in turn."""
    return [asked(index) | {"model": NAMES[index % len(NAMES)]} for index in range(NUM_STREAMS)]


def asked(index: int) -> dict[str, Any]:
    return plain(index) | {"max_tokens": TOKENS}


def check_in_mid_stream(
    stack: Stack, asked: list[dict[str, Any]], undisturbed: list[Any], act: Callable[[], None]
) -> int:
    """Run `act` in mid-stream, and again if the streams had ended before it; returns how often it ran."""
    replays, workers = stack.stats().replays, len(stack.ready_workers())
    for times in range(1, MOST_ROUNDS + 1):
        check(asyncio.run(run_all(stack, asked, act)), undisturbed)
        stack.wait_until(lambda: len(stack.ready_workers()) == workers)
        if stack.stats().replays > replays:
            return times
    raise AssertionError(f"nothing was computed again, {MOST_ROUNDS} times")


def test_company_changes_nothing(either: tuple[Stack, list[Any]]) -> None:
    stack, undisturbed = either
    check(asyncio.run(run_all(stack, requests())), undisturbed)


def test_streams_survive_the_death_of_a_worker(either: tuple[Stack, list[Any]]) -> None:
    stack, undisturbed = either
    deaths = stack.stats().worker_deaths

    def kill_a_busy_worker() -> None:
        kill(max(stack.ready_workers(), key=lambda worker: worker.num_rows).pid)

    times = check_in_mid_stream(stack, requests(), undisturbed, kill_a_busy_worker)
    assert stack.stats().worker_deaths == deaths + times
    assert stack.log.read_text().count("weights read and packed") == 2  # once for each worker, across restarts


def test_streams_go_on_when_their_worker_is_asked_to_leave(stack: Stack, undisturbed: list[Any]) -> None:
    deaths, [socket] = stack.stats().worker_deaths, stack.engine_sockets()
    left: list[pb.Worker] = []

    def drain_a_busy_worker() -> None:
        left.append(max(stack.ready_workers(), key=lambda worker: worker.num_rows))
        assert main(["workers", "drain", left[-1].worker_id, "--engine", f"unix:{socket}"]) == 0

    check_in_mid_stream(stack, requests(), undisturbed, drain_a_busy_worker)
    stack.wait_until(lambda: not any(psutil.pid_exists(worker.pid) for worker in left))
    assert stack.stats().worker_deaths == deaths


def test_streams_far_beyond_the_windows_of_a_model_survive_the_death_of_their_worker(tmp_path: Path) -> None:
    """The KV that its layers no longer keep is recomputed from the tokens, as are the dead worker's blocks."""
    path = tiny("gemma3", tmp_path)
    little = ("--block-size", "16", "--max-tokens-per-step", "32", "--chunk-size", "24", "--threads", "1")
    long = [one | {"prompt": (one["prompt"] * 60)[:300]} for one in map(asked, range(4))]
    with running_stack(tmp_path, "--served-model-name", MODEL, *little, model=str(path)) as stack:
        assert "for layers that keep the last " in stack.log.read_text()
        expected = alone(stack, long)
        deaths = stack.stats().worker_deaths
        times = check_in_mid_stream(stack, long, expected, lambda: kill(stack.children("worker")[0].pid))
        assert stack.stats().worker_deaths == deaths + times


@pytest.mark.slow
def test_a_model_that_runs_through_transformers_says_so_once_and_its_streams_survive_the_death_of_their_worker(
    tmp_path: Path,
) -> None:
    path, same = tiny("olmo", tmp_path), list(map(asked, range(4)))
    with running_stack(tmp_path, "--served-model-name", MODEL, model=str(path)) as stack:
        expected, deaths = alone(stack, same), stack.stats().worker_deaths
        times = check_in_mid_stream(stack, same, expected, lambda: kill(stack.children("worker")[0].pid))
        assert stack.stats().worker_deaths == deaths + times
        log = stack.log.read_text()
        for said in ("runs through transformers' code, not natively: ", " ms through transformers, so a request gets "):
            assert log.count(said) == 1, said  # across restarts


@pytest.fixture(scope="module")
def found_alone(stack: Stack) -> list[list[list[int]]]:
    return [found(stack, index) for index in range(2)]


@pytest.mark.parametrize("role", ["worker", "engine-core"])
def test_a_search_survives_the_death_of_whoever_works_on_it(
    stack: Stack, found_alone: list[list[list[int]]], role: str
) -> None:
    in_time = False
    while not in_time:
        before = stack.stats().output_tokens
        with ThreadPoolExecutor() as threads:
            searches = [threads.submit(found, stack, index) for index in range(2)]
            stack.wait_until(lambda before=before: stack.stats().output_tokens > before + BEAMS * 8)
            busy = max(stack.ready_workers(), key=lambda worker: worker.num_rows)
            kill(busy.pid if role == "worker" else stack.children("engine-core")[0].pid)
            in_time = not any(search.done() for search in searches)
        assert [search.result() for search in searches] == found_alone
        stack.wait_until(lambda: len(stack.ready_workers()) == 2)


def found(stack: Stack, index: int) -> list[list[int]]:
    """The token ids that one beam search over HTTP finds."""
    extra = {"use_beam_search": True, "ignore_eos": True, "return_token_ids": True}
    asked = {"prompt": plain(index)["prompt"], "n": BEAMS, "max_tokens": SEARCHED_TOKENS, "extra_body": extra}
    with stack.client(timeout=240) as client:
        choices = client.completions.create(model=MODEL, **asked).choices
    assert [len(choice.token_ids) for choice in choices] == [SEARCHED_TOKENS] * BEAMS
    return [choice.token_ids for choice in choices]


def test_streams_survive_the_death_of_the_engine_core(either: tuple[Stack, list[Any]]) -> None:
    stack, undisturbed = either
    num_continued = 0
    while not num_continued:  # the engine core may finish everything before a client gets its first token
        victim = stack.children("engine-core")[0]
        check(asyncio.run(run_all(stack, requests(), partial(kill, victim.pid))), undisturbed)
        assert not victim.is_running()
        stack.wait_until(lambda: len(stack.ready_workers()) == 2)
        num_continued = stack.stats().output_tokens  # its successor counts from 0


def test_one_of_two_engine_cores_takes_over_the_streams_of_the_other(
    tmp_path: Path, adapters: str, undisturbed: list[Any]
) -> None:
    with running_stack(tmp_path, *named(adapters), "--engine-cores", "2", workers=2) as stack:
        listed = [worker["worker_id"] for worker in stack.get("/stack").json()["report"]["workers"]]
        assert sorted(listed) == ["1/worker-0", "2/worker-1"], "the gateway sees both"
        for place in range(2):
            resumed = num_resumed(stack)
            while num_resumed(stack) == resumed:  # all of its streams may have ended before it dies
                [victim] = [one for one in stack.children("engine-core") if f"core-{place}.sock" in str(one.cmdline())]
                check(asyncio.run(run_all(stack, requests(), partial(kill, victim.pid))), undisturbed)
                assert not victim.is_running()
                stack.wait_until(lambda: len(stack.ready_workers()) == 2)


def num_resumed(stack: Stack) -> float:
    lines = stack.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("pagoda_requests_resumed_total"))


# Blocks for two or three of the eight choices, and swap space for as many: some are swapped, others recomputed.
SCARCE = ("--num-blocks", "24", "--max-model-len", "512", "--swap-space-gib", "0.001", "--preemption", "swap")


@pytest.fixture(scope="module")
def scarce(tmp_path_factory: pytest.TempPathFactory, adapters: str) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("scarce"), *named(adapters), *SCARCE) as running:
        yield running


def test_a_tiny_block_pool_changes_nothing(scarce: Stack, undisturbed: list[Any]) -> None:
    before = scarce.stats()
    check(asyncio.run(run_all(scarce, requests())), undisturbed)
    after = scarce.stats()
    preempted, swapped = (getattr(after, name) - getattr(before, name) for name in ("preemptions", "swap_preemptions"))
    assert preempted > swapped > 0
    swapped_out, swapped_in = (
        getattr(after, name) - getattr(before, name) for name in ("swapped_out_blocks", "swapped_in_blocks")
    )
    assert swapped_out >= swapped_in > 0
    assert after.blocks_used == after.swap_blocks_used == 0


def test_swapping_changes_nothing_also_when_the_worker_dies_that_keeps_what_is_swapped(
    scarce: Stack, undisturbed: list[Any]
) -> None:
    """It is the only worker, so all requests wait for the next one."""
    deaths = scarce.stats().worker_deaths

    def kill_the_keeper() -> None:
        scarce.wait_until(lambda: (stats := scarce.stats()).swap_blocks_used > 0 or stats.blocks_used == 0)
        kill(scarce.children("worker")[0].pid)

    times = check_in_mid_stream(scarce, requests(), undisturbed, kill_the_keeper)
    stats = scarce.stats()
    assert (stats.worker_deaths, stats.swap_blocks_used) == (deaths + times, 0)


def test_speculation_changes_nothing_also_when_a_worker_dies(
    tmp_path_factory: pytest.TempPathFactory, adapters: str, undisturbed: list[Any]
) -> None:
    arguments = (*named(adapters), "--speculation", "suffix", "--speculation-tokens", "64")
    with running_stack(tmp_path_factory.mktemp("drafts"), *arguments) as drafting:
        times = check_in_mid_stream(drafting, requests(), undisturbed, lambda: kill(drafting.children("worker")[0].pid))
        stats = drafting.stats()
        assert stats.draft_tokens >= stats.accepted_draft_tokens > 0
        assert stats.worker_deaths == times
