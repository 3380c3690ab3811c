"""The device's tokens and log-probabilities against the sampler's.

Both follow one definition in different arithmetic, so a draw or a top_p within BORDER of a border between two tokens
may fall on either side of it: such a row may have what the sampler gives for either.
"""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.worker.kernels.triton.support import DEVICE
from tests.worker.test_sampler import random_logits, row

from pagoda_proto.params import SamplingParams
from pagoda_worker.kernels.triton import philox, sampling
from pagoda_worker.kernels.triton.report import report
from pagoda_worker.kernels.triton.sampling import IN_PROMPT, Requests, sample
from pagoda_worker.logprobs import RawLogprobs
from pagoda_worker.penalties import completes
from pagoda_worker.philox import uniform
from pagoda_worker.rows import Row
from pagoda_worker.sampler import NOT_A_NUMBER, NOTHING_ALLOWED, Fault, draw_token
from pagoda_worker.sampler import sample as sample_on_host

BORDER = 1e-7  # of the mass


def edits_of(r: Row) -> dict[int, float]:
    """Token -> what is added to its logit."""
    p = r.params
    edits = dict(p.logit_bias)
    edits |= {word[-1]: -np.inf for word in p.bad_words_token_ids if completes(word, r.outputs)}
    if r.num_outputs < p.min_tokens:
        edits |= dict.fromkeys(p.stop_token_ids, -np.inf)
    return edits


def requests_of(rows: list[Row], vocab: int) -> Requests:
    """What the host would have put on the device for these rows."""
    edits = [edits_of(r) for r in rows]
    width = max(1, *map(len, edits))
    ids, values = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.float32)
    counts, counts_row = np.zeros((len(rows), vocab), np.int32), np.full(len(rows), -1, np.int32)
    allowed, allowed_row = np.zeros((len(rows), -(-vocab // 32) * 32), bool), np.full(len(rows), -1, np.int32)
    for i, r in enumerate(rows):
        ids[i, : len(edits[i])], values[i, : len(edits[i])] = list(edits[i]), list(edits[i].values())
        p = r.params
        if (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) != (1, 0, 0):
            counts_row[i] = i
            np.add.at(counts[i], r.outputs, 1)
            counts[i, np.unique(r.tokens.array[: r.num_prompt_tokens])] |= IN_PROMPT
        if p.allowed_token_ids:
            allowed_row[i] = i
            allowed[i, list(p.allowed_token_ids)] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(r.params, name) for r in rows], dtype=dtype, device=DEVICE)

    def moved(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)

    penalties = [[r.params.repetition_penalty, r.params.frequency_penalty, r.params.presence_penalty] for r in rows]
    return Requests(
        temperature=column("temperature", torch.float64),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float64),
        min_p=column("min_p", torch.float64),
        seed=moved(np.array([r.seed for r in rows], np.uint64).view(np.int64)),
        choice=moved(np.array([r.choice for r in rows], np.int64)),
        position=moved(np.array([r.num_outputs for r in rows], np.int64)),
        penalties=torch.tensor(penalties, dtype=torch.float32, device=DEVICE),
        counts=moved(counts),
        counts_row=moved(counts_row),
        allowed=moved(words),
        allowed_row=moved(allowed_row),
        edit_ids=moved(ids),
        edit_values=moved(values),
        num_edits=moved(np.array(list(map(len, edits)), np.int32)),
    )


def changed(params: SamplingParams, top_p: float) -> SamplingParams:
    return SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=top_p, min_p=params.min_p)


def acceptable(logits: np.ndarray, r: Row) -> set[int]:
    """The sampler's token, and those it gives within BORDER of this draw and this top_p."""
    z = logits.copy()
    if r.processing is not None:
        r.processing.apply(z, r.outputs)
    u, p = float(uniform(r.seed, r.choice, r.num_outputs)), r.params
    top_ps = {p.top_p} if p.top_p == 1 else {min(1.0, max(1e-12, p.top_p + d)) for d in (-BORDER, 0, BORDER)}
    draws = {min(1 - 2**-53, max(0.0, u + d)) for d in (-BORDER, 0, BORDER)}
    return {draw_token(z, float(z.max()), changed(p, q), v) for q, v in itertools.product(top_ps, draws)}


