"""Sampling where the logits are, for rows that need nothing from the host: their ids feed the next step directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pagoda_worker.rows import Row

NO_TOKEN = -1  # in place of an id: the row's logits are no numbers


class DeviceSampler(Protocol):
    """Chooses the tokens that `sampler.sample` would, without the host."""

    def takes(self, rows: Sequence[Row]) -> bool:
        """Whether it can choose for all of these rows, in their present state."""

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        """logits [R, V] float32, may be overwritten -> ids [R] int64 on the same device, NO_TOKEN where there is none.

        Asks the device and does not wait for it. A row's output position is `row.num_outputs`.
        """


class GreedySampler:
    """The highest logit, ties to the lowest id, for rows that ask for no more than that."""

    def takes(self, rows: Sequence[Row]) -> bool:
        return all(_plain_greedy(row) for row in rows)

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        best = logits.argmax(dim=-1)  # the first of equals, or a NaN
        finite = logits.gather(-1, best[:, None]).isfinite()[:, 0]
        return best.masked_fill_(~finite, NO_TOKEN)


def _plain_greedy(row: Row) -> bool:
    processed = row.processing is not None and row.processing.applies(row.num_outputs)
    return row.params.greedy and not processed and row.params.logprobs is None
