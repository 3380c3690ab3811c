#!/usr/bin/env python3
"""Every CPU kernel against this machine's two ceilings: what memory can be read at, and what the cores can multiply.

    python bench/kernels.py [--threads N]

Both ceilings come from the same library in the same run: bandwidth from a linear layer of one row over 300 MB of
weights (it does nothing but read), peak from one of 2048 rows. Shapes are those of Qwen3-0.6B. Minima over repetitions.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch

from pagoda_worker.kernels.cpu import library as lib

HIDDEN, MIDDLE, HEADS, KV_HEADS, DIM, BLOCK = 1024, 3072, 16, 8, 128, 32
COPIES = 24  # of a weight, so that it comes from memory and not from a cache


def best(run: Callable[[], None], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def linear(library: lib.Library, rows: int, n: int, k: int) -> tuple[float, float]:
    """(bytes of weights per second, floating-point operations per second)."""
    weights = [library.pack(torch.randn(n, k, dtype=torch.bfloat16)) for _ in range(COPIES)]
    x, y = torch.randn(rows, k, dtype=torch.bfloat16), torch.empty(rows, n, dtype=torch.bfloat16)
    ops = (lib.Op * COPIES)(*[lib.make_op(lib.LINEAR, [x, weight, y], [n, k]) for weight in weights])
    seconds = best(lambda: library.run(ops, lib.make_step(num_tokens=rows)), 20 if rows < 256 else 3)
    return n * k * 2 * COPIES / seconds, 2.0 * rows * n * k * COPIES / seconds


def attention(library: lib.Library, rows: int, query: int, context: int) -> tuple[float, float]:
    """(bytes of K and V per second, operations per second) for rows with `query` new tokens each."""
    blocks = -(-context // BLOCK)
    cells = [lib.pages(rows * blocks, KV_HEADS * BLOCK * DIM, dtype=torch.bfloat16).normal_() for _ in range(2)]
    tables = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
    starts = torch.arange(rows + 1, dtype=torch.int32) * query
    contexts = torch.full((rows,), context, dtype=torch.int32)
    q = torch.randn(rows * query, HEADS * DIM).bfloat16()
    out = torch.empty_like(q)
    op = lib.make_op(lib.ATTENTION, [q, *cells, out], [HEADS, KV_HEADS, DIM, BLOCK, 0], [DIM**-0.5, 0.0])
    step = lib.make_step(
        num_tokens=rows * query, num_rows=rows, max_blocks=blocks,
        block_tables=tables, query_starts=starts, context_lens=contexts,
    )  # fmt: skip
    seconds = best(lambda: library.run((lib.Op * 1)(op), step), 20 if query == 1 else 3)
    seen = query * context - query * (query - 1) // 2
    return rows * context * KV_HEADS * DIM * 4 / seconds, 4.0 * rows * seen * HEADS * DIM / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    cpus = sorted(os.sched_getaffinity(0))[: parser.parse_args().threads]
    library = lib.Library(cpus)
    bandwidth, _ = linear(library, 1, 2 * MIDDLE, HIDDEN)
    _, peak = linear(library, 2048, 2 * MIDDLE, HIDDEN)
    print(f"{library.level}, {len(cpus)} threads: read {bandwidth / 1e9:.1f} GB/s, bf16 {peak / 1e9:.0f} GFLOP/s\n")
    print(f"{'kernel':34} {'GB/s':>7} {'of read':>8} {'GFLOP/s':>9} {'of peak':>8}")
    cases: list[tuple[str, tuple[float, float]]] = []
    for rows in (1, 4, 8, 16, 32, 64, 512):
        cases.append((f"linear {rows} x {HIDDEN} -> {2 * MIDDLE}", linear(library, rows, 2 * MIDDLE, HIDDEN)))
    for rows, context in ((1, 4096), (16, 1024), (64, 2048)):
        cases.append((f"decode attention {rows} x {context}", attention(library, rows, 1, context)))
    cases.append(("prefill attention 2048", attention(library, 1, 2048, 2048)))
    for name, (moved, computed) in cases:
        print(
            f"{name:34} {moved / 1e9:7.1f} {moved / bandwidth:8.0%} {computed / 1e9:9.0f} {computed / peak:8.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
