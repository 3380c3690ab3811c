from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.engine_core.bench import Bench
from tests.engine_core.fake_worker import FakeWorker, make_hello
from tests.engine_core.served import Server
from tests.fakes import FakeRunner


@pytest.fixture
def bench() -> Bench:
    """An engine core with one worker, of epoch 1."""
    bench = Bench()
    bench.executor.join(1, make_hello())
    bench.settle()
    return bench


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A private directory with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="pagoda-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
async def server(socket_dir: Path) -> AsyncIterator[Server]:
    server = Server(socket_dir)
    try:
        await server.event("listening")
        yield server
    finally:
        await server.close()


@pytest.fixture
async def worker(server: Server) -> AsyncIterator[FakeWorker]:
    hello = make_hello(num_blocks=1024, block_size=16)
    with FakeWorker(
        server.config.worker_endpoint, hello, runner=lambda _: FakeRunner(1024, 16, verify=False)
    ) as worker:
        await server.workers(1)
        yield worker
