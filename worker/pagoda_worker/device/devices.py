"""Which device this worker computes on, decided once at startup. A named device that cannot be used is an error."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import torch

from pagoda_worker.device_choice import AUTO, CPU, parse_device

GPU_NODES = ("nvidia*", "nvmap", "dxg")  # NVIDIA's driver: discrete cards, Jetson boards, and WSL

log = logging.getLogger(__name__)


class DeviceError(ValueError):
    """The requested device is not available here."""


class Gpus(Protocol):
    """Facts about this process's GPUs."""

    def missing(self) -> str:
        """Why there are none; empty if there are some."""

    def count(self) -> int: ...

    def problem(self, index: int) -> str:
        """Why this one does not compute; empty if it does."""


class TorchGpus:
    def missing(self) -> str:
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        return "" if torch.cuda.is_available() else "no CUDA device or no working driver is visible to this process"

    def count(self) -> int:
        return torch.cuda.device_count()

    def problem(self, index: int) -> str:
        try:
            ones = torch.ones(2, device=f"cuda:{index}")
            return "" if float(ones.sum()) == 2.0 else "it computed 1 + 1 wrongly"
        except RuntimeError as error:
            return str(error).splitlines()[0]


def choose_device(text: str, gpus: Gpus | None = None) -> torch.device:
    """The device that the option `device` means here.

    Raises:
        DeviceError: it names a GPU that does not exist or does not compute, or `auto` more GPUs than there are.
        ValueError: it is malformed.
    """
    choice, gpus = parse_device(text), gpus or TorchGpus()
    if choice.kind == CPU:
        return torch.device("cpu")
    missing = gpus.missing() or ("" if gpus.count() else "no CUDA device is visible to this process")
    if missing and choice.kind == AUTO:
        log.debug("computing on the CPU: %s", missing)
        return torch.device("cpu")
    if missing:
        raise DeviceError(f"device={text}: {missing}")
    if choice.number >= gpus.count():
        # Not the CPU for the last worker: workers that differ in their last bits cannot replace one another.
        seen = f"{gpus.count()} {'GPU is' if gpus.count() == 1 else 'GPUs are'} visible"
        raise DeviceError(f"device={text}: {seen}, counted from 0; use fewer workers or device=cpu")
    problem = gpus.problem(choice.number)
    if problem and choice.kind == AUTO and choice.number == 0:
        log.warning("computing on the CPU: GPU 0 does not work with torch %s: %s", torch.__version__, problem)
        return torch.device("cpu")
    if problem:
        raise DeviceError(f"device={text}: the GPU does not work with torch {torch.__version__}: {problem}")
    return torch.device("cuda", choice.number)


def may_be_on_gpu(text: str, nodes: Path = Path("/dev")) -> bool:
    """Whether `choose_device` may choose a GPU, without touching the driver: forks of a process that did cannot use it.

    Raises:
        ValueError: the option is malformed.
    """
    if parse_device(text).kind == CPU or torch.version.cuda is None:
        return False
    return any(any(nodes.glob(name)) for name in GPU_NODES)


def describe_gpus() -> list[str]:
    """A line per GPU that this process can compute on, for people; see `choose_device` for possible faults.

    Raises:
        DeviceError: GPUs are missing, or one of them cannot be used.
    """
    gpus = TorchGpus()
    if missing := gpus.missing():
        raise DeviceError(missing)
    lines = []
    for index in range(gpus.count()):
        if problem := gpus.problem(index):
            raise DeviceError(f"cuda:{index}: {problem}")
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        lines.append(f"cuda:{index} {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {capability}")
    return lines
