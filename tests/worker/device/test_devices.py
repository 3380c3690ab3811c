"""Which device a worker takes, and its message when it cannot use the one that was named."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from pagoda_worker.config import WorkerConfig
from pagoda_worker.device.devices import DeviceError, TorchGpus, choose_device, describe_gpus, may_be_on_gpu
from pagoda_worker.device_choice import device_of_worker, parse_device


@dataclass
class FakeGpus:
    number: int = 0
    why_missing: str = ""
    problems: dict[int, str] = field(default_factory=dict)

    def missing(self) -> str:
        return self.why_missing

    def count(self) -> int:
        return self.number

    def problem(self, index: int) -> str:
        return self.problems.get(index, "")


@pytest.mark.parametrize(
    ("text", "gpus", "device"),
    [
        ("cpu", FakeGpus(2), "cpu"),
        ("auto", FakeGpus(2), "cuda:0"),
        ("auto:1", FakeGpus(2), "cuda:1"),
        ("cuda", FakeGpus(2), "cuda:0"),
        ("cuda:1", FakeGpus(2), "cuda:1"),
        ("auto", FakeGpus(why_missing="no driver"), "cpu"),
        ("auto:3", FakeGpus(why_missing="no driver"), "cpu"),
        ("auto", FakeGpus(0), "cpu"),
        ("auto", FakeGpus(2, problems={0: "no kernel image"}), "cpu"),
        ("cuda:1", FakeGpus(2, problems={0: "no kernel image"}), "cuda:1"),
    ],
)
def test_choice(text: str, gpus: FakeGpus, device: str) -> None:
    assert choose_device(text, gpus) == torch.device(device)


@pytest.mark.parametrize(
    ("text", "gpus", "message"),
    [
        ("cuda", FakeGpus(why_missing="no driver"), "device=cuda: no driver"),
        ("cuda:0", FakeGpus(0), "device=cuda:0: no CUDA device is visible to this process"),
        ("cuda:2", FakeGpus(2), "device=cuda:2: 2 GPUs are visible, counted from 0; use fewer workers"),
        ("auto:1", FakeGpus(1), "device=auto:1: 1 GPU is visible"),
        ("cuda:1", FakeGpus(2, problems={1: "no kernel image"}), "device=cuda:1: .* does not work .*: no kernel image"),
        ("auto:1", FakeGpus(2, problems={1: "no kernel image"}), "device=auto:1: .* no kernel image"),
    ],
)
def test_a_device_that_cannot_be_had(text: str, gpus: FakeGpus, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        choose_device(text, gpus)


def test_a_gpu_that_does_not_work_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        choose_device("auto", FakeGpus(1, problems={0: "no kernel image"}))
    assert "computing on the CPU: GPU 0 does not work" in caplog.text
    assert "no kernel image" in caplog.text


@pytest.mark.parametrize("built", [None, "13.0"])
@pytest.mark.parametrize(("node", "there"), [("nvidiactl", True), ("nvidia0", True), ("dxg", True), ("null", False)])
def test_whether_it_may_be_a_gpu_is_seen_without_asking_one(
    built: str | None, node: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    (tmp_path / node).touch()
    assert may_be_on_gpu("auto:1", tmp_path) == may_be_on_gpu("cuda", tmp_path) == (there and built is not None)
    assert not may_be_on_gpu("cpu", tmp_path)


def test_this_machine_gets_what_it_has() -> None:
    if TorchGpus().missing():
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(DeviceError, match="device=cuda: "):
            choose_device("cuda")
        with pytest.raises(DeviceError):
            describe_gpus()
    else:
        assert choose_device("auto") == choose_device("cuda") == torch.device("cuda:0")
        assert describe_gpus()[0].startswith("cuda:0 ")


@pytest.mark.parametrize("text", ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda:1 ", "CUDA", "auto:99999"])
def test_a_device_of_no_known_form_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda"):
        parse_device(text)
    with pytest.raises(ValueError, match="device must be"):
        WorkerConfig(device=text)


@pytest.mark.parametrize(
    ("text", "index", "device"),
    [
        ("auto", 0, "auto"),
        ("auto", 3, "auto:3"),
        ("cuda", 0, "cuda"),
        ("cuda", 2, "cuda:2"),
        ("cuda:1", 2, "cuda:1"),
        ("cpu", 2, "cpu"),
    ],
)
def test_workers_beside_each_other_take_a_gpu_each(text: str, index: int, device: str) -> None:
    assert device_of_worker(text, index) == device


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01])
def test_a_share_of_memory_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization must be between 0\.01 and 1"):
        WorkerConfig(gpu_memory_utilization=share)
