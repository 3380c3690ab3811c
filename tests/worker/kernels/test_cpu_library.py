"""The C++ kernels at every instruction set level of this machine, against plain float64, and bit for bit against
themselves under everything that must not matter: batch composition, chunking, threads, garbage in unused cache."""

from __future__ import annotations

import ctypes
import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.worker.kernels.levels import levels

from pagoda_worker.kernels.cpu import library as lib
from pagoda_worker.kernels.cpu.build import LIBRARY, CompileError, build
from pagoda_worker.kernels.cpu.native import NativeOps
from pagoda_worker.kernels.cpu.operations import (
    Attention,
    Embed,
    LayerCache,
    Linear,
    Operation,
    RmsNorm,
    RopeKv,
    program_of,
)
from pagoda_worker.kernels.ops import BackendError

BF16_NAN = 0x7FC0
BF16 = (16, 16, 0, 0)  # the form of unquantised weights


def run(library: lib.Library, operation: Operation, **step: object) -> None:
    tensors = {name: value.data_ptr() if isinstance(value, torch.Tensor) else value for name, value in step.items()}
    library.run(program_of([[operation]]), lib.Step(**tensors))


def product(x: torch.Tensor, packed: torch.Tensor, y: torch.Tensor, n: int, **changes: Any) -> Linear:
    """y = x W^T for a packed W of n rows."""
    plain = Linear(
        x=x, panels=packed, y=y, bias=None, n=n, k=x.shape[1], activation=0, out_f32=0, form=BF16, segments=1
    )  # fmt: skip
    return plain._replace(**changes)


def bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


# --- linear -----------------------------------------------------------------------------------------------------------


def linear(library: lib.Library, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    packed, y = library.pack(w), torch.empty(x.shape[0], w.shape[0])
    run(library, product(x, packed, y, w.shape[0], out_f32=1), num_tokens=x.shape[0])
    return y


@pytest.mark.parametrize(("n", "k"), [(32, 2), (100, 64), (576, 576), (1000, 1030)])
@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 97])
def test_linear(library: lib.Library, rows: int, n: int, k: int) -> None:
    x, w = bf16(rows, k, seed=1), bf16(n, k, seed=2, scale=k**-0.5)
    y = linear(library, x, w)
    torch.testing.assert_close(y.double(), x.double() @ w.double().T, rtol=1e-4, atol=1e-5)
    for row in (0, rows - 1):
        assert torch.equal(linear(library, x[row : row + 1], w)[0], y[row])


@pytest.mark.parametrize("k", [2, 254, 256, 258, 1030])
def test_bits_of_a_row_are_the_same_in_every_tile(library: lib.Library, k: int) -> None:
    """Each number of rows is divided into tiles differently, and a panel may be passed over several times."""
    x, w = bf16(40, k, seed=1), bf16(70, k, seed=2, scale=k**-0.5)
    alone = torch.cat([linear(library, row[None], w) for row in x])
    for rows in range(2, 41):
        assert torch.equal(linear(library, x[-rows:], w), alone[-rows:]), rows


def test_linear_in_blocks_of_rows(library: lib.Library) -> None:
    """More rows than fit into the cache are computed block by block, with the same bits."""
    x, w = bf16(300, 4096, seed=3), bf16(40, 4096, seed=4, scale=0.02)
    y = linear(library, x, w)
    assert torch.equal(torch.cat([linear(library, part.contiguous(), w) for part in x.split(7)]), y)


def test_linear_with_bias(library: lib.Library) -> None:
    rows, n, k = 9, 70, 64
    x, w, bias = bf16(rows, k, seed=1), bf16(n, k, seed=2, scale=0.1), bf16(96, seed=3)
    packed, y = library.pack(w), torch.empty(rows, n, dtype=torch.bfloat16)
    run(library, product(x, packed, y, n, bias=bias), num_tokens=rows)
    expected = x.float() @ w.float().T + bias[:n].float()
    torch.testing.assert_close(y.float(), expected, rtol=8e-3, atol=1e-3)


