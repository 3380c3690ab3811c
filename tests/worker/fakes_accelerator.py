"""An accelerator that is this CPU, and as strict as a real one: a fetch is over when the test (or a wait) says so, and
a recording runs the operations that were recorded, on the same addresses, and not the Python that asked for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from pagoda_worker.accelerator import Memory


class HeldFetch:
    """A copy to the host that has not arrived until it is released or waited for."""

    def __init__(self, tensors: Sequence[torch.Tensor], journal: list[str]) -> None:
        self._tensors = [tensor.clone() for tensor in tensors]
        self._journal = journal
        self.released = False

    def release(self) -> None:
        self.released = True

    def done(self) -> bool:
        return self.released

    def wait(self) -> list[torch.Tensor]:
        if not self.released:
            self._journal.append("waited")
        self.released = True
        return self._tensors


aten = torch.ops.aten
READS_BACK = (aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default)


class Recorder(TorchDispatchMode):
    """Runs operations and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS_BACK:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """The same operations into the tensors that the recording made; a view or an operand is there already."""
        for func, args, kwargs, old in self.calls:
            operands = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
            new = func(*args, **kwargs)
            for target, value in zip(_tensors(old), _tensors(new), strict=True):
                if target.numel() and target.untyped_storage().data_ptr() not in operands:
                    target.copy_(value)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor) and not value.is_mkldnn]


@dataclass
class FakeAccelerator:
    """`free` and `total` are what `memory` says; a capture takes `bytes_per_capture` (of its number) of `free`."""

    free: int = 2**30
    total: int = 2**31
    bytes_per_capture: Callable[[int], int] = lambda number: 0
    bytes_per_step: int = 0  # what `peak_of` finds
    journal: list[str] = field(default_factory=list)
    fetches: list[HeldFetch] = field(default_factory=list)
    captures: int = 0
    replays: int = 0

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def fetch(self, *tensors: torch.Tensor) -> HeldFetch:
        self.fetches.append(HeldFetch(tensors, self.journal))
        return self.fetches[-1]

    def synchronize(self) -> None:
        self.journal.append("synchronized")

    def memory(self) -> Memory:
        return Memory(self.free, self.total)

    def empty_cache(self) -> None:
        self.journal.append("emptied")

    def peak_of(self, run: Callable[[], object]) -> int:
        run()
        return self.bytes_per_step

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()  # as on a device: once for what happens at a first call, then recorded
        with Recorder() as recorder:
            run()
        self.free -= self.bytes_per_capture(self.captures)
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            with torch.inference_mode():
                recorder.replay()

        return replay
