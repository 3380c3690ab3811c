"""A fake of flash-attention in plain torch, as documented: what our calls rely on, and what they must avoid.

It computes one token at a time, so a token's bits do not depend on the batch, except where the real kernels give no
such guarantee: told that no row has more than one new token, or free to choose, they split keys by batch size.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    block_table: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """Version 2 with a paged cache."""
    assert k.shape[1] % 256 == 0, "blocks of 256 tokens or a multiple"
    assert cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_k.is_contiguous()
    assert cu_seqlens_k.shape == cu_seqlens_q.shape
    assert cu_seqlens_k[0] == 0
    assert cu_seqlens_k.diff().max() <= max_seqlen_k
    left = -1 if window_size[0] >= max_seqlen_k else window_size[0]
    split = max_seqlen_q == 1 and q.shape[1] > k.shape[2] and left < 0
    return _attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), max_seqlen_q, block_table,
        scale=softmax_scale, causal=causal, window=(left, window_size[1]), softcap=softcap, split=split,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
) -> torch.Tensor:
    """Version 3 with a paged cache and packed queries."""
    assert cache_seqlens.dtype == torch.int32
    assert cache_seqlens.is_contiguous()
    return _attend(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, max_seqlen_q, page_table,
        scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, split=num_splits != 1,
    )  # fmt: skip


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    most_queries: int,
    tables: torch.Tensor,
    *,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    split: bool,
) -> torch.Tensor:
    num_rows, (_, block_size, kv_heads, head_dim) = len(starts) - 1, k.shape
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.shape[1] % kv_heads == 0
    assert head_dim == q.shape[2] <= 256
    assert head_dim % 8 == 0
    assert v.shape == k.shape
    assert starts.dtype == tables.dtype == torch.int32
    assert starts.is_contiguous()
    assert tables.stride(-1) == 1
    assert len(tables) == len(lengths) == num_rows > 0
    assert {x.device for x in (k, v, starts, lengths, tables)} == {q.device}
    assert starts[-1] == len(q)
    assert starts.diff().max() <= most_queries
    assert lengths.max() <= tables.shape[1] * block_size, "the tables are too narrow"
    out = torch.empty_like(q)
    for row in range(num_rows):
        first, count, length = int(starts[row]), int(starts[row + 1] - starts[row]), int(lengths[row])
        blocks = tables[row, : -(-length // block_size)].long()
        keys, values = (part[blocks].flatten(0, 1)[:length].float() for part in (k, v))
        for token in range(count):
            place = token + length - count  # aligned to the bottom right corner
            begin = 0 if window[0] < 0 else max(0, place - window[0])
            right = 0 if causal else window[1]
            end = length if right < 0 else min(length, place + right + 1)
            parts = 2 if split and num_rows < 4 else 1
            out[first + token] = _one(
                q[first + token], keys[begin:end], values[begin:end], scale or head_dim**-0.5, softcap, parts
            )
    return out


def _one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, softcap: float, parts: int
) -> torch.Tensor:
    """Attention of one token's heads [Hq, D] over the keys and values it sees, [n, Hkv, D], in that many merged splits.

    As on a device, weights are relative to the largest of their split and are rounded before multiplying the values.
    """
    group = len(q) // keys.shape[1]
    scores = torch.einsum("hgd,nhd->hgn", q.float().unflatten(0, (-1, group)), keys) * scale
    if softcap > 0:
        scores = (scores / softcap).tanh() * softcap
    top = scores.amax(-1, keepdim=True)
    total, over = torch.zeros_like(top), 0.0
    for part, part_values in zip(scores.chunk(parts, -1), values.chunk(parts, 0), strict=True):
        part_top = part.amax(-1, keepdim=True)
        weights, rescale = (part - part_top).exp(), (part_top - top).exp()
        total += weights.sum(-1, keepdim=True) * rescale
        over = over + torch.einsum("hgn,nhd->hgd", weights.to(q.dtype).float(), part_values) * rescale
    return (over / total).flatten(0, 1)


def install(monkeypatch: pytest.MonkeyPatch, *versions: int, **changes: Any) -> None:
    """Make only these versions importable; `changes` replace functions of the same name."""
    packages = {2: ("flash_attn", flash_attn_varlen_func), 3: ("flash_attn_interface", flash_attn_with_kvcache)}
    for version, (name, function) in packages.items():
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        setattr(module, function.__name__, changes.get(function.__name__, function))
        monkeypatch.setitem(sys.modules, name, module if version in versions else None)