def test_linear_with_a_softcap(library: lib.Library) -> None:
    rows, n, k, cap = 9, 70, 64, 5.0
    x, w = bf16(rows, k, seed=1), bf16(n, k, seed=2)
    packed, y = library.pack(w), torch.empty(rows, n)
    run(library, product(x, packed, y, n, out_f32=1, softcap=cap), num_tokens=rows)
    plain = x.double() @ w.double().T
    assert plain.abs().max() > 4 * cap
    torch.testing.assert_close(y.double(), cap * torch.tanh(plain / cap), rtol=1e-4, atol=1e-5)
    alone = torch.empty(1, n)
    run(library, product(x[4:5], packed, alone, n, out_f32=1, softcap=cap), num_tokens=1)
    assert torch.equal(alone[0], y[4])
    x[4] = torch.nan
    run(library, product(x[4:5], packed, alone, n, out_f32=1, softcap=cap), num_tokens=1)
    assert alone.isnan().all()


@pytest.mark.parametrize("activation", [1, 2])
def test_linear_with_gated_activation(library: lib.Library, activation: int) -> None:
    """Gate and up columns are interleaved by groups of 16, so that a panel holds both halves of its outputs."""
    rows, width, k = 5, 48, 64
    x, gate, up = bf16(rows, k, seed=1), bf16(width, k, seed=2, scale=0.2), bf16(width, k, seed=3, scale=0.2)
    w = torch.stack([gate.view(-1, 16, k), up.view(-1, 16, k)], 1).reshape(2 * width, k).contiguous()
    packed, y = library.pack(w), torch.empty(rows, width, dtype=torch.bfloat16)
    run(library, product(x, packed, y, 2 * width, activation=activation), num_tokens=rows)
    act = torch.nn.functional.silu if activation == 1 else lambda t: torch.nn.functional.gelu(t, approximate="tanh")
    expected = act((x.float() @ gate.float().T).bfloat16().float()) * (x.float() @ up.float().T).bfloat16().float()
    torch.testing.assert_close(y.float(), expected, rtol=3e-2, atol=2e-2)


# --- attention and the cache ------------------------------------------------------------------------------------------


@dataclass
class Case:
    heads: int
    kv_heads: int
    dim: int
    rows: list[tuple[int, int]]  # (query tokens, context)
    block_size: int = 32
    softcap: float = 0.0
    window: int = 0
    sinks: bool = False


CASES = {
    "group3": Case(9, 3, 64, [(1, 1), (1, 33), (5, 5), (40, 300), (1, 600), (7, 257)]),
    "group2": Case(16, 8, 128, [(1, 512), (64, 64), (3, 513)]),
    "group7": Case(14, 2, 64, [(1, 100), (20, 700)], block_size=16),
    "group1-dim80": Case(8, 8, 80, [(1, 100), (20, 70)]),
    "group4-softcap": Case(4, 1, 256, [(1, 100), (20, 70)], softcap=30.0),
    "group16-window": Case(16, 1, 96, [(1, 1000), (30, 270)], window=128),
    "everything": Case(4, 2, 64, [(1, 1000), (30, 270), (1, 2)], window=20, sinks=True, softcap=10.0),
}