def check(logits: np.ndarray, rows: list[Row]) -> None:
    given = torch.from_numpy(logits.copy()).to(DEVICE)
    found = sample(given, requests_of(rows, logits.shape[1]))
    np.testing.assert_array_equal(given.cpu().numpy(), logits)
    expected = sample_on_host(torch.from_numpy(logits.copy()), rows)
    statuses = {NOT_A_NUMBER: sampling.NOT_FINITE, NOTHING_ALLOWED: sampling.NOTHING_ALLOWED}
    for i, (token, status) in enumerate(zip(found.token_ids.tolist(), found.status.tolist(), strict=True)):
        one = expected[i]
        if isinstance(one, Fault):
            assert status == statuses[one], i
            continue
        assert status == sampling.OK, i
        if token != one.token_id:
            assert token in acceptable(logits[i], rows[i]), (i, rows[i].params)


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
    """One row in 40 draws of one distribution with two groups of ties."""
    logits = np.tile(np.float32([1, 2, 2, 0, 2, 1, -np.inf, 3]), (40, 1))
    rows = [row(seed=seed) for seed in range(40)]
    check(logits, rows)
    found = sample(torch.from_numpy(logits).to(DEVICE), requests_of(rows, 8)).token_ids
    assert len(set(found.tolist())) >= 5


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
    z[1, ::2] = -0.0  # one zero of the two, lowest id first
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
    rows = [row(seed=i, **p) for i, p in enumerate(FILTERS[:8])]
    logits = torch.from_numpy(np.stack([random_logits(i, 5000, step=2**-14) for i in range(8)])).to(DEVICE)
    together = sample(logits, requests_of(rows, 5000)).token_ids
    for i, r in enumerate(rows):
        assert sample(logits[i : i + 1], requests_of([r], 5000)).token_ids[0] == together[i]


def test_plain_requests_need_no_tables() -> None:
    rows = [row(seed=3), row(temperature=0.0)]
    whole = requests_of(rows, 300)
    optional = {field.name for field in fields(Requests) if field.default is None}
    plain = replace(whole, **dict.fromkeys(optional))
    logits = torch.from_numpy(np.stack([random_logits(i, 300) for i in range(2)])).to(DEVICE)
    assert plain.counts is None
    assert torch.equal(sample(logits, plain).token_ids, sample(logits, whole).token_ids)
    assert sample(logits[:0], plain).token_ids.shape == (0,)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize(("vocab", "step"), [(300, 1.0), (5000, 2**-10), (21, 0.5)])
def test_logprobs_and_ranks(vocab: int, step: float, num_top: int) -> None:
    logits = np.stack([random_logits(i, vocab, step=step) for i in range(4)])
    logits[1, 3:] -= 500  # the rest has no mass
    logits[2] *= 0  # nothing but ties
    logits[3, ::3] = -np.inf
    tokens = [0, 2, vocab - 1, int(logits[3].argmax())]
    found = report(torch.from_numpy(logits).to(DEVICE), torch.tensor(tokens, device=DEVICE), num_top)
    for i, token in enumerate(tokens):
        raw = RawLogprobs(logits[i], float(logits[i].max()), num_top).of(token)
        assert found.ranks[i] == raw.rank
        assert found.top_ids[i].tolist() == raw.top_ids
        np.testing.assert_allclose(found.logprobs[i].item(), raw.logprob, rtol=2e-7, atol=2e-7)
        tops = found.top_logprobs[i].cpu().numpy()
        np.testing.assert_allclose(tops, np.float32(raw.top_logprobs), rtol=2e-7, atol=2e-7)


def test_random_numbers_are_the_hosts() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 12345678901234567890, 2**63], np.uint64)
    choices, positions = np.array([0, 1, 2**32 - 1, 7, 15]), np.array([5, 0, 2**32 - 1, 9, 10**6])
    out = torch.empty(5, dtype=torch.float64, device=DEVICE)
    given = [torch.from_numpy(x.view(np.int64)).to(DEVICE) for x in (seeds, choices, positions)]
    philox.uniform_kernel[(2,)](out, *given, 5, BLOCK=4)
    assert out.tolist() == uniform(seeds, choices, positions).tolist()
