"""Times every operation of the native kernels, for `roofline` to judge.

Operands come from memory, not from a cache: an operation is recorded over enough copies of its operands to exceed the
caches, and all copies run in one call, like a model's step. Writes cost more memory bandwidth than reads, so operations
that write as much as they read stay well above their floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from pagoda_proto.params import SamplingParams
from pagoda_worker.kernels.cpu import library as lib
from pagoda_worker.kernels.cpu.cache import NativeKVCache
from pagoda_worker.kernels.cpu.ceilings import CeilingProbe, median_s
from pagoda_worker.kernels.cpu.library import runnable_levels as runnable_levels
from pagoda_worker.kernels.cpu.load import load_native
from pagoda_worker.kernels.cpu.native import NativeOps
from pagoda_worker.kernels.cpu.operations import Operation, program_of
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import AttentionShape, HeadNorm, Needs, Rotation
from pagoda_worker.kernels.quantized import FORMATS, Format
from pagoda_worker.kernels.roofline import Limits, ModelShape, Point
from pagoda_worker.kernels.segments import segmented
from pagoda_worker.rows.batch import batch_of_spans
from pagoda_worker.rows.rows import Ints, Row

PLAIN = "bf16"
KV_FORMS = {"bf16": False, "int8": True}  # name of the cache's format: whether keys and values are quantised
LINEAR_ROWS = (1, 4, 16, 64, 512)
LOGITS_ROWS = 64  # a step rarely needs more
POINTWISE_ROWS = (16, 512)
DECODES = ((1, 4096), (16, 1024), (64, 2048))  # rows, context
PREFILLS = (512, 2048)
SAMPLED_ROWS = 8
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "top_p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "top_k 50": SamplingParams(temperature=1.0, top_k=50),
}
LOGIT_SPREAD = 3.0  # nats; about the spread of a model's logits
BLOCK_SIZE = 32
FILL_TOKENS = 4096  # tokens written into a cache at a time
OPERATIONS_PER_RUN = 1e11  # fewer copies if a single one computes for long
MOST_COPIES = 512

Record = Callable[[NativeOps, int], object]
"""Performs one operation with the given ops, on copy i of its operands."""
Apply = Callable[[NativeOps, torch.Tensor, torch.Tensor], object]
"""Performs one operation on its input and another tensor of the same size."""


class _Copies:
    """A tape for many copies of one operation, each with its own memory, that all read the same step inputs."""

    all_tables = False

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.step: dict[str, object] = {}

    def buffer(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, width, dtype=dtype)

    def take(self, operation: Operation, **step: object) -> None:
        self.operations.append(operation)
        self.step |= step


class Roofline:
    """Measures the operations of a model of one shape.

    Args:
        threads: 0 is one per core this process may use.
        instruction_set: A name of LEVELS; empty is the best of this machine.

    Raises:
        BackendError: the native kernels cannot run here, or not at this level.
    """

    def __init__(self, shape: ModelShape, limits: Limits, threads: int = 0, instruction_set: str = "") -> None:
        self.shape = shape
        self.limits = limits
        needs = Needs(
            dtype=torch.bfloat16, hidden_size=shape.hidden, head_dims=(shape.head_dim,),
            num_threads=threads, instruction_set=instruction_set,
        )  # fmt: skip
        self.ops = load_native(torch.device("cpu"), needs)
        self._generator = torch.Generator().manual_seed(1)

    def ceiling_probe(self, buffer_bytes: int) -> CeilingProbe:
        return CeilingProbe(self.ops.library, buffer_bytes, self.limits.repeats)

    def points(self, formats: Sequence[str] = (PLAIN, *FORMATS)) -> Iterator[Point]:
        """Every operation in turn, yielded as soon as it is measured. `formats`: of linear layers."""
        for name, quantized in KV_FORMS.items():
            yield from self._attention(name, quantized)
        yield from self._pointwise()
        yield from self._sampling()
        for name in formats:
            yield from self._linears(name)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self._generator).bfloat16()

    def _wanted(self, op: str, num_tokens: int = 0) -> bool:
        only = self.limits.only
        return (not only or any(text in op for text in only)) and num_tokens <= self.limits.max_tokens

    def _num_copies(self, num_bytes: float, operations: float = 0.0) -> int:
        cold = math.ceil(self.limits.cold_bytes / num_bytes)
        quick = math.ceil(OPERATIONS_PER_RUN / operations) if operations else cold
        return max(1, min(cold, quick, MOST_COPIES))

    @torch.inference_mode()
    def _time(self, copies: int, record: Record) -> float:
        """Seconds of one operation, from runs over all copies."""
        tape = _Copies()
        for copy in range(copies):
            record(self.ops.on(tape), copy)
        program, step = program_of([[one] for one in tape.operations]), lib.make_step(**tape.step)
        return median_s(lambda: self.ops.library.run(program, step), self.limits.repeats) / copies

    # --- linear layers ------------------------------------------------------------------------------------------------

    def _linears(self, name: str) -> Iterator[Point]:
        op, form = f"linear {name}", None if name == PLAIN else FORMATS[name]
        if not self._wanted(op):
            return
        for matrix, (n, k) in self.shape.matrices.items():
            wanted = [rows for rows in self.limits.rows or LINEAR_ROWS if matrix != "logits" or rows <= LOGITS_ROWS]
            wanted = [rows for rows in wanted if self._wanted(op, rows)]
            if not wanted:
                continue
            weight = self._random(n, k)
            stored, segments = segmented(
                weight if form is None else self.ops.quantize(weight, form), self.shape.segments[matrix]
            )
            packed = [
                self.ops.pack_linear(stored, None, segments) for _ in range(self._num_copies(weight_bytes(n, k, form)))
            ]
            for rows in wanted:
                yield self._linear(op, matrix, rows, packed, form)

    def _linear(self, op: str, matrix: str, rows: int, packed: Sequence[object], form: Format | None) -> Point:
        n, k = self.shape.matrices[matrix]
        x = self._random(rows, k)
        method, out_bytes = ("logits", 4) if matrix == "logits" else ("linear", 2)
        num_bytes = weight_bytes(n, k, form) + rows * k * 2 + rows * n * out_bytes
        operations = 2.0 * rows * n * k
        copies = min(len(packed), self._num_copies(num_bytes, operations))
        seconds = self._time(copies, lambda ops, copy: getattr(ops, method)(x, packed[copy]))
        unit = "int8" if form is not None and form.activation_bits == 8 else PLAIN
        return Point(
            op=op, shape=f"{matrix} {rows} x {k} -> {n}", seconds=seconds, num_bytes=num_bytes,
            operations=operations, unit=unit,
        )  # fmt: skip

    # --- one row at a time --------------------------------------------------------------------------------------------

    def _pointwise(self) -> Iterator[Point]:
        hidden = self.shape.hidden
        norm = torch.ones(hidden)
        # operation: width of its input, values it reads and writes per row, what to do
        rowwise: dict[str, tuple[int, int, Apply]] = {
            "rms norm": (hidden, 2 * hidden, lambda ops, x, _: ops.rms_norm(x, norm, 1e-6)),
            "add, rms norm": (hidden, 4 * hidden, lambda ops, x, other: ops.add_rms_norm(x, other, norm, 1e-6)),
        }
        for rows in POINTWISE_ROWS:
            for op, (width, values, apply) in rowwise.items():
                if self._wanted(op, rows):
                    yield self._rowwise(op, (rows, width), 2 * rows * values, apply)
            if self._wanted("embed", rows):
                yield self._embed(rows)

    def _rowwise(self, op: str, size: tuple[int, int], num_bytes: int, apply: Apply) -> Point:
        copies = self._num_copies(num_bytes)
        x, other = self._random(copies, *size), self._random(copies, *size)
        seconds = self._time(copies, lambda ops, copy: apply(ops, x[copy], other[copy]))
        shape = f"{size[0]} x {size[1]}"
        return Point(op=op, shape=shape, seconds=seconds, num_bytes=num_bytes)

    def _embed(self, rows: int) -> Point:
        hidden, vocab = self.shape.hidden, self.shape.vocab
        num_bytes = rows * hidden * 4
        copies = max(1, min(vocab // rows, self._num_copies(num_bytes)))
        # All copies read the same token ids, so each gets its own part of the table.
        parts = torch.split(self._random(vocab, hidden), vocab // copies)
        ids = torch.randperm(vocab // copies, generator=self._generator)[:rows]
        seconds = self._time(copies, lambda ops, copy: ops.embed(ids, parts[copy], None))
        shape = f"{rows} x {hidden}"
        return Point(op="embed", shape=shape, seconds=seconds, num_bytes=num_bytes)

    # --- attention and its cache --------------------------------------------------------------------------------------

    def _attention(self, name: str, quantized: bool) -> Iterator[Point]:
        rotate, decode, prefill = (f"{what}, {name} cache" for what in ("rotate", "decode", "prefill"))
        for tokens in POINTWISE_ROWS:
            if self._wanted(rotate, tokens):
                yield self._rope_write(rotate, quantized, tokens)
        for rows, context in DECODES:
            if self._wanted(decode, rows * context):
                yield self._attend(decode, f"{rows} rows x {context}", quantized, (rows, 1, context))
        for tokens in PREFILLS:
            if self._wanted(prefill, tokens):
                yield self._attend(prefill, f"{tokens} tokens", quantized, (1, tokens, tokens))

    def _kv_shape(self, quantized: bool, num_layers: int) -> KVShape:
        sizes = self.shape
        return KVShape(
            num_layers=num_layers, num_kv_heads=sizes.kv_heads, head_dim=sizes.head_dim,
            dtype=torch.bfloat16, quantized=quantized,
        )  # fmt: skip

    def _rope_write(self, op: str, quantized: bool, tokens: int) -> Point:
        sizes = self.shape
        kv_bytes = self._kv_shape(quantized, 1).bytes_per_token
        heads = sizes.heads + 2 * sizes.kv_heads
        num_bytes = tokens * (2 * heads * sizes.head_dim + 2 * sizes.heads * sizes.head_dim + kv_bytes)
        copies = self._num_copies(num_bytes)
        kv = self.ops.new_kv_cache(self._kv_shape(quantized, copies), -(-tokens // BLOCK_SIZE), BLOCK_SIZE)
        angles = torch.linspace(0, 6, tokens)[:, None] * torch.linspace(1, 0.1, sizes.head_dim // 2)
        positions = torch.arange(tokens)
        rotation = Rotation(angles.cos(), angles.sin(), positions)
        weight = torch.ones(sizes.heads + sizes.kv_heads, sizes.head_dim)
        norm = HeadNorm(weight=weight, eps=1e-6) if sizes.head_norm else None
        qkv = self._random(copies, tokens, heads * sizes.head_dim)
        seconds = self._time(copies, lambda ops, copy: ops.rope_write(qkv[copy], rotation, norm, kv, copy, positions))
        return Point(op=op, shape=f"{tokens} tokens", seconds=seconds, num_bytes=num_bytes)

    def _attend(self, op: str, shape: str, quantized: bool, work: tuple[int, int, int]) -> Point:
        """`work`: rows, new tokens per row, tokens of context per row."""
        rows, query, context = work
        sizes = self.shape
        row_bytes = context * self._kv_shape(quantized, 1).bytes_per_token
        num_bytes = rows * (row_bytes + 4 * query * sizes.heads * sizes.head_dim)
        seen = rows * (query * context - query * (query - 1) // 2)
        operations = 4.0 * seen * sizes.heads * sizes.head_dim
        copies = self._num_copies(num_bytes, operations)
        blocks = -(-context // BLOCK_SIZE)
        kv = self._full_cache(self._kv_shape(quantized, copies), rows * blocks)
        order = torch.randperm(rows * blocks, generator=self._generator, dtype=torch.int32)
        plan = self.ops.plan(batch_of_spans([(context - query, context)] * rows, order.view(rows, blocks)), kv)
        attention = AttentionShape(
            num_heads=sizes.heads, num_kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, scale=sizes.head_dim**-0.5
        )
        q = self._random(rows * query, sizes.heads, sizes.head_dim)
        seconds = self._time(copies, lambda ops, copy: ops.attend(q, kv, copy, plan, attention))
        return Point(op=op, shape=shape, seconds=seconds, num_bytes=num_bytes, operations=operations)

    def _full_cache(self, shape: KVShape, num_blocks: int) -> NativeKVCache:
        """A cache in which every cell has been written: unwritten memory is one shared page of zeros."""
        kv = self.ops.new_kv_cache(shape, num_blocks, BLOCK_SIZE)
        size = (min(FILL_TOKENS, num_blocks * BLOCK_SIZE), shape.num_kv_heads, shape.head_dim)
        key, value = self._random(*size), self._random(*size)
        for layer in range(shape.num_layers):
            for part in torch.split(torch.arange(num_blocks * BLOCK_SIZE), size[0]):
                self.ops.write_kv(key[: len(part)], value[: len(part)], kv, layer, part)
        return kv

    # --- sampling -----------------------------------------------------------------------------------------------------

    def _sampling(self) -> Iterator[Point]:
        """From logits that the step has just written; sampling benefits from those that a cache still holds."""
        logits = torch.randn(SAMPLED_ROWS, self.shape.vocab, generator=self._generator) * LOGIT_SPREAD
        for name, params in SAMPLINGS.items():
            op = f"sample, {name}"
            if self._wanted(op, SAMPLED_ROWS):
                yield self._sample(op, logits, params)

    def _sample(self, op: str, logits: torch.Tensor, params: SamplingParams) -> Point:
        rows = [_row(number, params) for number in range(SAMPLED_ROWS)]
        seconds = median_s(lambda: self.ops.sample(logits, rows), self.limits.repeats)
        shape = f"{SAMPLED_ROWS} x {self.shape.vocab}"
        return Point(op=op, shape=shape, seconds=seconds, num_bytes=logits.nbytes)


def weight_bytes(n: int, k: int, form: Format | None) -> float:
    """Bytes of a matrix [n, k] in memory, including its scales."""
    if form is None:
        return 2.0 * n * k
    groups = k // form.group if form.group else 1
    return n * k * form.bits / 8 + (2.0 if form.bits == 4 else 4.0) * n * groups


def _row(number: int, params: SamplingParams) -> Row:
    return Row(
        row_id=number, tokens=Ints(np.arange(8)), blocks=Ints(np.arange(1)), num_prompt_tokens=8, num_computed=8,
        params=params, seed=number, choice=0, processing=None,
    )  # fmt: skip
