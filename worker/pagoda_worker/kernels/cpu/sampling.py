"""Sampling with the kernel library: one array of structs with the rows' parameters, one call, one array of results.

It follows the definition of `sampler`, but with integer weights (see csrc/sampling.h): the tokens are the same, except
for draws within about a millionth of the boundary between two tokens.
"""

from __future__ import annotations

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


def sample(library: Library, logits: torch.Tensor, rows: Sequence[RowState]) -> list[Sample | Fault]:
    """See `Ops.sample`."""
    if logits.shape[1] >= MAX_VOCAB:
        return sampler.sample(logits, rows)
    owners: list[object] = []
    asked = np.array([(*_changes(row, logits.shape[1], owners), *_manner(row)) for row in rows], SAMPLE_ROW)
    results = _call(library, logits, asked)
    del owners
    statuses, tokens = results["status"].tolist(), results["token"].tolist()
    return [
        FAULTS[status] or Sample(token, None if row.params.logprobs is None else _report(result, row.params.logprobs))
        for row, status, token, result in zip(rows, statuses, tokens, results, strict=True)
    ]


def report(library: Library, logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TopLogprobs]:
    """See `Ops.report`."""
    if logits.shape[1] >= MAX_VOCAB:
        return logprobs.report(logits, tokens, num_top)
    asked = np.zeros(len(tokens), SAMPLE_ROW)
    asked["given"], asked["num_top"] = tokens, num_top
    results = _call(library, logits, asked)
    failed = np.flatnonzero(results["status"])
    return [_report(result, num_top) for result in (results[: failed[0]] if len(failed) else results)]


def _call(library: Library, logits: torch.Tensor, asked: Structs) -> Structs:
    logits = logits.contiguous()
    results = np.zeros(len(asked), SAMPLE_RESULT)
    results["top_ids"] = NONE
    library.sample(logits, asked.ctypes.data, results.ctypes.data)
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
