"""What `pagoda doctor` says of GPUs; the rest of it is in test_cli."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.services.sse_server import SseServer, serving

from pagoda.commands import doctor
from pagoda.processes.machine import has_nvidia_device


@pytest.mark.parametrize(
    ("names", "found"), [((), False), (("null", "nvidiactl"), False), (("nvidia0",), True), (("dxg",), True)]
)
def test_a_driver_shows_by_its_device_files(tmp_path: Path, names: tuple[str, ...], found: bool) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert has_nvidia_device(tmp_path) is found


def test_without_a_gpu_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_nvidia_device", lambda: False)
    monkeypatch.setattr(doctor, "ASK_TORCH", "raise ValueError('asked')")
    assert doctor._gpus() == ("ok", "no NVIDIA GPU: workers compute on the CPU", "")


@pytest.mark.parametrize(
    ("answer", "timeout_s", "state", "text"),
    [
        (
            "print('cuda:0 A, 80 GiB, 9.0'); print('cuda:1 B, 80 GiB, 9.0')",
            60.0,
            "ok",
            "GPUs: cuda:0 A, 80 GiB, 9.0; c",
        ),
        (
            "raise ValueError('torch 9 is built without CUDA')",
            60.0,
            "warn",
            "cannot use the GPU: torch 9 is built without",
        ),
        ("import os; os._exit(3)", 60.0, "warn", "torch could not be queried"),
        ("import time; time.sleep(100)", 0.5, "warn", "did not answer within 0.5 s"),
    ],
)
def test_torch_is_asked_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, answer: str, timeout_s: float, state: str, text: str
) -> None:
    monkeypatch.setattr(doctor, "has_nvidia_device", lambda: True)
    monkeypatch.setattr(doctor, "ASK_TORCH", answer)
    monkeypatch.setattr(doctor, "GPU_TIMEOUT_S", timeout_s)
    finding = doctor._gpus()
    assert finding.state == state
    assert text in finding.what
    assert bool(finding.advice) is (state == "warn")


def test_torch_itself_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_nvidia_device", lambda: True)
    finding = doctor._gpus()
    assert finding.what.startswith("GPUs: cuda:0 " if finding.state == "ok" else "torch cannot use the GPU: ")
    assert "could not be queried" not in finding.what


@pytest.mark.parametrize(
    ("owner", "state", "text"),
    [
        ("pagoda", "ok", "is used by a running Pagoda that serves served"),
        ("other", "FAIL", "is in use"),
        ("", "FAIL", "is in use"),
    ],
)
async def test_a_port_that_our_own_server_holds_is_no_failure(owner: str, state: str, text: str) -> None:
    async with serving(SseServer(owned_by=owner)) as server:
        port = urlsplit(server.url).port or 0
        finding = await asyncio.to_thread(doctor._port, port)
    assert finding.state == state
    assert f"port {port} " in finding.what
    assert text in finding.what
    assert (await asyncio.to_thread(doctor._port, port)).what == f"port {port} is free"
