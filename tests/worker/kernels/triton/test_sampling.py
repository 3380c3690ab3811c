"""The device's tokens and log-probabilities against the sampler's.

Both follow one definition in different arithmetic. If a draw or a top_p lies within BORDER of a border between two
tokens, it may fall on either side: for such a row, either of the sampler's results is accepted.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.worker.kernels.triton.support import DEVICE
from tests.worker.sampling.test_sampler import random_logits, row

from pagoda_proto.params import SamplingParams
from pagoda_worker.kernels.triton import philox
from pagoda_worker.kernels.triton.device_sampler import TritonSampler
from pagoda_worker.kernels.triton.report import report
from pagoda_worker.rows.rows import Row
from pagoda_worker.sampling.device_sampler import samples_of
from pagoda_worker.sampling.logprobs import RawLogprobs
from pagoda_worker.sampling.philox import uniform
from pagoda_worker.sampling.sampler import Fault, Sample, draw_token
from pagoda_worker.sampling.sampler import sample as sample_on_host

BORDER = 1e-7  # relative to the total mass


def chosen(logits: np.ndarray, rows: list[Row]) -> list[Sample | Fault]:
    """The device's choices for rows that it sees for the first time."""
    sampler = TritonSampler(len(rows), logits.shape[1], DEVICE, lambda host: host.to(DEVICE))
    assert sampler.takes(rows)
    found = sampler.sample(torch.from_numpy(logits.copy()).to(DEVICE), rows)
    return samples_of(rows, [tensor.cpu() for tensor in found.tensors])


def tokens(samples: list[Sample | Fault]) -> list[int]:
    return [one.token_id for one in samples if isinstance(one, Sample)]


def changed(params: SamplingParams, top_p: float) -> SamplingParams:
    return SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=top_p, min_p=params.min_p)


def acceptable(logits: np.ndarray, r: Row) -> set[int]:
    """The sampler's token, and its tokens for a draw or top_p within BORDER of this one."""
    z = logits.copy()
    if r.processing is not None:
        r.processing.apply(z, r.outputs)
    u, p = float(uniform(r.seed, r.choice, r.num_outputs)), r.params
    top_ps = {p.top_p} if p.top_p == 1 else {min(1.0, max(1e-12, p.top_p + d)) for d in (-BORDER, 0, BORDER)}
    draws = {min(1 - 2**-53, max(0.0, u + d)) for d in (-BORDER, 0, BORDER)}
    return {draw_token(z, float(z.max()), changed(p, q), v) for q, v in itertools.product(top_ps, draws)}


def check(logits: np.ndarray, rows: list[Row]) -> None:
    expected = sample_on_host(torch.from_numpy(logits.copy()), rows)
    for i, (found, one) in enumerate(zip(chosen(logits, rows), expected, strict=True)):
        if isinstance(found, Fault) or isinstance(one, Fault):
            assert found == one, i
        elif found.token_id != one.token_id:
            assert found.token_id in acceptable(logits[i], rows[i]), (i, rows[i].params)


FILTERS: list[dict[str, Any]] = [
    {},
    *({"temperature": t} for t in (0.0, 0.01, 0.3, 1.7, 50.0)),
    *({"top_k": k} for k in (1, 2, 40, 299, 300, 1000)),
    *({"top_p": p} for p in (0.99, 0.9, 0.5, 0.1, 1e-6)),
    *({"min_p": p} for p in (0.01, 0.2, 1.0)),
    {"top_k": 5, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.1, "temperature": 0.7},
    {"top_p": 0.95, "min_p": 0.05, "temperature": 2.0},
    {"top_k": 100, "temperature": 0.05},
]


@pytest.mark.parametrize("step", [0.125, 2**-12, 4.0], ids=["some ties", "few ties", "many ties"])
def test_filters(step: float) -> None:
    rows = [row(seed=7 * i + 2**63, **params) for i, params in enumerate(FILTERS)]
    check(np.stack([random_logits(i, 300, step=step) for i in range(len(rows))]), rows)


def test_draws_cover_the_distribution() -> None:
    """One row in 40 draws one distribution with two groups of ties."""
    logits = np.tile(np.float32([1, 2, 2, 0, 2, 1, -np.inf, 3]), (40, 1))
    rows = [row(seed=seed) for seed in range(40)]
    check(logits, rows)
    assert len(set(tokens(chosen(logits, rows)))) >= 5


PROCESSINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5, "temperature": 0.0},
    {"presence_penalty": -2.0, "frequency_penalty": 0.25},
    {"frequency_penalty": 2.0, "top_p": 0.9},
    {"logit_bias": {3: 100.0, 70: -100.0, 64: 2.5}, "repetition_penalty": 1.2},
    {"logit_bias": {199: 30.0}, "temperature": 0.0},
    {"allowed_token_ids": (5, 31, 32, 64, 199)},
    {"allowed_token_ids": (7,), "top_k": 5},
    {"bad_words_token_ids": ((4, 9), (8,), (1, 2))},
    {"min_tokens": 9, "stop_token_ids": (4, 5, 6), "temperature": 0.0},
    {"min_tokens": 2, "stop_token_ids": (4, 5, 6)},
    {"allowed_token_ids": (4, 5), "min_tokens": 9, "stop_token_ids": (4, 5)},
    {"allowed_token_ids": (4, 5, 6), "logit_bias": {4: 5.0}, "bad_words_token_ids": ((5,),), "presence_penalty": 1.0},
    {},
]


