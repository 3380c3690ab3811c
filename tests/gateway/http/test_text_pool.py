"""Pieces of text work: in which order they run, which are dropped, and which are refused."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_gateway.http.text_pool import INLINE_SIZE, LARGE_SIZE, NICENESS, FairQueue, Piece, TextPool
from pagoda_proto.errors import ErrorCode, PagodaError

SMALL, LARGE = INLINE_SIZE + 1, LARGE_SIZE + 1


def piece(client: str, size: int = SMALL) -> Piece:
    return Piece(client, size, lambda: None, asyncio.Future(loop=LOOP))


LOOP = asyncio.new_event_loop()
LOOP.close()  # a future must belong to a loop; nothing waits for it


def queue(num: int = 1000, per_client: int = 1000) -> FairQueue:
    return FairQueue(num, per_client)


def taken(pieces: FairQueue, large: bool = True) -> list[Piece]:
    found = []
    while (one := pieces.next(large=large)) is not None:
        found.append(one)
    return found


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([SMALL, LARGE])), max_size=30))
def test_clients_take_turns_and_nothing_is_lost(arrivals: list[tuple[str, int]]) -> None:
    waiting = queue()
    pieces = [piece(client, size) for client, size in arrivals]
    for one in pieces:
        waiting.add(one)
    order = taken(waiting)
    assert set(map(id, order)) == set(map(id, pieces))
    assert len(waiting) == 0
    for i, one in enumerate(order):  # a client is served again only after those that waited longer
        later = {other.client for other in order[i + 1 :]}
        again = next((j for j in range(i + 1, len(order)) if order[j].client == one.client), None)
        if again is not None:
            assert later <= {other.client for other in order[i + 1 : again + 1]}
    for client in "abc":
        for large in (False, True):
            mine = [one for one in pieces if one.client == client and one.large == large]
            assert [one for one in order if one.client == client and one.large == large] == mine


@given(st.lists(st.sampled_from([SMALL, LARGE]), max_size=20))
def test_large_pieces_wait_while_they_may_not_run(sizes: list[int]) -> None:
    waiting = queue()
    for size in sizes:
        waiting.add(piece("a", size))
    assert [one.size for one in taken(waiting, large=False)] == [size for size in sizes if size == SMALL]
    assert len(waiting) == sizes.count(LARGE)


def test_the_queue_is_bounded_in_all_and_by_client() -> None:
    waiting = queue(3, 2)
    waiting.add(piece("a"))
    waiting.add(piece("a"))
    for client in ("a", "b", "c"):
        if client == "b":
            waiting.add(piece(client))
            continue
        with pytest.raises(PagodaError) as caught:
            waiting.add(piece(client))
        assert (caught.value.code, caught.value.status.http) == (ErrorCode.OVERLOADED, 503)
        assert caught.value.retry_after_s > 0


def test_a_piece_can_be_taken_out_once() -> None:
    waiting = queue()
    gone, stays = piece("a"), piece("a")
    waiting.add(gone)
    waiting.add(stays)
    waiting.remove(gone)
    waiting.remove(gone)
    assert taken(waiting) == [stays]
    waiting.remove(stays)
    assert len(waiting) == 0


@pytest.fixture
async def gate() -> AsyncIterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


async def started(pool: TextPool, client: str, size: int, gate: threading.Event) -> asyncio.Task[bool]:
    """A running piece of work that ends when the gate opens."""
    running = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> bool:
        loop.call_soon_threadsafe(running.set)
        return gate.wait(60)

    task = asyncio.create_task(pool.run(client, size, work))
    await running.wait()
    return task


async def test_short_work_is_done_at_once() -> None:
    assert await TextPool(1, queue()).run("a", INLINE_SIZE, threading.current_thread) is threading.main_thread()
    assert await TextPool(1, queue()).run("a", SMALL, threading.current_thread) is not threading.main_thread()


async def test_work_whose_client_has_gone_never_begins(gate: threading.Event) -> None:
    waiting = queue()
    pool = TextPool(1, waiting)
    first = await started(pool, "a", SMALL, gate)
    ran: list[int] = []
    abandoned = [asyncio.create_task(pool.run("a", SMALL, lambda i=i: ran.append(i))) for i in range(8)]  # type: ignore[misc]
    other = asyncio.create_task(pool.run("b", SMALL, lambda: ran.append(99)))
    await asyncio.sleep(0)
    assert len(waiting) == 9
    for task in abandoned:
        task.cancel()
    await asyncio.gather(*abandoned, return_exceptions=True)
    assert len(waiting) == 1
    gate.set()
    await asyncio.gather(first, other)
    assert ran == [99]


async def test_a_small_piece_finds_a_thread_beside_large_ones(gate: threading.Event) -> None:
    pool = TextPool(2, queue())
    large = [await started(pool, "a", LARGE, gate), asyncio.create_task(pool.run("a", LARGE, gate.wait))]
    assert await pool.run("b", SMALL, lambda: "done") == "done"
    assert not any(task.done() for task in large)
    gate.set()
    await asyncio.gather(*large)


async def test_one_thread_serves_large_pieces_too() -> None:
    assert await TextPool(1, queue()).run("a", LARGE, lambda: 3) == 3


async def test_what_a_large_piece_took_goes_back_to_the_system() -> None:
    """Without trimming, a few live blocks would keep all of the memory."""
    block, count = 2000, 50_000

    def work() -> list[bytes]:
        return [bytes(block) for _ in range(count)][::500]

    before = psutil.Process().memory_info().rss
    pool = TextPool(1, queue())
    pins = await pool.run("a", LARGE, work)
    await pool.run("a", SMALL, bool)  # runs after the clean-up of the large piece, in the only thread
    assert psutil.Process().memory_info().rss - before < block * count // 2
    assert len(pins) == 100


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
@pytest.mark.parametrize("own", [5, 15])
def test_only_work_without_pythons_lock_yields_to_whoever_made_the_pool(own: int) -> None:
    """A thread that holds the GIL while waiting for a CPU would make the event loop wait, too."""

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    async def found() -> list[int]:
        pool = TextPool(1, queue())
        return [await pool.run("a", SMALL, niceness, native=native) for native in (True, False)]

    def low() -> list[int]:
        os.setpriority(os.PRIO_PROCESS, 0, own)
        return asyncio.run(found())

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(low).result() == [min(own + NICENESS, 19), own]


async def test_errors_are_the_callers_and_the_thread_goes_on(gate: threading.Event) -> None:
    pool = TextPool(1, queue())

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await pool.run("a", SMALL, fail)
    task = await started(pool, "a", SMALL, gate)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    gate.set()
    assert await pool.run("a", SMALL, lambda: 1) == 1
