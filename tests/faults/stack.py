"""The stacks that faults are injected into: `pagoda serve`, or separate tiers with a proxy on each link."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import grpc
import psutil
from bench.sides import is_ready
from tests.e2e.stack import remaining, running_stack
from tests.e2e.tiers import Tiers, tiers_apart
from tests.faults.proxy import ChaosProxy

from pagoda.commands.ping import ping
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1 import engine_pb2_grpc

NAME = ("--served-model-name", "demo")
ROLES = ("worker", "engine-core")  # may be killed in mid-stream; a gateway's death would break client connections


class Place(Protocol):
    """A running stack, seen from outside."""

    @property
    def url(self) -> str: ...
    def children(self, role: str) -> list[psutil.Process]: ...
    def family(self) -> list[psutil.Process]: ...
    def stats(self) -> pb.GetStatsResponse: ...
    def ready(self) -> bool: ...
    def wait_until(self, condition: Callable[[], bool], timeout_s: float = ...) -> None: ...


@contextlib.contextmanager
def served(directory: Path, *arguments: str, workers: int = 1) -> Iterator[Place]:
    """Run `pagoda serve`; after it ends, none of the processes seen at the start or the end may be left.

    Raises:
        RuntimeError: one of them is left.
    """
    with running_stack(directory, *NAME, *arguments, workers=workers) as stack:
        family = stack.family()
        yield stack
        family += stack.family()
    if left := remaining(family):
        raise RuntimeError(f"processes are left: {left}")


DRAIN_S = 600  # streams are slow on a busy machine


class Apart:
    """One engine core, one gateway and any number of workers; the engine core has a proxy to either other tier."""

    def __init__(self, tiers: Tiers, gateway_link: ChaosProxy, worker_link: ChaosProxy, program: str) -> None:
        self._tiers = tiers
        self._program = program
        self.gateway_link, self.worker_link = gateway_link, worker_link
        self.wait_until = tiers.wait_until

    @property
    def url(self) -> str:
        return self._tiers.url

    @property
    def directory(self) -> Path:
        return self._tiers.directory

    def start_worker(self, name: str, *arguments: str) -> None:
        link = f"tcp://127.0.0.1:{self.worker_link.port}"
        self._tiers.start(name, "worker", "--engine", link, "--worker-id", name, *arguments, program=self._program)

    def children(self, role: str) -> list[psutil.Process]:
        """The running processes whose name begins with `role`."""
        started = [(name, process) for name, process in self._tiers.processes.items() if process.poll() is None]
        return [psutil.Process(process.pid) for name, process in started if name.startswith(role)]

    def family(self) -> list[psutil.Process]:
        return self.children("")

    def stats(self) -> pb.GetStatsResponse:
        with self._admin() as admin:
            return admin.GetStats(pb.GetStatsRequest(), timeout=30)

    def ready_workers(self) -> list[str]:
        with self._admin() as admin:
            workers = admin.ListWorkers(pb.ListWorkersRequest(), timeout=30).workers
            return [worker.worker_id for worker in workers if worker.state == "ready"]

    def answers(self, worker_id: str) -> int:
        """How often the engine core accepted or refused this worker."""
        log = (self.directory / "engine-core.log").read_text()
        return log.count(f"refused worker '{worker_id}'") + log.count(f"worker '{worker_id}' joined")

    def ready(self) -> bool:
        return is_ready(self.url)

    @contextlib.contextmanager
    def _admin(self) -> Iterator[engine_pb2_grpc.AdminStub]:
        with grpc.insecure_channel(f"127.0.0.1:{self._tiers.grpc}") as channel:
            yield engine_pb2_grpc.AdminStub(channel)


@contextlib.contextmanager
def apart(directory: Path, *, program: str = "pagoda.cli") -> Iterator[Apart]:
    """Start the tiers with one worker, worker-0, and wait until they are ready. All run the module `program`."""
    with tiers_apart(directory) as tiers, ChaosProxy(tiers.grpc) as gateway_link, ChaosProxy(tiers.zmq) as worker_link:
        place = Apart(tiers, gateway_link, worker_link, program)
        addresses = ("--listen", f"127.0.0.1:{tiers.grpc}", "--worker-endpoint", f"tcp://127.0.0.1:{tiers.zmq}")
        tiers.start("engine-core", "engine-core", *addresses, program=program)
        tiers.wait_until(lambda: ping(f"grpc://127.0.0.1:{tiers.grpc}") is None)
        place.start_worker("worker-0", f"--drain-timeout-s={DRAIN_S}")
        link = f"127.0.0.1:{gateway_link.port}"
        arguments = ("--engine", link, "--port", str(tiers.http), *NAME)
        tiers.start("gateway", "gateway", *arguments, program=program)
        tiers.wait_until(place.ready)
        yield place


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def signal_all(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Signal the processes that still exist."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def pause(processes: Sequence[psutil.Process], seconds: float) -> None:
    """SIGSTOP the processes for `seconds`, then SIGCONT those that still exist."""
    try:
        signal_all(processes, signal.SIGSTOP)
        time.sleep(seconds)
    finally:
        signal_all(processes, signal.SIGCONT)
