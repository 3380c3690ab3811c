"""The adapter to torch.cuda: on a machine without a device, that it exists and asks for none; on one, what it does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pagoda_worker.accelerator import Accelerator

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def accelerator() -> Accelerator:
    from pagoda_worker.cuda import CudaAccelerator

    return CudaAccelerator(torch.device("cuda:0"))


def test_importing_it_asks_nothing_of_a_device() -> None:
    program = "import pagoda_worker.cuda, pagoda_worker.startup, torch; print(torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"


@pytest.mark.gpu
@ON_A_GPU
def test_a_fetch_brings_what_was_computed_before_it(accelerator: Accelerator) -> None:
    big = torch.randn(4096, 4096, device="cuda")
    ids = accelerator.upload(torch.arange(8))
    for _ in range(20):
        big = big @ big / 64
    ids.add_(1)
    fetch = accelerator.fetch(ids)
    ids.add_(100)  # later work does not show
    (here,) = fetch.wait()
    assert here.tolist() == list(range(1, 9))
    assert fetch.done()


@pytest.mark.gpu
@ON_A_GPU
def test_a_recording_reads_its_inputs_anew(accelerator: Accelerator) -> None:
    source, target = torch.zeros(5, device="cuda"), torch.empty(5, device="cuda")

    def run() -> None:
        target.copy_(source * 2 + 1)

    replay = accelerator.capture(run)
    for value in (3.0, -4.0):
        source.fill_(value)
        replay()
        accelerator.synchronize()
        assert target.tolist() == [2 * value + 1] * 5


@pytest.mark.gpu
@ON_A_GPU
def test_memory_that_is_not_there_is_told_apart_from_a_lost_device(accelerator: Accelerator) -> None:
    free, total = accelerator.memory()
    assert 0 < free <= total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    assert accelerator.peak_of(lambda: torch.empty(2**28, dtype=torch.uint8, device="cuda")) >= 2**28
