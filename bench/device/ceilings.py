"""What this device can do at most, as everything else is held against it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from bench.device.hardware import Hardware, seconds
from bench.device.job import Job
from bench.device.report import Line, attempt, say

COPY, PRODUCT = "copy, read and written", "bf16 product"
GB, TFLOP = 1e9, 1e12


def copied_per_s(hardware: Hardware, num_bytes: int) -> float:
    """Bytes read and written per second by a copy of `num_bytes`."""
    source = torch.ones(num_bytes // 4, dtype=torch.int32, device=hardware.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(hardware, lambda: target.copy_(source))


def flops_per_s(hardware: Hardware, size: int) -> float:
    """Of a product of square bfloat16 matrices of random numbers, which draw more power than zeros."""
    a, b = (torch.randn(size, size, device=hardware.device).bfloat16() for _ in range(2))
    return 2 * size**3 / seconds(hardware, lambda: a @ b)


def run(job: Job) -> None:
    memory = job.hardware.accelerator().memory().total / 2**30
    say(Line(what="memory", value=memory, unit="GiB", note=job.hardware.describe()))
    num_bytes, size = (2**24, 256) if job.smoke else (2**31, 8192)

    def copy() -> Iterator[Line]:
        measured = copied_per_s(job.hardware, num_bytes) / GB
        yield Line(what=COPY, value=measured, unit="GB/s", note=f"{num_bytes / 2**20:,.0f} MiB")

    def product() -> Iterator[Line]:
        yield Line(what=PRODUCT, value=flops_per_s(job.hardware, size) / TFLOP, unit="TFLOP/s", note=f"{size}^3")

    attempt(COPY, copy)
    attempt(PRODUCT, product)
