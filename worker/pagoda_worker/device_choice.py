"""The option `--device`. Imports no torch: the configuration is checked before anything heavy is imported.

cpu
cuda, cuda:N    the first, the N-th of the GPUs that this process sees
auto, auto:N    the same if there is a usable GPU, else the CPU
"""

from __future__ import annotations

import re
from typing import NamedTuple

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
_FORM = re.compile(r"(?P<kind>auto|cpu|cuda)(:(?P<number>\d{1,4}))?")


class DeviceChoice(NamedTuple):
    """`number` counts the GPUs that CUDA_VISIBLE_DEVICES leaves, from 0."""

    kind: str
    number: int


def parse_device(text: str) -> DeviceChoice:
    """Read the option `device`.

    Raises:
        ValueError: it has another form.
    """
    found = _FORM.fullmatch(text)
    if found is None or (found["kind"] == CPU and found["number"]):
        raise ValueError(f"device must be auto, cpu, cuda, auto:N or cuda:N, got {text!r}")
    return DeviceChoice(found["kind"], int(found["number"] or 0))


def device_of_worker(text: str, index: int) -> str:
    """The option `device` for the worker of this index beside others: each takes a GPU of its own unless one is named.

    Raises:
        ValueError: as `parse_device`.
    """
    parse_device(text)
    return f"{text}:{index}" if text in (AUTO, CUDA) and index else text
