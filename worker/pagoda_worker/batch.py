"""One forward pass of many rows, laid out as tensors.

All chunks of a step are packed one after the other without padding; every op finds its row through `query_starts`.
There is no prefill and no decode: a row has `query_lens[i]` new tokens at the end of `context_lens[i]` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """T packed new tokens of B rows; logits are wanted for R of the tokens.

    The lists repeat small facts on the host so that no op has to read a tensor back.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, absolute position of each token in its row
    kv_indices: torch.Tensor  # [T] int64, where this token's K and V go: block_id * block_size + offset
    block_tables: torch.Tensor  # [B, max_blocks] int32, padded with 0
    query_starts: list[int]  # [B + 1], token range of row i is query_starts[i] : query_starts[i + 1]
    query_lens: list[int]  # [B]
    context_lens: list[int]  # [B], tokens in the KV cache after this step's are written
    logit_indices: torch.Tensor  # [R] int64, tokens whose logits are wanted, in row order

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]
