"""Sampling with the kernel library: one array of structs with the rows' parameters, one call, one array of results.

It follows the definition of `sampler`, but with integer weights (see csrc/sampling.h): the tokens are the same, except
for draws within about a millionth of the boundary between two tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagoda_proto.steps import TopLogprobs
from pagoda_worker.kernels.cpu.library import SAMPLE_RESULT, SAMPLE_ROW, Library
from pagoda_worker.sampling import logprobs, sampler
from pagoda_worker.sampling.sampler import NOT_A_NUMBER, NOTHING_ALLOWED, Fault, RowState, Sample

NUMERICS = "sampling 1"
MAX_VOCAB = 2**20  # exclusive; the weights of so many tokens, even if equal, add up to less than 2**64
NONE = -1
FAULTS = (None, NOT_A_NUMBER, NOTHING_ALLOWED)  # by `SampleStatus`
NO_CHANGES = (0,) * 13
NO_IDS = np.empty(0, np.int64)

Structs = NDArray[np.void]


class Sampler:
    """Samples with `library`. Rows for which nothing but a token is wanted, and whose parameters alone decide it, are
    usually those of the next step, too; so the call for them is kept."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._kept: _Call | None = None
        self._rows: list[weakref.ref[RowState]] = []  # of the kept call; weakly, because they may end meanwhile

    def sample(self, logits: torch.Tensor, rows: Sequence[RowState]) -> list[Sample | Fault]:
        """See `Ops.sample`."""
        call = self._kept
        if call is None or call.logits() is not logits or not self._knows(rows):
            if logits.shape[1] >= MAX_VOCAB:
                return sampler.sample(logits, rows)
            call, self._kept = _Call(logits, rows), None
            if call.repeatable:
                self._kept, self._rows = call, [weakref.ref(row) for row in rows]
        else:
            call.move_on(rows)
        call.run(self._library)
        return call.samples(rows)

    def _knows(self, rows: Sequence[RowState]) -> bool:
        return all(row is one() for row, one in zip(rows, self._rows, strict=True))  # the logits are of as many


class _Call:
    """`logits` refers to those given, weakly: a call that is kept for the next step must not keep a step's logits."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[RowState]) -> None:
        self._owners: list[object] = []
        vocab_size = logits.shape[1]
        asked = np.array([(*_changes(row, vocab_size, self._owners), *_manner(row)) for row in rows], SAMPLE_ROW)
        used = logits.contiguous()
        plain = all(row.processing is None and row.params.logprobs is None for row in rows)
        self.repeatable = plain and used is logits
        self.logits = weakref.ref(logits)
        self._results = _new_results(len(rows))
        self._statuses, self._tokens = self._results["status"], self._results["token"]
        self._positions = None if all(row.params.greedy for row in rows) else asked["position"]
        self._arguments = used.data_ptr(), len(rows), vocab_size, asked.ctypes.data, self._results.ctypes.data
        self._owners += [asked] if self.repeatable else [asked, used]

    def move_on(self, rows: Sequence[RowState]) -> None:
        """To the next token of the same rows, if `repeatable`."""
        if self._positions is not None:
            self._positions[:] = [row.num_outputs for row in rows]

    def run(self, library: Library) -> None:
        library.sample(*self._arguments)

    def samples(self, rows: Sequence[RowState]) -> list[Sample | Fault]:
        statuses, tokens = self._statuses.tolist(), self._tokens.tolist()
        if self.repeatable:
            return [FAULTS[status] or Sample(token, None) for status, token in zip(statuses, tokens, strict=True)]
        return [
            FAULTS[status] or Sample(token, None if (num := row.params.logprobs) is None else _report(result, num))
            for row, status, token, result in zip(rows, statuses, tokens, self._results, strict=True)
        ]


def report(library: Library, logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TopLogprobs]:
    """See `Ops.report`."""
    if logits.shape[1] >= MAX_VOCAB:
        return logprobs.report(logits, tokens, num_top)
    asked = np.zeros(len(tokens), SAMPLE_ROW)
    asked["given"], asked["num_top"] = tokens, num_top
    results, logits = _new_results(len(asked)), logits.contiguous()
    library.sample(logits.data_ptr(), len(asked), logits.shape[1], asked.ctypes.data, results.ctypes.data)
    failed = np.flatnonzero(results["status"])
    return [_report(result, num_top) for result in (results[: failed[0]] if len(failed) else results)]


def _new_results(count: int) -> Structs:
    results = np.zeros(count, SAMPLE_RESULT)
    results["top_ids"] = NONE
    return results


def _changes(row: RowState, vocab_size: int, owners: list[object]) -> tuple[float, ...]:
    """The struct's fields for changes to the logits; appends to `owners` the arrays whose addresses these hold."""
    processing = row.processing
    if processing is None or not processing.applies(row.num_outputs):
        return NO_CHANGES
    limited, masked = processing.limits(row.outputs, vocab_size)
    allowed = NO_IDS if limited is None else limited
    counts = processing.counts
    seen, times = (NO_IDS, NO_IDS) if counts is None else (counts.ids, counts.output_counts)
    arrays: list[NDArray[Any]] = [allowed, masked, processing.bias_ids, seen, times, processing.bias]
    owners.append(arrays)
    addresses = (array.ctypes.data for array in arrays)
    p = row.params
    penalties = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
    return (*addresses, len(allowed), len(masked), len(processing.bias_ids), len(seen), *penalties)


def _manner(row: RowState) -> tuple[float, ...]:
    p = row.params
    num_top = NONE if p.logprobs is None else p.logprobs
    return (row.choice, row.num_outputs, p.top_k, num_top, NONE, row.seed, p.temperature, p.top_p, p.min_p)


def _report(result: np.void, num_top: int) -> TopLogprobs:
    ids = result["top_ids"][:num_top].tolist()
    count = ids.index(NONE) if NONE in ids else num_top  # the vocabulary may be smaller
    return TopLogprobs(
        logprob=float(result["logprob"]),
        rank=int(result["rank"]),
        top_ids=ids[:count],
        top_logprobs=result["top_logprobs"][:count].tolist(),
    )
