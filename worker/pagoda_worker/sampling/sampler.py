"""A token is a function of (the row's logits, its parameters, its outputs so far, one uniform number).

First `Processing` is applied. A greedy row then takes the highest logit. A random row computes weights exp(logit /
temperature), applies min_p, top_k, top_p (over what these left, as in vLLM), and inverts the cumulative distribution at
u = philox(seed, choice, output position). Tokens are in the order of `order` throughout, so the survivors of all three
filters are its first tokens, and the chosen token is the first whose cumulative weight exceeds u times the survivors'
weight.

Here rows are sampled one by one on the host, in float64 by numpy, so a row's result cannot depend on its neighbours.
Rows without processing cost one pass to find the highest logit. Back ends without a faster sampler use this one; for
the others it is the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import TopLogprobs
from pagoda_worker.rows import order
from pagoda_worker.rows.order import Ids, Logits, Weights
from pagoda_worker.rows.penalties import Processing
from pagoda_worker.sampling.logprobs import RawLogprobs
from pagoda_worker.sampling.philox import uniform

# How far below the best token to look, in temperatures, until the tokens seen hold the required mass. A look costs a
# fiftieth of sorting the vocabulary, and a typical row sorts the few hundred tokens of the first or second look.
LOOKS = (3.0, 6.0, 8.0, 9.0, 10.0, 11.0, 12.0, 14.0, 16.0, math.inf)
SLACK = 1.0 + 1e-9  # the same mass summed in another order differs by less


class RowState(Protocol):
    """What sampling reads of a row for the token that follows `outputs`. `rows.Row` provides it for its next token.
    It can be referred to weakly."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def choice(self) -> int: ...
    @property
    def outputs(self) -> Ids: ...
    @property
    def num_outputs(self) -> int:
        """The number of `outputs`, which is the token's position in the random stream."""

    @property
    def processing(self) -> Processing | None:
        """Changes to the logits; its counts are those of prompt and `outputs`."""


class Sample(NamedTuple):
    """The token chosen for a row, and its log-probability if the row asked for it."""

    token_id: int
    logprobs: TopLogprobs | None


class Fault(NamedTuple):
    """No token can be chosen for a row."""

    code: ErrorCode
    message: str


NOT_A_NUMBER = Fault(ErrorCode.NUMERICAL_ERROR, "the model's logits are not finite")
NOTHING_ALLOWED = Fault(
    ErrorCode.INVALID_ARGUMENT, "allowed_token_ids, bad_words, min_tokens and grammar together leave no token to choose"
)


def sample(logits: torch.Tensor, rows: Sequence[RowState]) -> list[Sample | Fault]:
    """Choose the next token of each row.

    Args:
        logits: [R, V] float32, raw; overwritten.
        rows: The R rows before this token; the caller appends it.
    """
    host: Logits = logits.cpu().numpy()
    best = host.argmax(axis=-1)  # the first of equals; a NaN counts as the highest
    draws = _draws(rows)
    return [_sample_row(host[i], int(best[i]), row, draws[i]) for i, row in enumerate(rows)]


def _draws(rows: Sequence[RowState]) -> NDArray[np.float64]:
    if all(row.params.greedy for row in rows):
        return np.zeros(len(rows))
    return uniform(
        np.array([row.seed for row in rows], np.uint64),
        np.array([row.choice for row in rows], np.uint64),
        np.array([row.num_outputs for row in rows], np.uint64),
    )


def _sample_row(logits: Logits, best: int, row: RowState, draw: float) -> Sample | Fault:
    if not math.isfinite(logits[best]):
        return NOT_A_NUMBER
    processed = row.processing is not None and row.processing.applies(row.num_outputs)
    raw = None
    if row.params.logprobs is not None:
        raw = RawLogprobs(logits, float(logits[best]), row.params.logprobs, keep=processed)
    if processed and row.processing is not None:
        row.processing.apply(logits, row.outputs)
        best = int(logits.argmax())
        if logits[best] == -np.inf:
            return NOTHING_ALLOWED
        if not math.isfinite(logits[best]):
            return NOT_A_NUMBER
    token = best if row.params.greedy else draw_token(logits, float(logits[best]), row.params, draw)
    return Sample(token, None if raw is None else raw.of(token))


def draw_token(logits: Logits, top: float, params: SamplingParams, draw: float) -> int:
    """The token at `draw` in [0, 1) of the filtered distribution; `top` is the highest of `logits` [V]."""
    if 0 < params.top_k < len(logits):
        ids = order.first(logits, params.top_k)
        return _pick(ids, order.weights(logits[ids], top, params.temperature), None, params, draw)
    weights = order.weights(logits, top, params.temperature)
    total = float((weights[weights >= params.min_p] if params.min_p > 0.0 else weights).sum())
    ids = order.sort(logits, _prefix(logits, top, weights, params, total * SLACK, draw))
    return _pick(ids, weights[ids], total, params, draw)


def _prefix(logits: Logits, top: float, weights: Weights, params: SamplingParams, total: float, draw: float) -> Ids:
    """Unsorted tokens of a prefix of the order that contains the answer, with all ties of its last token.

    The prefix extends past the cut of some filter or, without a filter, past the draw.
    """
    share = params.top_p if params.top_p < 1.0 else draw
    by_min_p = -math.log(params.min_p) * SLACK if params.min_p > 0.0 else math.inf
    for look in LOOKS:
        depth = by_min_p if by_min_p < look else look
        ids = np.flatnonzero(logits >= np.float32(top - depth * params.temperature))
        if depth == by_min_p or weights[ids].sum() > share * total:
            break
    return ids


def _pick(ids: Ids, weights: Weights, total: float | None, params: SamplingParams, draw: float) -> int:
    """Cut `ids`, a prefix of the order that contains the answer, to the survivors and invert their distribution.

    `total` is the mass that top_p is a share of; None means the mass that min_p leaves of `ids`.
    """
    count = int(np.count_nonzero(weights >= params.min_p)) if params.min_p > 0.0 else len(ids)
    cumulative = np.cumsum(weights[:count])  # one chain from the best token: the same for every prefix length
    survivors = total = float(cumulative[-1]) if total is None else total
    if params.top_p < 1.0:
        count = min(count, int(np.searchsorted(cumulative, params.top_p * total, side="left")) + 1)
        survivors = float(cumulative[count - 1])
    place = int(np.searchsorted(cumulative[:count], draw * survivors, side="right"))
    last = int(np.searchsorted(cumulative[:count], cumulative[count - 1], side="left"))  # the last with non-zero weight
    return int(ids[min(place, last)])