class Cache:
    """A cache prefilled with NaN; each row's keys and values are written through a random block table."""

    def __init__(self, library: lib.Library, case: Case) -> None:
        self.library, self.case = library, case
        size = 160 * case.kv_heads * case.block_size * case.dim
        self.keys = torch.full((size,), BF16_NAN, dtype=torch.int16).view(torch.bfloat16)
        self.values = self.keys.clone()
        self.layer = LayerCache(
            self.keys, self.values, None, None, heads=case.kv_heads, dim=case.dim, block_size=case.block_size
        )
        self.max_blocks = max(-(-context // case.block_size) for _, context in case.rows)
        free = torch.randperm(160, generator=torch.Generator().manual_seed(5)).int()
        self.tables = torch.zeros(len(case.rows), self.max_blocks, dtype=torch.int32)
        self.q, self.k, self.v = [], [], []
        for row, (query, context) in enumerate(case.rows):
            count = -(-context // case.block_size)
            self.tables[row, :count], free = free[:count], free[count:]
            self.q.append(bf16(query, case.heads, case.dim, seed=10 + row))
            self.k.append(bf16(context, case.kv_heads, case.dim, seed=20 + row))
            self.v.append(bf16(context, case.kv_heads, case.dim, seed=30 + row))
            self._write(row, context)
        self.sinks = torch.randn(case.heads, generator=torch.Generator().manual_seed(6)) if case.sinks else None

    def _write(self, row: int, context: int) -> None:
        case, positions = self.case, torch.arange(context)
        q = torch.zeros(context, case.heads, case.dim).bfloat16()
        qkv, out = torch.cat([q, self.k[row], self.v[row]], 1).contiguous(), torch.empty_like(q)
        table = self.tables[row].long()
        indices = table[positions // case.block_size] * case.block_size + positions % case.block_size
        operation = RopeKv(
            qkv=qkv, q=out, kv=self.layer, cos=None, sin=None, norm=None, heads=case.heads, eps=0.0
        )  # fmt: skip
        run(self.library, operation, num_tokens=context, kv_indices=indices)

    def attend(self, *queries: tuple[int, int]) -> list[torch.Tensor]:
        """Outputs for each (row, number of its last query tokens), from one call."""
        case = self.case
        q = torch.cat([self.q[row][-count:] for row, count in queries]).contiguous()
        out = torch.empty(q.shape[0], case.heads, case.dim, dtype=torch.bfloat16)
        counts = [count for _, count in queries]
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        contexts = torch.tensor([case.rows[row][1] for row, _ in queries], dtype=torch.int32)
        tables = self.tables[[row for row, _ in queries]].contiguous()
        operation = Attention(
            q=q, out=out, kv=self.layer, sinks=self.sinks, heads=case.heads, window=case.window,
            scale=case.dim**-0.5, softcap=case.softcap,
        )  # fmt: skip
        run(
            self.library, operation, num_tokens=q.shape[0], num_rows=len(queries), max_blocks=self.max_blocks,
            block_tables=tables, query_starts=starts, context_lens=contexts,
        )  # fmt: skip
        return list(out.split(counts))

    def expected(self, row: int) -> torch.Tensor:
        case, (query, context) = self.case, self.case.rows[row]
        group = case.heads // case.kv_heads
        k, v = (t[row].double().repeat_interleave(group, 1) for t in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", self.q[row].double(), k) / math.sqrt(case.dim)
        if case.softcap:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        at, key = torch.arange(context - query, context)[:, None], torch.arange(context)[None]
        seen = (key <= at) & (key > at - case.window) if case.window else key <= at
        scores = scores.masked_fill(~seen, -math.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(-1, query, 1)], -1)
        return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1)[..., :context], v)


@pytest.mark.parametrize("name", CASES)
def test_attention(library: lib.Library, name: str) -> None:
    cache = Cache(library, CASES[name])
    rows = range(len(cache.case.rows))
    together = cache.attend(*[(row, cache.case.rows[row][0]) for row in rows])
    for row in rows:
        torch.testing.assert_close(together[row].double(), cache.expected(row), rtol=2e-2, atol=1.5e-2)


@pytest.mark.parametrize("name", CASES)
def test_attention_bits_depend_neither_on_company_nor_on_chunking(library: lib.Library, name: str) -> None:
    cache = Cache(library, CASES[name])
    queries = [(row, query) for row, (query, _) in enumerate(cache.case.rows)]
    together = cache.attend(*queries)
    for row, query in queries:
        for count in {1, min(3, query), query}:
            assert torch.equal(cache.attend((row, count))[0], together[row][-count:])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.window])
