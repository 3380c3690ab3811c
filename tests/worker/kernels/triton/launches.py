"""Run by test_compiles in a process without the interpreter: compiles every launch of the back end for a named GPU.

No device is needed: Triton is told that one exists, and every launch stops once its machine code is made. Prints a line
per launch: kernel, bytes of shared memory. Arguments: the device's capability, the shared memory of a program.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.worker.models.harness import make_batch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import ACTIVATIONS, CLAMPED, Added, AttentionShape, Expert, HeadNorm, Rotation
from pagoda_worker.kernels.routing import Beside, Routing
from pagoda_worker.kernels.triton import report, sampling
from pagoda_worker.kernels.triton.load import HEIGHTS
from pagoda_worker.kernels.triton.ops import TritonOps
from pagoda_worker.kernels.triton.plan import Tiles
from pagoda_worker.kernels.triton.pointwise import act_mul
from pagoda_worker.kernels.triton.sampling_lines import SamplingLines
from pagoda_worker.rows.slots import TokenSlots

CPU = torch.device("cpu")
VOCAB, ROWS = 152_000, 4
GATES = (*ACTIVATIONS, CLAMPED)


class Driver:
    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(run: Any) -> Any:
    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        print(self.__name__, kernel.metadata.shared, len(kernel.asm["cubin"]) > 0)

    return launch


def attention(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, block_size: int, **variant: Any) -> None:
    for low, high in {HEIGHTS[0], HEIGHTS[-1] if dim > 128 else HEIGHTS[0]}:
        tiles = Tiles(low=low, high=high, fill=0, shared_bytes=int(sys.argv[2]))
        attention_in(tiles, (heads, kv_heads, dim), dtype, block_size, **variant)


def attention_in(
    tiles: Tiles, heads_and_dim: tuple[int, int, int], dtype: torch.dtype, block_size: int, **variant: Any
) -> None:
    heads, kv_heads, dim = heads_and_dim
    shape = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=1.0, **variant)
    kv_shape = KVShape(num_layers=1, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype)
    count = -(-600 // block_size)
    rows = [([0], 599, list(range(count))), ([0] * 600, 0, list(range(count)))]
    for fill in (0, 10**6):
        ops = TritonOps(CPU, replace(tiles, fill=fill))
        kv, batch = ops.new_kv_cache(kv_shape, count, block_size), make_batch(rows, block_size)
        query = torch.zeros(batch.num_tokens, heads, dim, dtype=dtype)
        ops.attend(query, kv, 0, ops.plan(batch, kv), shape, torch.zeros(heads) if variant else None)


def pointwise(dtype: torch.dtype) -> None:
    ops, ids = TritonOps(CPU, Tiles(fill=0)), torch.zeros(3, dtype=torch.int64)
    x, weight = torch.zeros(3, 4096, dtype=dtype), torch.ones(4096)
    ops.rms_norm(x, weight, 1e-5)
    ops.add_rms_norm(x, x, weight, 1e-5)
    for activation in GATES:
        act_mul(x, activation)
    for scale in (None, 2.0):
        ops.embed(ids, x, scale)
    kv = ops.new_kv_cache(KVShape(num_layers=1, num_kv_heads=8, head_dim=80, dtype=dtype), 4, 16)
    table = torch.zeros(64, 40)
    for norm in (None, HeadNorm(weight=torch.ones(40, 80), eps=1e-5)):
        ops.rope_write(torch.zeros(3, 48 * 80, dtype=dtype), Rotation(table, table, ids), norm, kv, 0, ids)
    once = ops.new_kv_cache(KVShape(num_layers=1, num_kv_heads=1, head_dim=576, dtype=dtype, planes=1), 4, 16)
    lines, table = [torch.zeros(3, width, dtype=dtype) for width in (16 * 576, 512, 64)], torch.zeros(64, 288)
    ops.latent_write(*lines, Rotation(table, table, ids), once, 0, ids)


def adapters(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    ops, x = TritonOps(CPU, Tiles(fill=0)), torch.zeros(40, inputs, dtype=dtype)
    packed = ops.pack_linear(torch.zeros(outputs, inputs, dtype=dtype))
    slots = ops.new_slots(packed, 4, 48)
    ops.linear(x, packed, Added(slots, TokenSlots(np.zeros(len(x), np.int32), CPU)))


def experts(hidden: int, width: int, dtype: torch.dtype, biased: bool = False, activation: str = "silu") -> None:
    """Low and high tiles, with the shared memory that a program may use and, as the last resort, without pipelining."""
    routing = Routing(experts=4, chosen=2, renormalised=True)
    sizes = [(2 * width, hidden), (hidden, width), *([(2 * width,), (hidden,)] if biased else [])]
    made = [Expert(*(torch.zeros(size, dtype=dtype) for size in sizes)) for _ in range(routing.experts)]
    for tiles in (Tiles(fill=0, shared_bytes=int(sys.argv[2])), Tiles(fill=0, low=64, shared_bytes=0)):
        ops = TritonOps(CPU, tiles)
        packed = ops.pack_experts(iter(made), routing.experts)
        for tokens in (3, 300):
            x = torch.zeros(tokens, hidden, dtype=dtype)
            beside = Beside(x, torch.zeros(tokens, 1)) if biased else None
            ops.moe(x, torch.zeros(tokens, routing.experts), packed, routing, activation, beside)


def sample() -> None:
    table, lines = SamplingLines(8, VOCAB, CPU, lambda host: host), torch.arange(ROWS)
    logits = torch.zeros(ROWS, VOCAB)
    sampling.sample(logits, table, lines)
    report.report(logits, lines, 5)


if __name__ == "__main__":
    driver.set_active(Driver(int(sys.argv[1])))
    JITFunction.run = compile_only(JITFunction.run)  # type: ignore[method-assign]
    attention(32, 8, 128, torch.bfloat16, 64)
    attention(14, 2, 64, torch.float16, 16, window=100)
    attention(16, 8, 256, torch.bfloat16, 32, window=100, softcap=3.0)
    attention(8, 4, 256, torch.bfloat16, 64)
    attention(4, 1, 256, torch.float32, 64)
    attention(32, 32, 80, torch.bfloat16, 16)
    attention(4, 2, 64, torch.float32, 16)
    for dtype in (torch.bfloat16, torch.float32):
        pointwise(dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        adapters(dtype, 4096, 6144)
        adapters(dtype, 570, 1000)
    experts(2048, 768, torch.bfloat16)
    experts(2880, 1440, torch.bfloat16, biased=True, activation=CLAMPED)
    experts(100, 72, torch.float16, biased=True, activation="gelu")
    experts(512, 96, torch.float32)
    sample()