def test_processing() -> None:
    outputs = [[3, 4, 4, 120], [8, 4]]
    rows = [row(o, seed=i, **p) for i, (p, o) in enumerate(itertools.product(PROCESSINGS, outputs))]
    check(np.stack([random_logits(50 + i, 200) for i in range(len(rows))]), rows)


@pytest.mark.parametrize("vocab", [1, 2, 33, 2048, 4097, 9000])
def test_vocabularies_of_several_slices_and_none_that_is_whole(vocab: int) -> None:
    choices: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.8}, {"temperature": 0.0}]
    rows = [row(prompt=[0], seed=i, **params) for i, params in enumerate(choices)]
    check(np.stack([random_logits(i, vocab, step=2**-10) for i in range(4)]), rows)


def test_extreme_logits() -> None:
    z = np.zeros((9, 70), np.float32)
    z[1, ::2] = -0.0  # negative zero equals zero; the lowest id wins
    z[2] = -np.inf
    z[2, 9] = -5
    z[3, 8] = np.nan
    z[4, 8] = np.inf
    z[5] = -np.inf
    z[6, :35], z[6, 35:] = 3e38, -3e38
    z[7] = np.linspace(-1e-38, 1e-38, 70, dtype=np.float32)
    z[8, 3:5] = 1e30
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.5, "temperature": 0.5}):
        check(z, [row(seed=i, **params) for i in range(len(z))])


def test_a_row_alone_and_in_a_batch_are_the_same() -> None:
    rows = [row(seed=i, **p) for i, p in enumerate([*FILTERS[:8], *PROCESSINGS[:4]])]
    logits = np.stack([random_logits(i, 5000, step=2**-14) for i in range(len(rows))])
    together = chosen(logits, rows)
    for i, r in enumerate(rows):
        assert chosen(logits[i : i + 1], [r]) == [together[i]]


def test_greedy_rows_alone_take_the_same_way() -> None:
    """No row draws, so there are no histograms."""
    asked: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.8}, {"logit_bias": {3: 20.0}}, {"min_tokens": 3}]
    rows = [row([4, 9], temperature=0.0, stop_token_ids=(9, 5), **params) for params in asked]
    check(np.stack([random_logits(i, 5000) for i in range(4)]), rows)


@pytest.mark.parametrize("num_top", [1, 5, 20])
@pytest.mark.parametrize(("vocab", "step"), [(300, 1.0), (5000, 2**-10), (21, 0.5)])
def test_logprobs_and_ranks(vocab: int, step: float, num_top: int) -> None:
    logits = np.stack([random_logits(i, vocab, step=step) for i in range(4)])
    logits[1, 3:] -= 500  # the rest has no mass
    logits[2] *= 0  # all tied
    logits[3, ::3] = -np.inf
    ids = [0, 2, vocab - 1, int(logits[3].argmax())]
    given = torch.from_numpy(logits).to(DEVICE)
    found = report(given, torch.tensor(ids, device=DEVICE), num_top)
    np.testing.assert_array_equal(given.cpu().numpy(), logits)
    for i, token in enumerate(ids):
        raw = RawLogprobs(logits[i], float(logits[i].max()), num_top).of(token)
        line = found[i].tolist()
        assert line[1] == raw.rank
        assert line[2 : 2 + num_top] == raw.top_ids
        values = np.float32([line[0], *line[2 + num_top :]])
        np.testing.assert_allclose(values, np.float32([raw.logprob, *raw.top_logprobs]), rtol=2e-7, atol=2e-7)


def test_two_zeros_are_one_in_the_order() -> None:
    logits = np.zeros((1, 40), np.float32)
    logits[0, ::2] = -0.0
    logits[0, 7] = 1.0
    (line,) = report(torch.from_numpy(logits).to(DEVICE), torch.tensor([3], device=DEVICE), 5).tolist()
    assert line[1:7] == [5, 7, 0, 1, 2, 3]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_report_on_no_numbers_touches_no_other(bad: float) -> None:
    """The report on the bad row is ignored, but its neighbours' reports are unaffected."""
    logits = np.stack([random_logits(i, 100) for i in range(3)])
    expected = report(torch.from_numpy(logits).to(DEVICE), torch.tensor([1, 0, 2], device=DEVICE), 4)
    for places in (slice(None), slice(0, None, 2)):
        logits[1, places] = bad
        found = report(torch.from_numpy(logits).to(DEVICE), torch.tensor([1, 0, 2], device=DEVICE), 4)
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


@triton.jit
def uniform_kernel(out, seeds, choices, positions, size, BLOCK: tl.constexpr):
    """out [size] float64."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    seed, choice = tl.load(seeds + at, mask=here, other=0), tl.load(choices + at, mask=here, other=0)
    tl.store(out + at, philox.uniform(seed, choice, tl.load(positions + at, mask=here, other=0)), mask=here)


def test_random_numbers_are_the_hosts() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 12345678901234567890, 2**63], np.uint64)
    choices, positions = np.array([0, 1, 2**32 - 1, 7, 15]), np.array([5, 0, 2**32 - 1, 9, 10**6])
    out = torch.empty(5, dtype=torch.float64, device=DEVICE)
    given = [torch.from_numpy(x.view(np.int64)).to(DEVICE) for x in (seeds, choices, positions)]
    uniform_kernel[(2,)](out, *given, 5, BLOCK=4)
    assert out.tolist() == uniform(seeds, choices, positions).tolist()
