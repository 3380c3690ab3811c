"""What a worker asks of an accelerator besides computing: copies that nobody waits for, memory, recorded steps.

Everything that decides (when to wait, what fits, which size to replay) is written against this protocol and tested
without a device; `cuda.py` is the one that touches torch.cuda. A CPU has none: its work is done when a call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch


class Memory(NamedTuple):
    """Bytes of a device, as it stands."""

    free: int
    total: int


class Fetch(Protocol):
    """Tensors on their way to the host, behind everything that was asked of the device before them."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> Sequence[torch.Tensor]:
        """Their copies on the host. Raises torch.AcceleratorError when the device is lost."""


class Accelerator(Protocol):
    """One device, used by one thread."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """A copy of `host` on the device, made in order with the device's work; the host does not wait for it."""

    def pinned(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory, with anything in it, that copies to and from the device reach without the host's help: they are
        made in order with the device's work, and the host does not wait for them.

        Raises:
            RuntimeError: there is not so much.
        """

    def fetch(self, *tensors: torch.Tensor) -> Fetch:
        """Copy tensors to the host while the device goes on with later work."""

    def synchronize(self) -> None:
        """Wait for everything asked of the device so far."""

    def memory(self) -> Memory: ...

    def empty_cache(self) -> None:
        """Give back memory that no tensor uses."""

    def peak_of(self, run: Callable[[], object]) -> int:
        """Call `run`, wait for the device, and return the bytes that the allocator came to hold for it on top."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` asks of the device; calling the result asks for the same again, on the same addresses.

        It is called before as well, for what only a first call asks for. `run` reads and writes tensors that stay.
        Nothing it reads on the host is read again, and it must not wait for the device. Recordings of one accelerator
        share the memory of their intermediate results: one runs at a time.
        """
