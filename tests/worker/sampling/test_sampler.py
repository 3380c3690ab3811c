from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.fakes_model import new_row

from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams
from pagoda_worker.rows import order
from pagoda_worker.rows.rows import Row
from pagoda_worker.sampling.philox import uniform
from pagoda_worker.sampling.sampler import LOOKS, Fault, Sample, draw_token, sample

V = 64


def row(
    outputs: list[int] | None = None,
    *,
    prompt: list[int] | None = None,
    seed: int = 5,
    eos: tuple[int, ...] = (),
    **params: Any,
) -> Row:
    return row_of(SamplingParams(**params), outputs, prompt=prompt, seed=seed, eos=eos)


def row_of(
    params: SamplingParams,
    outputs: list[int] | None = None,
    *,
    prompt: list[int] | None = None,
    seed: int = 5,
    eos: tuple[int, ...] = (),
) -> Row:
    """A row with cached parameters: checking them is most of a row's cost."""
    prompt = prompt or [1, 2, 3]
    ids = prompt + (outputs or [])
    new = new_row(0, ids, [], num_prompt_tokens=len(prompt), params=params, seed=seed, eos_token_ids=eos)
    return Row.of(new, np.array(ids), np.array([], np.int64))


def one(logits: Any, the_row: Row) -> Sample | Fault:
    return sample(torch.tensor(np.asarray(logits, np.float32))[None], [the_row])[0]


def token(logits: Any, the_row: Row) -> int:
    result = one(logits, the_row)
    assert isinstance(result, Sample), result
    return result.token_id


# --- the oracle: float64, full sort, one line per rule --------------------------------------------------------------


def oracle_logits(logits: np.ndarray, r: Row) -> np.ndarray:
    z, p, outputs = logits.astype(np.float64).copy(), r.params, r.outputs.tolist()
    if p.allowed_token_ids:
        z[[t for t in range(len(z)) if t not in p.allowed_token_ids]] = -np.inf
    for word in p.bad_words_token_ids:
        n = len(word) - 1
        if outputs[len(outputs) - n :] == list(word[:-1]) and n <= len(outputs):
            z[word[-1]] = -np.inf
    if len(outputs) < p.min_tokens:
        for t in p.stop_token_ids:
            z[t] = -np.inf
    for t, bias in p.logit_bias.items():
        z[t] += bias
    for t in set(r.tokens.array.tolist()):
        z[t] = z[t] / p.repetition_penalty if z[t] > 0 else z[t] * p.repetition_penalty
        z[t] -= p.frequency_penalty * outputs.count(t)
        z[t] -= p.presence_penalty * (t in outputs)
    return z


def oracle_survivors(z: np.ndarray, p: SamplingParams) -> tuple[list[int], np.ndarray]:
    ids = sorted(range(len(z)), key=lambda t: (-z[t], t))
    w = np.exp((z[ids] - z.max()) / p.temperature)
    keep = int((w >= p.min_p * w[0]).sum())
    ids, w = ids[:keep], w[:keep]
    if p.top_k:
        ids, w = ids[: p.top_k], w[: p.top_k]
    if p.top_p < 1:
        keep = int(np.searchsorted(np.cumsum(w) / w.sum(), p.top_p)) + 1
        ids, w = ids[:keep], w[:keep]
    return ids, w / w.sum()


def assert_matches_oracle(logits: np.ndarray, r: Row, got: int) -> None:
    z = oracle_logits(logits, r)
    if r.params.greedy:
        assert z[got] >= z.max() - 1e-4
        return
    ids, probabilities = oracle_survivors(z, r.params)
    # The sampler rounds processed logits to float32, so a neighbour is also right when u is exactly at the border.
    assert got in ids or min(abs(z[got] - z[t]) for t in ids) < 1e-4
    if got in ids:
        place = ids.index(got)
        u = float(uniform(r.seed, r.choice, r.num_outputs))
        below = probabilities[:place].sum()
        assert below - 1e-4 <= u <= below + probabilities[place] + 1e-4


tokens_st = st.integers(0, V - 1)
params_st = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.01, 0.3, 0.7, 1.0, 1.7, 50.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 40, V, 1000]),
        "top_p": st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.1, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.01, 0.2, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 0.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.25, 2.0]),
        "logit_bias": st.dictionaries(tokens_st, st.sampled_from([-100.0, -1.5, 3.25, 100.0]), max_size=4),
        "allowed_token_ids": st.lists(tokens_st, min_size=5, max_size=9).map(tuple),
        "bad_words_token_ids": st.lists(st.lists(tokens_st, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(tokens_st, max_size=2).map(tuple),
        "logprobs": st.sampled_from([None, 0, 3]),
    },
)
outputs_st = st.lists(tokens_st, max_size=8)


