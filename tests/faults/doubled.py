"""Two gateways sharing a store, two engine cores behind both, workers at each: any process has a replacement.

A proxy sits between the first engine core and the gateways, and another between it and its workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import httpx
import psutil
from bench.sides import free_port, is_ready
from tests.e2e.stack import NO_TLS
from tests.e2e.tiers import Tiers, tiers_apart
from tests.faults.proxy import ChaosProxy
from tests.faults.variants import ADAPTER
from tests.worker.adapters.files import DEMO, adapter_of

from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1 import engine_pb2_grpc

NAME = "demo"
RESUMED = "pagoda_requests_resumed_total"
ENGINE_CORES, GATEWAYS = ("core-0", "core-1"), ("gateway-0", "gateway-1")


def core_of(name: str) -> str:
    """The name of a worker's engine core; an engine core's own name for itself."""
    return next(core for core in ENGINE_CORES if name.startswith(core))


class Doubled:
    """Processes by name: `core-0`, `gateway-1`, and workers, whose names begin with that of their engine core."""

    def __init__(self, tiers: Tiers, gateway_link: ChaosProxy, worker_link: ChaosProxy, grpc_port: int) -> None:
        self._tiers = tiers
        self.gateway_link, self.worker_link = gateway_link, worker_link
        self._grpc = dict(zip(ENGINE_CORES, (tiers.grpc, grpc_port), strict=True))
        self._zmq = dict(zip(ENGINE_CORES, (tiers.zmq, free_port()), strict=True))
        self._http = dict(zip(GATEWAYS, (tiers.http, free_port()), strict=True))
        self._adapters = ("--lora-modules", f"{ADAPTER}={adapter_of(DEMO, tiers.directory / ADAPTER)[0]}")
        self.wait_until = tiers.wait_until

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._http.values()]

    @property
    def directory(self) -> Path:
        return self._tiers.directory

    def start(self, name: str) -> None:
        """Start the process with this name."""
        if name in ENGINE_CORES:
            zmq = f"tcp://127.0.0.1:{self._zmq[name]}"
            self._start(name, "engine-core", f"--listen=127.0.0.1:{self._grpc[name]}", f"--worker-endpoint={zmq}")
        elif name in GATEWAYS:
            engines = f"127.0.0.1:{self.gateway_link.port},127.0.0.1:{self._grpc[ENGINE_CORES[1]]}"
            options = ("--store", f"sqlite://{self.directory}/store.db", "--served-model-name", NAME, *self._adapters)
            self._start(name, "gateway", "--engine", engines, f"--port={self._http[name]}", *options)
        else:
            first = name.startswith(ENGINE_CORES[0])
            port = self.worker_link.port if first else self._zmq[ENGINE_CORES[1]]
            link = ("--engine", f"tcp://127.0.0.1:{port}", "--worker-id", name)
            self._start(name, "worker", *link, "--threads=1", *self._adapters)

    def _start(self, name: str, *arguments: str) -> None:
        self._tiers.start(name, *arguments)

    def pid(self, name: str) -> int:
        return self._tiers.processes[name].pid

    def exit_code(self, name: str, timeout_s: float = 120.0) -> int:
        return self._tiers.processes[name].wait(timeout_s)

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(self.pid(name))

    @property
    def names(self) -> list[str]:
        """Names of the running processes."""
        return sorted(name for name, process in self._tiers.processes.items() if process.poll() is None)

    def family(self) -> list[psutil.Process]:
        """The running processes and their descendants."""
        members = [self.process(name) for name in self.names]
        return members + [child for member in members for child in member.children(recursive=True)]

    def descriptors(self) -> dict[str, int]:
        """Number of open file descriptors by process name."""
        return {name: self.process(name).num_fds() for name in self.names}

    def workers(self, core: str) -> list[str]:
        """Ids of the engine core's ready workers; empty if it does not answer."""
        try:
            with self._admin(core) as admin:
                workers = admin.ListWorkers(pb.ListWorkersRequest(), timeout=30).workers
        except grpc.RpcError:
            return []
        return [worker.worker_id for worker in workers if worker.state == "ready"]

    def rows(self, core: str, names: Sequence[str]) -> int:
        """Number of rows that these workers hold now."""
        with self._admin(core) as admin:
            workers = admin.ListWorkers(pb.ListWorkersRequest(), timeout=30).workers
        return sum(worker.num_rows for worker in workers if worker.worker_id in names)

    def stats(self, core: str) -> pb.GetStatsResponse:
        with self._admin(core) as admin:
            return admin.GetStats(pb.GetStatsRequest(), timeout=30)

    def num_moved(self) -> int:
        """Number of requests resubmitted so far by the gateways that are up."""
        pages = [httpx.get(f"{url}/metrics", timeout=30, verify=NO_TLS).text for url in self.urls if is_ready(url)]
        found = [line for page in pages for line in page.splitlines() if line.startswith(RESUMED)]
        return sum(int(float(line.split()[-1])) for line in found)

    def well(self, name: str) -> bool:
        """Whether this process works. A worker and its engine core only count together."""
        if name in GATEWAYS:
            return is_ready(self.urls[GATEWAYS.index(name)])
        return bool(self.workers(core_of(name)))

    def whole(self) -> bool:
        """Whether every gateway and engine core is up, each engine core has a worker, and no block is in use."""
        if not all(map(is_ready, self.urls)) or not all(map(self.workers, ENGINE_CORES)):
            return False
        try:
            return not any(self.stats(core).blocks_used for core in ENGINE_CORES)
        except grpc.RpcError:
            return False

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    @contextlib.contextmanager
    def _admin(self, core: str) -> Iterator[engine_pb2_grpc.AdminStub]:
        with grpc.insecure_channel(f"127.0.0.1:{self._grpc[core]}") as channel:
            yield engine_pb2_grpc.AdminStub(channel)


@contextlib.contextmanager
def doubled(directory: Path) -> Iterator[Doubled]:
    """Start two of everything and wait until they are ready."""
    with tiers_apart(directory) as tiers, ChaosProxy(tiers.grpc) as gateway_link, ChaosProxy(tiers.zmq) as worker_link:
        place = Doubled(tiers, gateway_link, worker_link, free_port())
        for name in (*ENGINE_CORES, "core-0-a", "core-1-a", *GATEWAYS):
            place.start(name)
        place.wait_until(place.whole)
        yield place
