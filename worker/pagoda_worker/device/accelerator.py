"""What a worker needs from an accelerator besides computing: asynchronous copies, memory, recorded steps.

Everything that decides (when to wait, what fits, which size to replay) is written against this protocol and tested
without a device; only `cuda.py` touches torch.cuda. A CPU has no accelerator: its work is done when a call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch


class Memory(NamedTuple):
    """Bytes of a device at present."""

    free: int
    total: int


class Fetch(Protocol):
    """Tensors on their way to the host, copied after all device work queued before them."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> Sequence[torch.Tensor]:
        """Their copies on the host. Raises torch.AcceleratorError if the device is lost."""


class Accelerator(Protocol):
    """One device, used by one thread."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """A copy of `host` on the device, made in order with the device's work; the host does not wait for it."""

    def pinned(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory for copies to and from the device that need no help of the host: they are made in
        order with the device's work, and the host does not wait for them.

        Raises:
            RuntimeError: there is not that much memory.
        """

    def fetch(self, *tensors: torch.Tensor) -> Fetch:
        """Copy tensors to the host while the device continues with later work."""

    def synchronize(self) -> None:
        """Wait for all work queued on the device so far."""

    def memory(self) -> Memory: ...

    def empty_cache(self) -> None:
        """Release memory that no tensor uses."""

    def peak_of(self, run: Callable[[], object]) -> int:
        """Call `run`, wait for the device, and return the bytes by which the allocator's memory grew at its peak."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the device operations of `run`; calling the result repeats them on the same addresses.

        `run` is also called before recording, to get one-time work out of the way. It must use tensors that stay, and
        must not wait for the device; what it reads on the host is not read again at replay. Recordings of one
        accelerator share the memory of their intermediate results, so only one may run at a time.
        """
