"""The kernel library as Python sees it: structs mirrored field by field, calls through ctypes (which drops the GIL)."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from pagoda_worker.kernels.cpu.build import LIBRARY

ABI = 2
LEVELS = ("base", "avx2", "avx512", "avx512bf16")
PANEL = 32  # columns of a packed panel
HUGE_PAGE_BYTES = 2 * 1024 * 1024

EMBED, RMS_NORM, LINEAR, ROPE_KV, ATTENTION, ACT_MUL = range(6)


class Op(ctypes.Structure):
    """See `Op` in csrc/program.h; what the generic fields mean for each kind is in csrc/level.cpp."""

    _fields_: ClassVar = [
        ("kind", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("p", ctypes.c_void_p * 10),
        ("i", ctypes.c_int32 * 10),
        ("f", ctypes.c_float * 4),
    ]


class Step(ctypes.Structure):
    """See `Step` in csrc/program.h. The tensors behind the pointers belong to the caller for the length of the call."""

    _fields_: ClassVar = [
        ("num_tokens", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("kv_indices", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
    ]


def make_op(
    kind: int,
    tensors: Sequence[torch.Tensor | None],
    ints: Sequence[int],
    floats: Sequence[float] = (),
) -> Op:
    """An operation on these tensors. They must be contiguous and outlive it."""
    op = Op(kind=kind)
    for index, tensor in enumerate(tensors):
        op.p[index] = None if tensor is None else tensor.data_ptr()
    op.i[: len(ints)] = list(ints)
    op.f[: len(floats)] = list(floats)
    return op


def make_step(**fields: object) -> Step:
    """A step with these fields; tensors become pointers, so they must outlive it, and None a null pointer."""
    plain = {
        name: value.data_ptr() if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
        if value is not None
    }
    return Step(**plain)


def pages(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that cost nothing until they are written, on huge pages where the system has them.

    What is read once per step from end to end, weights and cached keys and values, misses the TLB less on those.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class LibraryError(RuntimeError):
    """The kernel library is missing or is not the one this version was made for."""


class Library:
    """The loaded library at one instruction set level, with its pool of threads.

    Args:
        cpus: The processors to compute on, one thread each (-1: any); the calling thread has the first while it runs.
        level: A name of LEVELS, or "" for the highest this machine can run.

    Attributes:
        close: Ends the threads; nothing may be run after. It happens by itself when the library is let go of.

    Raises:
        LibraryError: it is missing, of another build, or cannot run the level here.
    """

    def __init__(self, cpus: Sequence[int], level: str = "", path: Path = LIBRARY) -> None:
        if not path.exists():
            raise LibraryError(f"{path.name} was not built: there was no C++ compiler when Pagoda was installed")
        self._library = _open(path)
        runnable = [name for index, name in enumerate(LEVELS) if self._library.pagoda_supports(index)]
        if level and level not in runnable:
            raise LibraryError(f"this machine runs the kernels at {', '.join(runnable)}, not at {level!r}")
        self.level = level or runnable[-1]
        self._level = LEVELS.index(self.level)
        self.num_threads = len(cpus)
        self._pool = self._library.pagoda_pool_new((ctypes.c_int * len(cpus))(*cpus), len(cpus))
        self.close = weakref.finalize(self, self._library.pagoda_pool_free, self._pool)

    def run(self, ops: ctypes.Array[Op], step: Step) -> None:
        """Run a program of operations in order. One call at a time."""
        self._library.pagoda_run(self._pool, self._level, ops, len(ops), ctypes.byref(step))

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: [n, k] bf16, k even -> [ceil(n / 32), k / 2, 32] int32 pairs."""
        n, k = weight.shape
        packed = pages(-(-n // PANEL), k // 2, PANEL, dtype=torch.int32)
        self._library.pagoda_pack(self._pool, self._level, weight.data_ptr(), n, k, packed.data_ptr())
        return packed

    def copy_blocks(self, tensors: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """In each tensor [blocks, ...], pairs (source, destination); every source is read before any is written."""
        addresses = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
        sizes = (ctypes.c_int64 * len(tensors))(*[tensor[0].nbytes for tensor in tensors])
        flat = (ctypes.c_int64 * (2 * len(pairs)))(*[block for pair in pairs for block in pair])
        self._library.pagoda_copy_blocks(self._pool, addresses, sizes, len(tensors), flat, len(pairs))


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.pagoda_pool_new.restype = pointer
    library.pagoda_pool_free.argtypes = [pointer]
    library.pagoda_run.argtypes = [pointer, number, pointer, number, pointer]
    library.pagoda_pack.argtypes = [pointer, number, pointer, number, number, pointer]
    op_bytes, step_bytes = number(), number()
    library.pagoda_sizes(ctypes.byref(op_bytes), ctypes.byref(step_bytes))
    found = library.pagoda_abi(), op_bytes.value, step_bytes.value
    expected = ABI, ctypes.sizeof(Op), ctypes.sizeof(Step)
    if found != expected:
        raise LibraryError(f"{path} is of another build: (abi, op, step) {found}, expected {expected}; install again")
    library.pagoda_copy_blocks.argtypes = [pointer, pointer, pointer, number, pointer, number]
    return library
