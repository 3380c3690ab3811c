"""Log-probabilities as the model gave them, before any processing, temperature or filter (vLLM's raw logprobs)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from pagoda_proto.steps import TopLogprobs
from pagoda_worker.rows import order
from pagoda_worker.rows.order import Ids, Logits


class RawLogprobs:
    """Log-probabilities of one row of raw logits in float32, with ranks by `order`.

    Built before the logits are processed in place; `keep` copies them if that is about to happen.
    """

    def __init__(self, logits: Logits, top: float, num_top: int, *, keep: bool = False) -> None:
        self._logits = logits.copy() if keep else logits
        self._log_mass = top + math.log(order.mass(logits, top))
        self._top_ids = order.first(logits, num_top) if num_top else np.empty(0, np.int64)

    def of(self, token: int) -> TopLogprobs:
        return TopLogprobs(
            logprob=self._values(np.array([token]))[0],
            rank=order.rank(self._logits, token),
            top_ids=self._top_ids.tolist(),
            top_logprobs=self._values(self._top_ids),
        )

    def _values(self, ids: Ids) -> list[float]:
        values: list[float] = (self._logits[ids].astype(np.float64) - self._log_mass).astype(np.float32).tolist()
        return values


def report(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TopLogprobs]:
    """Log-probabilities of `tokens[i]` in row i of `logits` [R, V], up to the first row whose logits are not finite."""
    host: Logits = logits.cpu().numpy()
    reports: list[TopLogprobs] = []
    for values, top, token in zip(host, host.max(axis=-1).tolist(), tokens, strict=True):
        if not -math.inf < top < math.inf:
            break
        reports.append(RawLogprobs(values, top, num_top).of(token))
    return reports