def random_logits(seed: int, size: int = V, step: float = 0.125) -> np.ndarray:
    """Logits on a coarse grid, so that ties are common and float32 and float64 agree on their order."""
    values = np.random.default_rng(seed).normal(0, 3, size)
    return (np.round(values / step) * step).astype(np.float32)


@settings(max_examples=300, deadline=None)
@given(params_st, outputs_st, st.integers(0, 10**6), st.integers(0, 2**64 - 1))
def test_agrees_with_the_oracle(params: dict[str, Any], outputs: list[int], logits_seed: int, seed: int) -> None:
    logits = random_logits(logits_seed)
    r = row(outputs, seed=seed, **params)
    result = one(logits, r)
    if isinstance(result, Fault):
        assert result.code == ErrorCode.INVALID_ARGUMENT
        assert oracle_logits(logits, r).max() == -np.inf
    else:
        assert_matches_oracle(logits, r, result.token_id)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(params_st, outputs_st, st.integers(0, 999)), min_size=2, max_size=16), st.integers(0, 10**6))
def test_a_row_alone_and_in_a_batch_are_the_same(rows: list[Any], seed: int) -> None:
    logits = np.stack([random_logits(seed + i, 300, step=2**-10) for i in range(len(rows))])
    made = [row(outputs, seed=row_seed, **params) for params, outputs, row_seed in rows]
    together = sample(torch.from_numpy(logits.copy()), made)
    assert together == [one(values, r) for values, r in zip(logits, made, strict=True)]


@settings(max_examples=100, deadline=None)
@given(params_st, st.integers(0, 10**6), st.floats(0, 1, exclude_max=True), st.sampled_from([0.125, 2.0, 100.0]))
def test_how_far_is_looked_never_shows(params: dict[str, Any], seed: int, draw: float, step: float) -> None:
    logits = random_logits(seed, 400, step)
    p = SamplingParams(**{**params, "temperature": params.get("temperature") or 1.0})
    top = float(logits.max())
    with pytest.MonkeyPatch.context() as patch:
        results = set()
        for looks in (LOOKS, (0.0, 0.5, 1.0, 2.0, 4.0, math.inf), (2.0, math.inf), (math.inf,)):
            patch.setattr("pagoda_worker.sampling.sampler.LOOKS", looks)
            results.add(draw_token(logits, top, p, draw))
    assert len(results) == 1


# --- the order ----------------------------------------------------------------------------------------------------


logits_st = st.lists(st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 1e-30, 2.0, 3.4e38]), min_size=1, max_size=40)


