"""A decoder whose forward pass is recorded the first time it meets a cache, where the back end can record.

The op-by-op path stays: it is what is recorded, what other back ends run, and the oracle of the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pagoda_worker.batch import Batch
from pagoda_worker.models.decoder import Decoder


class Recorded:
    """See `loading.Model`. `max_tokens`: most tokens of a step."""

    def __init__(self, decoder: Decoder, max_tokens: int) -> None:
        self.kv_shape = decoder.kv_shape
        self.logits = decoder.logits
        self._decoder = decoder
        self._max_tokens = max_tokens
        self._kv: Any = None
        self._forward: Callable[[Batch], torch.Tensor] | None = None

    def forward(self, batch: Batch, kv: Any) -> torch.Tensor:
        """Hidden states [T, H] of the batch; where recorded, valid until the next call."""
        if kv is not self._kv:
            self._kv = kv
            self._forward = self._decoder.ops.record(
                lambda ops, blank, cache: self._decoder.on(ops).forward(blank, cache), kv, self._max_tokens
            )
        return self._decoder.forward(batch, kv) if self._forward is None else self._forward(batch)
