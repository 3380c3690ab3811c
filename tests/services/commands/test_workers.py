"""`pagoda workers` with scripted engine cores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagoda.cli import main
from pagoda.processes.exit_codes import EXIT_CONFIG, EXIT_OK, EXIT_UNREACHABLE
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1.engine_pb2_grpc import AdminServicer, add_AdminServicer_to_server


class Core(AdminServicer):
    """An engine core with workers of these names and states."""

    def __init__(self, directory: Path, name: str, workers: Sequence[tuple[str, str]]) -> None:
        self.address = f"unix:{directory / name}"
        self.left: list[str] = []
        self._workers = workers
        self._server = grpc.server(ThreadPoolExecutor(1))
        add_AdminServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait()

    def ListWorkers(self, request: Any, context: Any) -> pb.ListWorkersResponse:
        fields = {"device": "cpu", "num_blocks": 10, "num_free_blocks": 4, "num_rows": 2, "rss_bytes": 3 << 20}
        return pb.ListWorkersResponse(
            workers=[pb.Worker(worker_id=name, state=state, steps_done=7, **fields) for name, state in self._workers]
        )

    def DrainWorker(self, request: pb.DrainWorkerRequest, context: Any) -> pb.DrainWorkerResponse:
        if request.worker_id == "quick":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such worker")
        self.left.append(request.worker_id)
        return pb.DrainWorkerResponse()

    def ResetPrefixCache(self, request: Any, context: Any) -> pb.ResetPrefixCacheResponse:
        return pb.ResetPrefixCacheResponse(blocks_dropped=5)


@pytest.fixture
def cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Core]]:
    """Two engine cores, named in the environment as for a gateway."""
    first = Core(tmp_path, "1", [("worker-0", "ready"), ("both", "ready"), ("lost", "dead"), ("worker-0", "hung")])
    second = Core(tmp_path, "2", [("both", "suspect"), ("lost", "hung"), ("worker-1", "draining"), ("quick", "ready")])
    monkeypatch.setenv("PAGODA_ENGINE", f"{first.address},{second.address}")
    yield [first, second]
    first.stop()
    second.stop()


def workers(*words: str) -> int:
    return main(["workers", *words])


def test_workers_of_all_engine_cores_are_listed(cores: list[Core], capsys: pytest.CaptureFixture[str]) -> None:
    assert workers("list") == EXIT_OK
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["WORKER", "STATE", "DEVICE", "ROWS", "FREE", "BLOCKS", "STEPS", "MIB", "ENGINE", "CORE"]
    assert [line.split()[:2] for line in lines] == [
        ["worker-0", "ready"], ["both", "ready"], ["lost", "dead"], ["worker-0", "hung"],
        ["both", "suspect"], ["lost", "hung"], ["worker-1", "draining"], ["quick", "ready"],
    ]  # fmt: skip
    assert lines[0].split()[2:] == ["cpu", "2", "4", "of", "10", "7", "3", cores[0].address]
    assert workers("list", "--json") == EXIT_OK
    rows = json.loads(capsys.readouterr().out)
    assert (rows[0]["worker_id"], rows[0]["rss_bytes"], rows[6]["engine"]) == ("worker-0", 3 << 20, cores[1].address)


def test_an_engine_core_that_is_away_hides_no_other(cores: list[Core], capsys: pytest.CaptureFixture[str]) -> None:
    cores[0].stop()
    assert workers("list") == EXIT_UNREACHABLE
    told = capsys.readouterr()
    assert "worker-1" in told.out
    assert f"pagoda: error: {cores[0].address}: " in told.err
    assert cores[1].address not in told.err


def test_a_worker_is_asked_to_leave_where_it_is(cores: list[Core], capsys: pytest.CaptureFixture[str]) -> None:
    assert workers("drain", "worker-0") == EXIT_OK
    assert f"worker-0 leaves {cores[0].address}" in capsys.readouterr().err
    assert workers("drain", "both", "--engine", cores[1].address) == EXIT_OK
    assert [core.left for core in cores] == [["worker-0"], ["both"]]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("both", "'both' is at unix:"),
        ("lost", "there is no worker 'lost' to drain"),
        ("worker-1", "there is no worker 'worker-1' to drain"),
        ("quick", "there is no worker 'quick' to drain"),
        ("nobody", "there is no worker 'nobody' to drain"),
    ],
)
def test_nobody_leaves_who_was_not_meant(
    cores: list[Core], capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    assert workers("drain", name) == EXIT_CONFIG
    assert says in capsys.readouterr().err
    assert [core.left for core in cores] == [[], []]


def test_prefixes_are_forgotten_everywhere(cores: list[Core], capsys: pytest.CaptureFixture[str]) -> None:
    assert workers("forget-prefixes") == EXIT_OK
    told = capsys.readouterr().err
    assert [f"{core.address}: 5 blocks dropped" in told for core in cores] == [True, True]


@pytest.mark.parametrize(
    "address", ["", "unix:", "unix:a,unix:a", "ipc:///run/workers.sock", "core.example:7700", "127.0.0.1"]
)
def test_an_address_that_cannot_be_one_is_refused(capsys: pytest.CaptureFixture[str], address: str) -> None:
    assert workers("list", "--engine", address) == EXIT_CONFIG
    assert "engine" in capsys.readouterr().err
