"""A private redis-server, on a unix socket in a directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

PROGRAMS = ("redis-server", "valkey-server")


class RedisServer:
    def __init__(self, directory: Path, port: int = 0) -> None:
        """Also listens on `port` of the loopback address, unless it is 0."""
        found = [path for name in PROGRAMS if (path := shutil.which(name))]
        if not found:
            pytest.fail(f"one of {', '.join(PROGRAMS)} is needed: apt-get install redis-server", pytrace=False)
        self._program = found[0]
        self._directory = directory
        self._port = port
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return f"unix://{self._directory}/redis.sock"

    async def start(self) -> None:
        """Start with the data that an earlier run left on the disk."""
        options = ["--unixsocket", f"{self._directory}/redis.sock", "--dir", str(self._directory)]
        options += ["--port", str(self._port), "--bind", "127.0.0.1"]
        kept = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self._process = await asyncio.create_subprocess_exec(
            self._program, *options, *kept, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert self._process.stdout is not None
        said = b""
        while b"eady to accept connections" not in said:
            line = await self._process.stdout.readline()
            assert line, said.decode()
            said += line

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.communicate()
            self._process = None


@contextlib.asynccontextmanager
async def running_redis(port: int = 0) -> AsyncIterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="pagoda-redis-") as directory:
        server = RedisServer(Path(directory), port)
        await server.start()
        try:
            yield server
        finally:
            await server.kill()
