"""A fake accelerator on this CPU, as strict as a real one: a fetch completes only when the test (or a wait) says so,
and a replay runs the recorded operations on the same addresses, not the Python code that issued them. A recording keeps
no tensor alive that existed before it, and the contents of its own tensors are lost after each replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from pagoda_worker.device.accelerator import Memory

try:
    from triton.runtime.interpreter import GridExecutor
except ImportError:  # not available on this machine
    GridExecutor = None


class HeldFetch:
    """A copy to the host that arrives only when it is released or waited for."""

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
READS_BACK = (
    aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, aten.nonzero.default,
    aten.masked_select.default,
)  # fmt: skip
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
LEFT = 0xFF  # fills every byte of a recording's own memory: floats become NaN, ids invalid


class Lent:
    """The address of a tensor that existed before the recording; does not keep it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise RuntimeError("an illegal memory access was encountered: a recording's operand was given back")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._place)


class Recorder(TorchDispatchMode):
    """Runs operations, including launches of interpreted kernels, and records them."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any]] = []
        self._made: dict[int, torch.Tensor] = {}  # by address: memory that belongs to the recording
        self._launching = False

    def __enter__(self) -> Any:
        if GridExecutor is not None:
            self._launch = GridExecutor.__call__
            GridExecutor.__call__ = self._launched(GridExecutor.__call__)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if GridExecutor is not None:
            GridExecutor.__call__ = self._launch

    def _launched(self, launch: Any) -> Any:
        def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._launching = True  # the interpreter's use of torch is no operation of the device
            launch(executor, *args, **kwargs)
            self._launching = False
            self._remember(partial(launch, executor), args, kwargs, None)

        return launched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._launching:
            return func(*args, **kwargs)
        masks = func in INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1])
        if func in READS_BACK or masks:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        operands = {_address(x) for x in _tensors((args, kwargs))}
        for made in _tensors(out):
            if made.numel() and _address(made) not in operands:
                self._made[_address(made)] = made
        self._remember(func, args, kwargs, out)
        return out

    def _remember(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._calls.append((func, *tree_map(self._held, ((args, kwargs), out))))

    def _held(self, value: Any) -> Any:
        lent = isinstance(value, torch.Tensor) and not value.is_mkldnn and _address(value) not in self._made
        return Lent(value) if lent and value.numel() else value

    def replay(self) -> None:
        """Run the operations again, copying results into the recording's tensors; views and operands are in place."""
        for func, held, out in self._calls:
            args, kwargs = tree_map(_found, held)
            operands = {_address(x) for x in _tensors((args, kwargs))}
            new = func(*args, **kwargs)
            for target, value in zip(_tensors(tree_map(_found, out)), _tensors(new), strict=True):
                if target.numel() and _address(target) not in operands:
                    target.copy_(value)
        for made in self._made.values():  # other recordings use this memory too
            made.untyped_storage().fill_(LEFT)


def _found(held: Any) -> Any:
    return held.tensor() if isinstance(held, Lent) else held


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor) and not value.is_mkldnn]


@dataclass
class FakeAccelerator:
    """`free` and `total` are what `memory` reports; a capture takes `bytes_per_capture` (of its number) of `free`."""

    free: int = 2**30
    total: int = 2**31
    bytes_per_capture: Callable[[int], int] = lambda number: 0
    bytes_per_step: int = 0  # what `peak_of` reports
    journal: list[str] = field(default_factory=list)
    fetches: list[HeldFetch] = field(default_factory=list)
    uploads: list[int] = field(default_factory=list)  # bytes
    captures: int = 0
    replays: int = 0

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        self.uploads.append(host.nbytes)
        return host.clone()

    def pinned(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.journal.append("pinned")
        return torch.empty(tuple(size), dtype=dtype)

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
        run()  # as on a device: run once for first-call work, then record
        with Recorder() as recorder:
            run()
        self.free -= self.bytes_per_capture(self.captures)
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            with torch.inference_mode():
                recorder.replay()

        return replay
