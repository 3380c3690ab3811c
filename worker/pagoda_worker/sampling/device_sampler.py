"""Sampling on the logits' device: ids feed the next step there, and are copied to the host asynchronously."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from pagoda_proto.steps import TopLogprobs
from pagoda_worker.rows.rows import Row
from pagoda_worker.sampling.sampler import NOT_A_NUMBER, NOTHING_ALLOWED, Fault, Sample

Upload = Callable[[torch.Tensor], torch.Tensor]
"""See `accelerator.Accelerator.upload`."""

NO_TOKEN, NONE_ALLOWED = -1, -2  # in place of an id
FAULTS = {NO_TOKEN: NOT_A_NUMBER, NONE_ALLOWED: NOTHING_ALLOWED}


class Chosen(NamedTuple):
    """The choices for R rows, on the device.

    Attributes:
        ids: [R] int64; negative if there is none (see FAULTS).
        logprobs: [P, 2 + 2 n] float64, a line for each of the P rows that want log-probabilities, in order: the token's
            own, its rank, the ids of the n likeliest tokens, their log-probabilities. n is at least what each of these
            rows wants, or V. None if no row wants any.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the host must fetch, for `samples_of`."""
        return (self.ids,) if self.logprobs is None else (self.ids, self.logprobs)


class DeviceSampler(Protocol):
    """Chooses the same tokens as `sampler.sample`, without the host."""

    def takes(self, rows: Sequence[Row]) -> bool:
        """Whether it can choose for all of these rows, in their present state."""

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> Chosen:
        """Choose for logits [R, V] float32, which may be overwritten, of R rows that it takes, on their device.

        Queues work on the device and does not wait for it. A row's output position is `row.num_outputs`.
        """


class GreedySampler:
    """The highest logit, ties to the lowest id, for rows that ask for nothing else."""

    def takes(self, rows: Sequence[Row]) -> bool:
        return all(_plain_greedy(row) for row in rows)

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> Chosen:
        best = logits.argmax(dim=-1)  # the first of equals, or a NaN
        finite = logits.gather(-1, best[:, None]).isfinite()[:, 0]
        return Chosen(best.masked_fill_(~finite, NO_TOKEN))


def greedy_sampler(*_: Any) -> GreedySampler:
    """The `Ops.device_sampler` of back ends without one of their own."""
    return GreedySampler()


def _plain_greedy(row: Row) -> bool:
    processed = row.processing is not None and row.processing.applies(row.num_outputs)
    return row.params.greedy and not processed and row.params.logprobs is None


def samples_of(rows: Sequence[Row], tensors: Sequence[torch.Tensor]) -> list[Sample | Fault]:
    """The samples of these rows, from the sampler's `Chosen.tensors` copied to the host."""
    ids, *tables = tensors
    lines = iter(tables[0].tolist() if tables else ())
    return [_sample_of(row, token, lines) for row, token in zip(rows, ids.tolist(), strict=True)]


def _sample_of(row: Row, token: int, lines: Iterator[list[float]]) -> Sample | Fault:
    num_top = row.params.logprobs
    line = None if num_top is None else next(lines)
    if token < 0:
        return FAULTS[token]
    return Sample(token, None if line is None or num_top is None else _top_logprobs(line, num_top))


def _top_logprobs(line: list[float], num_top: int) -> TopLogprobs:
    """The first `num_top` of a line of `Chosen.logprobs`, or as many as there are."""
    half = len(line) // 2 + 1
    ids, logprobs = line[2:half], line[half:]
    return TopLogprobs(line[0], int(line[1]), [int(token) for token in ids[:num_top]], logprobs[:num_top])
