"""The Python binding of the kernel library: structs mirrored field by field, calls through ctypes (without the GIL)."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import torch

from pagoda_proto.params import MAX_LOGPROBS
from pagoda_worker.kernels.cpu import build
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.kernels.cpu.operations import STRUCTS, Form, Op
from pagoda_worker.kernels.ops import BackendError
from pagoda_worker.kernels.quantized import Format, QuantizedWeight, around_the_middle, exponents

# Increment this, here and in csrc/pagoda.cpp, when a function or struct of the library changes: a library of another
# build is then refused. For changes of result bits, increment `numerics.NUMERICS_VERSION` instead.
ABI = 19
LEVELS = tuple(level.name for level in build.LEVELS)
PANEL = 32  # columns of a packed panel
MIDDLE_ZERO, ZEROS, FLOAT_LEVELS, MINIMA = range(4)  # `QuantForm.levels`
PAIR = 2  # inputs that are multiplied together
QUANTIZED_FROM = (torch.bfloat16, torch.float16, torch.float32)  # by `Rounding.dtype`
HUGE_PAGE_BYTES = 2 * 1024 * 1024

PEAKS = ("bf16", "int8")  # the multiplications that `Library.multiply` probes
READ_BYTES = 512  # `Library.read` reads multiples of it


class Step(ctypes.Structure):
    """See `Step` in csrc/program.h. The caller owns the tensors and must keep them for the duration of the call."""

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
        ("slots", ctypes.c_void_p),
    ]


# See `SampleRow` and `SampleResult` in csrc/sample_call.h. The caller keeps the arrays whose addresses these hold.
SAMPLE_ROW = np.dtype(
    [
        *((name, np.uint64) for name in ("allowed", "masked", "bias_ids", "seen", "times", "bias")),
        *((name, np.int32) for name in ("num_allowed", "num_masked", "num_bias", "num_seen")),
        *((name, np.float32) for name in ("repetition", "frequency", "presence")),
        *((name, np.uint32) for name in ("choice", "position")),
        *((name, np.int32) for name in ("top_k", "num_top", "given")),
        ("seed", np.uint64),
        *((name, np.float64) for name in ("temperature", "top_p", "min_p")),
    ]
)
SAMPLE_RESULT = np.dtype(
    [
        *((name, np.int32) for name in ("token", "status", "rank")),
        ("logprob", np.float32),
        ("top_ids", np.int32, MAX_LOGPROBS),
        ("top_logprobs", np.float32, MAX_LOGPROBS),
    ]
)


class QuantForm(ctypes.Structure):
    """See `QuantForm` in csrc/program.h."""

    _fields_: ClassVar = [
        ("bits", ctypes.c_int32),
        ("input_bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("levels", ctypes.c_int32),
    ]


class Rounding(ctypes.Structure):
    """See `Rounding` in csrc/program.h."""

    _fields_: ClassVar = [
        ("weight", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("levels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
    ]


class QuantSource(ctypes.Structure):
    """See `QuantSource` in csrc/program.h."""

    _fields_: ClassVar = [
        ("form", QuantForm),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("levels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("minima", ctypes.c_void_p),
    ]


def quant_form(weight: QuantizedWeight) -> Form:
    levels = FLOAT_LEVELS if weight.floats else ZEROS if weight.zeros is not None else MIDDLE_ZERO
    return weight.bits, weight.activation_bits, weight.group, levels if weight.minima is None else MINIMA


def _scales(weight: QuantizedWeight) -> torch.Tensor:
    """The scales in the form that `QuantSource` takes."""
    if weight.floats:
        return exponents(weight.scales)
    return weight.scales.to(torch.float16 if weight.bits == 4 else torch.float32)


def make_step(**fields: object) -> Step:
    """A step with these fields. Tensors become pointers, so they must outlive it; None becomes a null pointer."""
    plain = {
        name: value.data_ptr() if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
        if value is not None
    }
    return Step(**plain)


class New(Protocol):
    """Allocates a tensor."""

    def __call__(self, *shape: int, dtype: torch.dtype) -> torch.Tensor: ...


def pages(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed tensor that takes no memory until it is written, on huge pages if the system has them.

    Weights and the KV cache, which every step reads from end to end, cause fewer TLB misses there.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


_libraries: weakref.WeakSet[Library] = weakref.WeakSet()


def rest() -> None:
    """End all threads of all libraries, as required before a fork. The next call starts new ones."""
    for one in _libraries:
        one.close()


class Library:
    """The loaded library at one instruction set level, with its pool of threads.

    Args:
        cpus: The CPUs to compute on, one thread each (-1: any); the calling thread uses the first while it runs.
        level: A name of LEVELS, or "" for the highest this machine can run.

    Attributes:
        close: Ends the threads; the next call starts new ones. Also runs when the library is garbage-collected.

    Raises:
        BackendError: the library is missing, is of another build, or cannot run the level here.
    """

    def __init__(self, cpus: Sequence[int], level: str = "", path: Path = LIBRARY) -> None:
        self._library = _open(path)
        self.level = chosen_level(level, _supported(self._library))
        self._level = LEVELS.index(self.level)
        self.num_threads, self._cpus = len(cpus), (ctypes.c_int * len(cpus))(*cpus)
        self._begin()
        _libraries.add(self)

    def _begin(self) -> None:
        self._threads: int = self._library.pagoda_pool_new(self._cpus, self.num_threads)
        self.close = weakref.finalize(self, self._library.pagoda_pool_free, self._threads)

    @property
    def _pool(self) -> int:
        if not self.close.alive:
            self._begin()
        return self._threads

    @property
    def meetings(self) -> int:
        """The number of completed barriers, if there are several threads."""
        count: int = self._library.pagoda_pool_meetings(self._pool)
        return count

    def run(self, ops: ctypes.Array[Op], step: Step) -> None:
        """Run a program of operations in order. One call at a time."""
        self._library.pagoda_run(self._pool, self._level, ops, len(ops), ctypes.byref(step))

    def sample(self, logits: int, num_rows: int, vocab_size: int, rows: int, results: int) -> None:
        """The addresses of logits [R, V] float32, contiguous, overwritten; of R `SAMPLE_ROW` and R `SAMPLE_RESULT`."""
        self._library.pagoda_sample(self._pool, self._level, logits, num_rows, vocab_size, rows, results)

    def pack(self, weight: torch.Tensor, new: New = pages) -> torch.Tensor:
        """weight: [n, k] bf16 -> [ceil(n / 32), k / 2, 32] int32 pairs; `new` allocates them.

        Raises:
            BackendError: k is odd.
        """
        n, k = weight.shape
        if k % PAIR:
            raise BackendError(f"kernels: native needs an even number of inputs, got {k}")
        packed = new(-(-n // PANEL), k // 2, PANEL, dtype=torch.int32)
        self._library.pagoda_pack(self._pool, self._level, weight.data_ptr(), n, k, packed.data_ptr())
        return packed

    def quantize(self, weight: torch.Tensor, form: Format) -> QuantizedWeight:
        """`quantized.quantize` of a weight [N, K] of one of QUANTIZED_FROM, in groups of a multiple of 16 inputs."""
        n, k = weight.shape
        weight, group = weight.contiguous(), form.group or k
        levels, scales = torch.empty(n, k, dtype=torch.uint8), torch.empty(n, k // group)
        call = Rounding(
            weight=weight.data_ptr(),
            dtype=QUANTIZED_FROM.index(weight.dtype),
            n=n,
            k=k,
            group=group,
            bits=form.bits,
            levels=levels.data_ptr(),
            scales=scales.data_ptr(),
        )
        self._library.pagoda_quantize(self._pool, self._level, ctypes.byref(call))
        return around_the_middle(levels, scales, form)

    def pack_quantized(self, weight: QuantizedWeight, new: New = pages) -> torch.Tensor:
        """-> [ceil(n / 32), bytes of a panel] uint8, in the layout described in csrc/quant.h; `new` allocates them."""
        n, k = weight.levels.shape
        levels, form = weight.levels.contiguous(), QuantForm(*quant_form(weight))
        scales = _scales(weight).contiguous()
        zeros = None if weight.zeros is None else weight.zeros.contiguous()
        minima = None if weight.minima is None else weight.minima.half().contiguous()
        source = QuantSource(
            form=form,
            n=n,
            k=k,
            levels=levels.data_ptr(),
            scales=scales.data_ptr(),
            zeros=None if zeros is None else zeros.data_ptr(),
            minima=None if minima is None else minima.data_ptr(),
        )
        panel_bytes = self._library.pagoda_quant_panel_bytes(ctypes.byref(form), k)
        packed = new(-(-n // PANEL), panel_bytes, dtype=torch.uint8)
        self._library.pagoda_pack_quantized(self._pool, self._level, ctypes.byref(source), packed.data_ptr())
        return packed

    def multiply(self, kind: str, rounds: int) -> float:
        """Multiply and add `rounds` times on every thread, in registers only.

        Args:
            kind: One of PEAKS.

        Returns:
            The operations of all threads together, counting a multiplication and an addition as two.
        """
        done: float = self._library.pagoda_peak(self._pool, self._level, PEAKS.index(kind), rounds)
        return done * self.num_threads

    def read(self, buffer: torch.Tensor) -> int:
        """Read a contiguous buffer once, with all threads. Its size must be a multiple of READ_BYTES.

        Returns:
            The exclusive or of its 64-bit words.
        """
        seen: int = self._library.pagoda_read(self._pool, self._level, buffer.data_ptr(), buffer.nbytes)
        return seen

    def copy_blocks(self, tensors: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, pairs (source, destination), in each tensor [blocks, ...]; all reads come before all writes."""
        addresses = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
        sizes = (ctypes.c_int64 * len(tensors))(*[tensor[0].nbytes for tensor in tensors])
        flat = (ctypes.c_int64 * (2 * len(pairs)))(*[block for pair in pairs for block in pair])
        self._library.pagoda_copy_blocks(self._pool, addresses, sizes, len(tensors), flat, len(pairs))