def test_attention_reads_nothing_that_a_window_lets_go(library: lib.Library, name: str) -> None:
    """Table entries behind the window name a block of NaN, since they may by then name another row's block."""
    cache = Cache(library, CASES[name])
    queries = [(row, query) for row, (query, _) in enumerate(cache.case.rows)]
    expected = cache.attend(*queries)
    strange = min(set(range(160)) - set(cache.tables.flatten().tolist()))
    for row, (query, context) in enumerate(cache.case.rows):
        read = max(0, context - query - cache.case.window - NativeOps.lookback)
        cache.tables[row, : read // cache.case.block_size] = strange
    assert (cache.tables == strange).any()
    for got, before in zip(cache.attend(*queries), expected, strict=True):
        assert torch.equal(got, before)


# --- one row at a time ------------------------------------------------------------------------------------------------


def test_rms_norm_of_a_sum(library: lib.Library) -> None:
    x, residual, w = bf16(5, 96, seed=1), bf16(5, 96, seed=2), bf16(96, seed=3).float()
    y, total = torch.empty_like(x), torch.empty_like(x)
    run(library, RmsNorm(x=x, residual=residual, sum=total, weight=w, y=y, dim=96, eps=1e-5), num_tokens=5)
    expected = total.float() * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + 1e-5) * w
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_rope_rotates_and_writes_keys_where_attention_reads_them(library: lib.Library, dim: int) -> None:
    heads, kv_heads, tokens, block_size = 4, 2, 6, 16
    qkv, norm = bf16(tokens, heads + 2 * kv_heads, dim, seed=1), bf16(heads + kv_heads, dim, seed=2).float()
    angles = torch.rand(50, dim // 2, generator=torch.Generator().manual_seed(4)) * 6
    positions = torch.tensor([0, 7, 49, 3, 3, 12])
    cos, sin = angles.cos(), angles.sin()
    indices = torch.tensor([5, 6, 40, 17, 0, 63])
    out = torch.empty(tokens, heads, dim, dtype=torch.bfloat16)
    keys, values = (torch.zeros(4, kv_heads, block_size * dim, dtype=torch.bfloat16) for _ in range(2))
    kv = LayerCache(keys, values, None, None, heads=kv_heads, dim=dim, block_size=block_size)
    operation = RopeKv(qkv=qkv, q=out, kv=kv, cos=cos, sin=sin, norm=norm, heads=heads, eps=1e-6)
    run(library, operation, num_tokens=tokens, positions=positions, kv_indices=indices)

    x = qkv[:, : heads + kv_heads].float()
    x = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * norm).bfloat16().float()
    cos = torch.cat([cos, cos], 1)[positions, None]
    sin = torch.cat([-sin, sin], 1)[positions, None]
    expected = x * cos + x.roll(dim // 2, -1) * sin
    torch.testing.assert_close(out.float(), expected[:, :heads], rtol=2e-2, atol=2e-2)
    block, offset = indices // block_size, indices % block_size
    k = keys.view(4, kv_heads, dim // 2, 16, 2).permute(0, 1, 3, 2, 4).reshape(4, kv_heads, 16, dim)
    v = values.view(4, kv_heads, block_size // 2, dim, 2).permute(0, 1, 2, 4, 3).reshape(4, kv_heads, block_size, dim)
    torch.testing.assert_close(k[block, :, offset].float(), expected[:, heads:], rtol=2e-2, atol=2e-2)
    assert torch.equal(v[block, :, offset], qkv[:, heads + kv_heads :])


def test_embedding(library: lib.Library) -> None:
    table, ids = bf16(20, 48, seed=1), torch.tensor([3, 19, 0])
    y = torch.empty(3, 48, dtype=torch.bfloat16)
    run(library, Embed(table=table, y=y, dim=48, scale=2.0), num_tokens=3, token_ids=ids)
    assert torch.equal(y, table[ids] * 2)


# --- the library ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not levels(), reason="no C++ compiler on this machine; the torch back end serves")
def test_threads_change_nothing() -> None:
    x, w = bf16(50, 128, seed=1), bf16(500, 128, seed=2)
    results = []
    for threads in (1, 2, 3):
        library = lib.Library([-1] * threads)
        results.append(linear(library, x, w))
        library.close()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.skipif(not levels(), reason="no C++ compiler on this machine; the torch back end serves")
def test_threads_that_have_ended_begin_anew_with_what_is_run_next() -> None:
    x, w = bf16(50, 128, seed=1), bf16(500, 128, seed=2)
    library = lib.Library([-1] * 3)
    first = linear(library, x, w)
    before = psutil.Process().num_threads()
    lib.rest()
    lib.rest()
    without = psutil.Process().num_threads()
    assert without <= before - 2  # other libraries have threads, too
    assert torch.equal(linear(library, x, w), first)
    assert psutil.Process().num_threads() == without + 2
    library.close()


def test_a_missing_library_is_a_clear_error(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BackendError, match="no C\\+\\+ compiler"):
        lib.Library([-1], path=tmp_path / "libpagoda.so")


@pytest.mark.parametrize("best", range(len(lib.LEVELS)))
def test_the_best_level_of_any_machine(best: int) -> None:
    supported = [level <= best for level in range(len(lib.LEVELS))]
    assert lib.chosen_level("", supported) == lib.LEVELS[best]
    for level, name in enumerate(lib.LEVELS):
        if level <= best:
            assert lib.chosen_level(name, supported) == name
        else:
            with pytest.raises(BackendError, match=f"{', '.join(lib.LEVELS[: best + 1])}, not '{name}'"):
                lib.chosen_level(name, supported)


def test_a_level_in_between_may_be_missing() -> None:
    supported = {"base": True, "avx2": True, "avx512": True}
    assert lib.chosen_level("", [supported.get(name, False) for name in lib.LEVELS]) == "avx512"
    supported["avx2"] = False
    with pytest.raises(BackendError, match="supports base, avx512, not 'avx2'"):
        lib.chosen_level("avx2", [supported.get(name, False) for name in lib.LEVELS])


def test_an_unknown_level_is_a_clear_error() -> None:
    with pytest.raises(BackendError, match="not 'avx1024'"):
        lib.chosen_level("avx1024", [True] * len(lib.LEVELS))


@pytest.mark.parametrize("k", [1, 97])
def test_odd_inputs_are_refused(library: lib.Library, k: int) -> None:
    with pytest.raises(BackendError, match=f"even number of inputs, got {k}"):
        library.pack(bf16(3, k))


@pytest.mark.parametrize(("n", "k"), [(1, 2), (97, 2), (97, 98), (33, 1030)])
def test_odd_outputs(library: lib.Library, n: int, k: int) -> None:
    x, w = bf16(5, k, seed=1), bf16(n, k, seed=2, scale=k**-0.5)
    torch.testing.assert_close(linear(library, x, w).double(), x.double() @ w.double().T, rtol=1e-4, atol=1e-5)


FEATURES = {
    "avx2": 1, "fma": 2, "f16c": 4, "avx_vnni": 8, "avx512": 16, "avx512_vnni": 32, "avx512_bf16": 64, "amx": 128,
}  # fmt: skip
PROCESSORS = {  # features -> levels it runs
    (): ["base"],
    ("avx2", "fma"): ["base"],
    ("avx2", "fma", "f16c"): ["base", "avx2"],
    ("avx2", "fma", "f16c", "avx_vnni"): ["base", "avx2", "avxvnni"],
    ("avx2", "fma", "f16c", "avx512"): ["base", "avx2", "avx512"],
    ("avx2", "fma", "f16c", "avx512", "avx512_bf16"): ["base", "avx2", "avx512"],
    ("avx2", "fma", "f16c", "avx512", "avx512_vnni"): ["base", "avx2", "avx512", "avx512vnni"],
    ("avx2", "fma", "f16c", "avx512", "avx512_vnni", "amx"): ["base", "avx2", "avx512", "avx512vnni"],
    tuple(FEATURES): list(lib.LEVELS),
}


@pytest.mark.skipif(not levels(), reason="no C++ compiler on this machine; the torch back end serves")
@pytest.mark.parametrize("features", PROCESSORS)
def test_a_processor_runs_the_levels_it_has_all_of(features: tuple[str, ...]) -> None:
    handle = ctypes.CDLL(str(LIBRARY))
    mask = sum(FEATURES[name] for name in features)
    runs = [name for index, name in enumerate(lib.LEVELS) if handle.pagoda_runs_with(index, mask)]
    assert runs == PROCESSORS[features]
    assert not handle.pagoda_runs_with(len(lib.LEVELS), mask)
    assert not handle.pagoda_runs_with(-1, mask)


def test_without_a_compiler_nothing_is_built(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build(out=tmp_path / "libpagoda.so") is None


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="elsewhere there is one level")
def test_a_level_is_left_out_only_where_the_compiler_does_not_know_it(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"

    def fake(fails_on: str) -> str:
        compiler.write_text(f"""#!/bin/sh
case "$*" in *{fails_on}*) echo "no such thing: $*" >&2; exit 1;; esac
for last; do :; done
echo "$*" > "$last"
""")
        compiler.chmod(0o755)
        return str(compiler)

    def objects(compiler: str, **options: str) -> list[str]:
        linked = build(compiler, tmp_path / "libpagoda.so", **options)
        assert linked is not None
        return [Path(word).name for word in linked.read_text().split() if word.endswith(".o")]

    assert objects(fake("-mavx512bf16")) == ["pagoda.o", "base.o", "avx2.o", "avxvnni.o", "avx512.o", "avx512vnni.o"]
    assert objects(fake("nothing"), highest="avx2") == ["pagoda.o", "base.o", "avx2.o"]
    with pytest.raises(CompileError, match="PAGODA_LEVEL=2"):
        build(fake("-DPAGODA_LEVEL=2"), tmp_path / "libpagoda.so")
