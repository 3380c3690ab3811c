"""The adapter to torch.cuda: without a device, it imports and needs none; with one, what it does."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from pagoda_worker.device.accelerator import Accelerator
from pagoda_worker.device.cuda import device_seconds
from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.ops import AttentionShape, Needs

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WITH_FLASH = pytest.mark.skipif(
    not any(map(find_spec, ("flash_attn", "flash_attn_interface"))), reason="needs flash-attention"
)


@pytest.fixture
def accelerator() -> Accelerator:
    from pagoda_worker.device.cuda import CudaAccelerator

    return CudaAccelerator(torch.device("cuda:0"))


def test_importing_it_asks_nothing_of_a_device() -> None:
    program = (
        "import pagoda_worker.device.cuda, pagoda_worker.process.startup, torch; print(torch.cuda.is_initialized())"
    )
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
    ids.add_(100)  # later work has no effect
    (here,) = fetch.wait()
    assert here.tolist() == list(range(1, 9))
    assert fetch.done()


@pytest.mark.gpu
@ON_A_GPU
def test_pinned_memory_is_copied_in_order_with_the_device_s_work(accelerator: Accelerator) -> None:
    host = accelerator.pinned((3, 1 << 20), torch.float32)
    assert host.is_pinned()
    there = torch.zeros(1 << 20, device="cuda")
    for value in (1.0, 2.0):
        there.fill_(value)
        host[int(value)].copy_(there, non_blocking=True)
    there.copy_(host[1], non_blocking=True)
    accelerator.synchronize()
    assert host[2].eq(2.0).all()
    assert there.eq(1.0).all()


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


@pytest.mark.gpu
@ON_A_GPU
def test_a_call_is_timed(accelerator: Accelerator) -> None:
    x, out = torch.randn(2, 2**27, device="cuda").unbind()
    assert device_seconds(lambda: out.copy_(x)) > 0


@pytest.mark.gpu
@ON_A_GPU
@WITH_FLASH
def test_flash_attention_passes_its_check() -> None:
    shape = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128, scale=128**-0.5)
    needs = Needs(dtype=torch.bfloat16, head_dims=(128,), attention=(shape, shape), block_size=256)
    ops, _ = load_ops(torch.device("cuda:0"), "triton,attention=flash", needs)
    assert "attention flash" in ops.name
    load_ops(torch.device("cuda:0"), "auto", needs)
