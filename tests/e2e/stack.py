"""The real stack as a user starts it: `pagoda serve` in a process of its own, observed from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import psutil
from bench.sides import free_port, is_ready

from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1 import engine_pb2_grpc

READY_TIMEOUT_S = 240.0
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # saves 30 ms: a client's own context first loads all CA certificates


@dataclass
class Stack:
    process: subprocess.Popen[bytes]
    port: int
    data_dir: Path
    log: Path
    clients: list[openai.OpenAI] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> openai.OpenAI:
        """A client, closed with the stack at the latest."""
        options = {
            "api_key": "none",
            "max_retries": 0,
            "http_client": openai.DefaultHttpxClient(verify=NO_TLS),
        } | options
        client = openai.OpenAI(base_url=f"{self.url}/v1", **options)
        self.clients.append(client)
        return client

    def async_client(self) -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(verify=NO_TLS)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=240, http_client=http
        )

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, verify=NO_TLS, **{"timeout": 120} | options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, verify=NO_TLS, **{"timeout": 120} | options)

    def children(self, role: str) -> list[psutil.Process]:
        """The processes of one tier: gateway, engine-core or worker."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if role in child.cmdline():
                    found.append(child)
        return found

    def engine_sockets(self) -> list[Path]:
        return sorted(self.data_dir.rglob("core-*.sock"))

    def workers(self) -> list[pb.Worker]:
        """The workers of all engine cores."""
        listed = [self._admin(socket, "ListWorkers", pb.ListWorkersRequest()) for socket in self.engine_sockets()]
        return [worker for one in listed for worker in one.workers]

    def stats(self) -> pb.GetStatsResponse:
        """Of the first engine core."""
        return self._admin(self.engine_sockets()[0], "GetStats", pb.GetStatsRequest())

    def _admin(self, engine_socket: Path, method: str, request: Any) -> Any:
        with grpc.insecure_channel(f"unix:{engine_socket}") as channel:
            return getattr(engine_pb2_grpc.AdminStub(channel), method)(request, timeout=60)

    def ready_workers(self) -> list[pb.Worker]:
        """Empty while no engine core listens, for instance while a killed one restarts."""
        try:
            return [worker for worker in self.workers() if worker.state == "ready"]
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return []

    def wait_until(self, condition: Any, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{condition} did not come true; log:\n{self.tail()}")
            time.sleep(0.05)

    def ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the stack ended with {self.process.returncode}; log:\n{self.tail()}")
        return is_ready(self.url)

    def tail(self) -> str:
        return self.log.read_text()[-6000:]

    def family(self) -> list[psutil.Process]:
        """The supervisor and its descendants. Each one's parent is checked, because a process may end during the
        listing and its pid be reused by a stranger."""
        members = [psutil.Process(self.process.pid)]
        for child in members[0].children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.ppid() in {member.pid for member in members}:
                    members.append(child)
        return members


@contextlib.contextmanager
def running_stack(tmp_path: Path, *arguments: str, model: str = "", workers: int = 1) -> Iterator[Stack]:
    """Start `pagoda serve`, wait until it and all its workers are ready, and ask it to end.

    Raises:
        RuntimeError: it did not exit cleanly, or left a process behind.
    """
    port, log = free_port(), tmp_path / "serve.log"
    command = [sys.executable, "-m", "pagoda.cli", "serve", *([model] if model else [])]
    command += ["--port", str(port), "--workers", str(workers), "--data-dir", str(tmp_path / "d"), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    stack = Stack(process, port, tmp_path / "d", log)
    try:
        stack.wait_until(stack.ready, READY_TIMEOUT_S)
        stack.wait_until(lambda: len(stack.ready_workers()) == workers, READY_TIMEOUT_S)
        yield stack
    finally:
        family = stack.family() if process.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            raise RuntimeError(f"the stack did not stop; log:\n{stack.tail()}") from None
        else:
            was_killed = process.returncode == -signal.SIGKILL  # by a test; it was still dying
            if family and ((process.returncode and not was_killed) or remaining(family)):
                raise RuntimeError(f"it ended with {process.returncode}, left are {alive(family)}; {stack.tail()}")
        finally:
            for client in stack.clients:
                client.close()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end while we look
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def remaining(processes: list[psutil.Process], timeout_s: float = 30.0) -> list[psutil.Process]:
    """The processes that do not end within `timeout_s`. Only live ones are waited for: psutil raises FileNotFoundError
    for a pid that has become a thread's id."""
    _, left = psutil.wait_procs(alive(processes), timeout_s)
    return list(left)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
