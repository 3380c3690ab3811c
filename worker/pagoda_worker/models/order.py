"""The order of rows in merged queries, keys and values, where a checkpoint stores them differently."""

from __future__ import annotations

from pagoda_worker.checkpoints.rope import head_order
from pagoda_worker.checkpoints.spec import LayerSpec


def qkv_order(layer: LayerSpec, grouped: bool) -> list[int] | None:
    """Which stored row is at each place: all query heads, all keys, all values. None: they are stored in this order.

    `grouped`: see `Names`. The dimensions of query and key heads are put in the order of `head_order`.
    """
    attention = layer.attention
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    dims = head_order(layer.rope) if layer.rope is not None else None
    if dims is None and not grouped:
        return None
    turned, plain = dims or list(range(dim)), list(range(dim))
    blocks = list(range(heads + 2 * kv_heads))  # of `dim` rows, as they are stored
    if grouped:
        each = heads // kv_heads + 2
        groups = [blocks[start : start + each] for start in range(0, len(blocks), each)]
        blocks = [head for group in groups for head in group[:-2]]
        blocks += [group[-2] for group in groups] + [group[-1] for group in groups]
    turning = heads + kv_heads
    return [block * dim + i for at, block in enumerate(blocks) for i in (turned if at < turning else plain)]