def chosen_level(wanted: str, supported: Sequence[bool]) -> str:
    """The level `wanted`, or if it is "" the highest of LEVELS that this machine and library support.

    Raises:
        BackendError: they do not support `wanted`.
    """
    runnable = [name for name, has in zip(LEVELS, supported, strict=True) if has]
    if wanted and wanted not in runnable:
        raise BackendError(f"kernels: this machine supports {', '.join(runnable)}, not {wanted!r}")
    return wanted or runnable[-1]


def runnable_levels(path: Path = LIBRARY) -> list[str]:
    """The names of LEVELS that this machine can run, the best last. Raises BackendError as `Library` does."""
    return [name for name, has in zip(LEVELS, _supported(_open(path)), strict=True) if has]


def _supported(library: ctypes.CDLL) -> list[bool]:
    return [bool(library.pagoda_supports(index)) for index in range(len(LEVELS))]


def _open(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise BackendError(f"kernels: {path.name} was not built: there was no C++ compiler when Pagoda was installed")
    library = ctypes.CDLL(str(path))
    _check(library, path)  # before using anything that another build may lack
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.pagoda_pool_new.restype = pointer
    library.pagoda_pool_free.argtypes = [pointer]
    library.pagoda_pool_meetings.argtypes = [pointer]
    library.pagoda_pool_meetings.restype = ctypes.c_uint
    library.pagoda_run.argtypes = [pointer, number, pointer, number, pointer]
    library.pagoda_pack.argtypes = [pointer, number, pointer, number, number, pointer]
    library.pagoda_quant_panel_bytes.argtypes = [pointer, number]
    library.pagoda_quant_panel_bytes.restype = ctypes.c_size_t
    library.pagoda_pack_quantized.argtypes = [pointer, number, pointer, pointer]
    library.pagoda_quantize.argtypes = [pointer, number, pointer]
    library.pagoda_sample.argtypes = [pointer, number, pointer, number, number, pointer, pointer]
    library.pagoda_peak.argtypes = [pointer, number, number, ctypes.c_long]
    library.pagoda_peak.restype = ctypes.c_double
    library.pagoda_read.argtypes = [pointer, number, pointer, ctypes.c_size_t]
    library.pagoda_read.restype = ctypes.c_uint64
    library.pagoda_copy_blocks.argtypes = [pointer, pointer, pointer, number, pointer, number]
    return library


def _check(library: ctypes.CDLL, path: Path) -> None:
    structs: list[type[ctypes.Structure]] = [*STRUCTS.values(), Op, Step, Rounding, QuantSource]
    expected = ABI, *(ctypes.sizeof(one) for one in structs), SAMPLE_ROW.itemsize, SAMPLE_RESULT.itemsize
    sizes = (ctypes.c_int * (len(expected) - 1))()
    library.pagoda_sizes(sizes)
    found = library.pagoda_abi(), *sizes
    if found != expected:
        raise BackendError(
            f"kernels: {path} is from another build: (abi, sizes) {found}, expected {expected}; reinstall Pagoda"
        )