@given(logits_st, st.integers(1, 50))
def test_order_is_descending_logit_then_lowest_id(values: list[float], count: int) -> None:
    logits = np.array(values, np.float32)
    expected = sorted(range(len(values)), key=lambda t: (-logits[t], t))
    assert order.sort(logits, np.arange(len(values))).tolist() == expected
    assert order.first(logits, count).tolist() == expected[:count]
    assert [order.rank(logits, t) for t in expected] == list(range(1, len(values) + 1))
    threshold = float(logits[expected[len(values) // 2]])
    assert order.at_least(logits, threshold).tolist() == [t for t in expected if logits[t] >= threshold]


@pytest.mark.parametrize("size", [1023, 2048, 2049, 30011])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "ascending", "descending", "last", "holes"])
def test_the_first_of_a_large_vocabulary_are_those_of_its_order(kind: str, size: int) -> None:
    logits = np.random.default_rng(size).normal(0, 5, size).astype(np.float32)
    logits = {
        "normal": logits, "ties": np.round(logits), "equal": np.full_like(logits, 2.0), "ascending": np.sort(logits),
        "descending": np.sort(logits)[::-1].copy(), "last": np.where(np.arange(size) < size - 9, logits - 99, logits),
        "holes": np.where(np.arange(size) % 997, np.float32(-np.inf), logits),
    }[kind]  # fmt: skip
    expected = order.sort(logits, np.arange(size))
    for count in (1, 2, 20, 300, size // 2, size - 1, size):
        assert order.first(logits, count).tolist() == expected[:count].tolist()


def test_weights_do_not_depend_on_their_place_in_memory() -> None:
    logits = np.random.default_rng(0).normal(0, 5, 5000).astype(np.float32)
    whole = order.weights(logits, 12.0, 0.7)
    for start, end in ((0, 1), (1, 8), (3, 20), (17, 4999), (4093, 5000)):
        assert (order.weights(logits[start:end].copy(), 12.0, 0.7) == whole[start:end]).all()
    for shift in range(1, 9):
        moved = np.empty(5008, np.float32)[shift : shift + 5000]
        moved[:] = logits
        assert order.mass(moved, 12.0) == order.mass(logits, 12.0)


# --- rules, one by one ------------------------------------------------------------------------------------------------


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert token([0, 5, 5, 1], row(temperature=0.0)) == 1


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    drawn = {token(np.zeros(V), row(seed=seed, top_k=3)) for seed in range(60)}
    assert drawn == {0, 1, 2}


def test_top_p_is_taken_of_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    # Of the first two tokens, token 0 alone has 4/7; of all four, 0.5 needs two.
    assert {token(logits, row(seed=s, top_k=2, top_p=0.5)) for s in range(40)} == {0}
    assert {token(logits, row(seed=s, top_p=0.5)) for s in range(40)} == {0, 1}


def test_min_p_is_relative_to_the_best() -> None:
    assert {token(np.log([0.5, 0.26, 0.2, 0.04]), row(seed=s, min_p=0.5)) for s in range(40)} == {0, 1}


def test_top_p_is_a_share_of_what_min_p_leaves() -> None:
    """min_p keeps 0.4 and 0.3, of which the first is 57 %; relative to all tokens it would be 40 %."""
    logits = np.log([0.4, 0.3, 0.1, 0.1, 0.1])
    assert {token(logits, row(seed=s, min_p=0.5, top_p=0.5)) for s in range(40)} == {0}
    assert {token(logits, row(seed=s, top_p=0.5)) for s in range(40)} == {0, 1}


def test_min_tokens_masks_eos_and_stop_tokens_until_reached() -> None:
    logits = [1.0, 9.0, 8.0, 2.0]
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (2,)}
    assert token(logits, row([0], eos=(1,), **params)) == 3
    assert token(logits, row([0, 0], eos=(1,), **params)) == 1


def test_a_bad_word_is_matched_against_the_output_only() -> None:
    logits = [0.0, 1.0, 2.0, 9.0]
    params: dict[str, Any] = {"temperature": 0.0, "bad_words_token_ids": ((1, 3),)}
    assert token(logits, row([1], prompt=[2], **params)) == 2
    assert token(logits, row([], prompt=[1], **params)) == 3
    assert token(logits, row([1, 0], prompt=[1], **params)) == 3


def test_penalties_tell_prompt_from_output() -> None:
    logits = [3.0, 2.9, 2.8]
    assert token(logits, row([], prompt=[0], temperature=0.0, presence_penalty=1.0)) == 0
    assert token(logits, row([0], prompt=[2], temperature=0.0, presence_penalty=1.0)) == 1
    assert token(logits, row([], prompt=[0], temperature=0.0, repetition_penalty=1.5)) == 1
    assert token([-1.0, -1.1], row([], prompt=[0], temperature=0.0, repetition_penalty=1.5)) == 1


def test_counts_grow_with_the_row_as_if_built_anew() -> None:
    grown = row([], prompt=[7, 7, 9], frequency_penalty=0.5)
    outputs = np.random.default_rng(1).integers(0, 300, 500).tolist()
    for t in outputs:
        grown.append(t)
    fresh = row(outputs, prompt=[7, 7, 9], frequency_penalty=0.5)
    for r in (grown, fresh):
        assert r.processing is not None
        assert r.processing.counts is not None
        counts = dict(zip(r.processing.counts.ids.tolist(), r.processing.counts.output_counts.tolist(), strict=True))
        assert {t: n for t, n in counts.items() if n} == Counter(outputs)
        assert set(counts) == {7, 9, *outputs}


def test_rows_that_ask_for_nothing_have_no_processing() -> None:
    assert row(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, logprobs=5, stop_token_ids=(1,)).processing is None
    waiting = row([1], min_tokens=2, stop_token_ids=(1,)).processing
    assert waiting is not None
    assert waiting.applies(1)
    assert not waiting.applies(2)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2, "logprobs": 1}, {"frequency_penalty": 1.0}])
def test_logits_that_are_no_numbers_end_their_row_alone(bad: float, params: dict[str, Any]) -> None:
    logits = np.stack([random_logits(s) for s in range(3)])
    rows = [row(seed=s, **params) for s in range(3)]
    expected = [one(values, r) for values, r in zip(logits, rows, strict=True)]
    logits[1, 17] = bad
    results = sample(torch.from_numpy(logits), rows)
    assert isinstance(results[1], Fault)
    assert results[1].code == ErrorCode.NUMERICAL_ERROR
    assert [results[0], results[2]] == [expected[0], expected[2]]


def test_a_row_of_nothing_but_minus_infinity_is_a_fault() -> None:
    result = one(np.full(V, -np.inf), row())
    assert isinstance(result, Fault)
    assert result.code == ErrorCode.NUMERICAL_ERROR


def test_no_token_left_is_the_request_s_fault() -> None:
    result = one(np.zeros(V), row(allowed_token_ids=(4,), min_tokens=1, stop_token_ids=(4,)))
    assert isinstance(result, Fault)
    assert result.code == ErrorCode.INVALID_ARGUMENT


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(V, -np.inf)
    logits[[5, 9]] = 0.0
    for params in ({}, {"top_k": 10}, {"top_p": 0.999}, {"temperature": 100.0}, {"min_p": 0.0, "top_k": 60}):
        assert {token(logits, row(seed=s, **params)) for s in range(40)} == {5, 9}


@pytest.mark.parametrize("params", [{}, {"top_k": 7}, {"top_p": 0.99}, {"min_p": 0.001}, {"temperature": 0.01}])
def test_the_highest_draw_is_the_last_survivor_of_any_weight(params: dict[str, Any]) -> None:
    p = SamplingParams(**params)
    for seed in range(200):
        logits = random_logits(seed)
        logits[::3] = -np.inf
        ids, probabilities = oracle_survivors(logits.astype(np.float64), p)
        heavy = [t for t, probability in zip(ids, probabilities, strict=True) if probability > 1e-15]
        got = draw_token(logits, float(logits.max()), p, float(np.nextafter(1.0, 0.0)))
        assert logits[got] <= logits[heavy[-1]]
        assert logits[got] > -np.inf


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    by_rank = sorted(range(V), key=lambda t: (-logits[t], t))
    r = row([4], temperature=0.4, logprobs=4, repetition_penalty=1.9, logit_bias={11: 100.0})
    result = one(logits, r)
    assert isinstance(result, Sample)
    assert result.token_id == 11
    assert result.logprobs is not None
    assert result.logprobs.rank == by_rank.index(11) + 1
    assert result.logprobs.top_ids == by_rank[:4]
    assert result.logprobs.logprob == pytest.approx(expected[11], abs=1e-6)
    assert result.logprobs.top_logprobs == pytest.approx(expected[by_rank[:4]].tolist(), abs=1e-6)
    assert result.logprobs.logprob == float(np.float32(result.logprobs.logprob))


def test_logprobs_zero_reports_the_token_alone() -> None:
    result = one(random_logits(3), row(logprobs=0))
    assert isinstance(result, Sample)
    assert result.logprobs is not None
    assert result.logprobs.top_ids == result.logprobs.top_logprobs == []


# --- distribution -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.6}, {"temperature": 1.8}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1, "top_p": 0.95}],
)
def test_sampling_follows_the_distribution(params: dict[str, Any]) -> None:
    logits = random_logits(8, 16) / 2
    p = SamplingParams(**params)
    ids, probabilities = oracle_survivors(logits.astype(np.float64), p)
    draws = 4000
    rows = [row([0] * (i % 7), seed=i * 7919, **params) for i in range(draws)]
    results = sample(torch.from_numpy(np.tile(logits, (draws, 1))), rows)
    counts = Counter(result.token_id for result in results if isinstance(result, Sample))
    assert set(counts) <= set(ids)
    expected = probabilities * draws
    large = expected >= 5
    observed = np.array([counts[t] for t in ids])
    statistic = float(((observed - expected) ** 2 / expected)[large].sum())
    freedom = max(1, int(large.sum()) - 1)
    assert statistic < freedom + 3.1 * math.sqrt(2 * freedom) + 4.8  # above the 0.999 quantile of chi-square
