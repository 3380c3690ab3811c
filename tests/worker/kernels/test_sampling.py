"""Sampling in the kernel library against the numpy sampler, and bit for bit against itself.

Its weights are rounded differently from the oracle's float64. It may therefore choose either of two tokens when the
draw lies within a few millionths of the border between them, and either side of a filter's cutoff likewise.
`acceptable` lists the allowed tokens. Where weights are exact by construction, the comparison is exact too.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.kernels.levels import levels
from tests.worker.sampling.test_sampler import oracle_survivors, params_st, row, row_of

from pagoda_proto.params import SamplingParams
from pagoda_worker.kernels.cpu import sampling
from pagoda_worker.kernels.cpu.library import Library
from pagoda_worker.rows import order
from pagoda_worker.rows.penalties import Processing
from pagoda_worker.rows.rows import Row
from pagoda_worker.sampling import logprobs, sampler
from pagoda_worker.sampling.philox import uniform
from pagoda_worker.sampling.sampler import NOT_A_NUMBER, NOTHING_ALLOWED, Fault, Sample

pytestmark = pytest.mark.skipif(not levels(), reason="no C++ compiler on this machine; the torch back end serves")

# Relative error of a cumulative weight: three float32 roundings of an exponent of up to about 12 (beyond that, mass is
# negligible), a few of exp, and half a unit of 2^-44 for each of 200 000 tokens.
ERROR = 4e-6
SIZES = [1, 2, 15, 16, 17, 1000, 1023, 1024, 1025, 5000, 20_479, 151_936, 200_000]
V = 64  # vocabulary size for the parameters of `params_st`


Libraries = dict[str, Library]


@pytest.fixture(scope="module")
def libraries() -> Iterator[dict[int, Libraries]]:
    """Number of threads -> level -> library: each example is drawn once and tried at every level."""
    opened = {threads: {level: Library([-1] * threads, level) for level in levels()} for threads in (1, 2, 3)}
    yield opened
    for of_threads in opened.values():
        for library in of_threads.values():
            library.close()


def run(library: Library, logits: np.ndarray, rows: Sequence[Any]) -> list[Sample | Fault]:
    return sampling.Sampler(library).sample(torch.from_numpy(logits.copy()), rows)


def tokens(samples: list[Sample | Fault]) -> list[int]:
    assert all(isinstance(one, Sample) for one in samples), samples
    return [one.token_id for one in samples if isinstance(one, Sample)]


# --- the oracle -------------------------------------------------------------------------------------------------------


def processed(logits: np.ndarray, r: Row) -> np.ndarray:
    logits = logits.copy()
    if r.processing is not None and r.processing.applies(r.num_outputs):
        r.processing.apply(logits, r.outputs)
    return logits


def acceptable(logits: np.ndarray, r: Row) -> set[int]:
    """Every token that a sampler whose weights are within ERROR may choose. Usually one."""
    p, z = r.params, processed(logits, r)
    ids = order.sort(z, np.arange(len(z)))
    if p.greedy:
        return {int(ids[0])}
    ids = ids[: p.top_k] if p.top_k else ids
    weights = order.weights(z[ids], float(z.max()), p.temperature)
    cumulative = np.cumsum(weights)
    low = high = cumulative[-1]
    if p.min_p > 0.0:
        kept = [max(1, int(np.count_nonzero(weights >= p.min_p * (1 + side)))) for side in (10 * ERROR, -10 * ERROR)]
        low, high = cumulative[kept[0] - 1], cumulative[kept[1] - 1]
    if p.top_p < 1.0:
        sides = ((low, -2 * ERROR), (high, 2 * ERROR))
        cuts = [np.searchsorted(cumulative, p.top_p * mass * (1 + side)) for mass, side in sides]
        low, high = (cumulative[min(cut, len(ids) - 1)] for cut in cuts)
    u = float(uniform(r.seed, r.choice, r.num_outputs))
    first = np.searchsorted(cumulative, u * low * (1 - 2 * ERROR))
    last = np.searchsorted(cumulative, u * high * (1 + 2 * ERROR), side="right")
    chosen = ids[first : last + 1]
    return set(chosen[z[chosen] > -np.inf].tolist())


def some_logits(kind: str, size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 3, size)
    if kind == "ties":
        x = np.round(x)
    elif kind == "holes":
        x[rng.random(size) < 0.7] = -np.inf
        x[rng.integers(size)] = 0.5
    elif kind == "huge":
        x = x * 1e37
    elif kind == "flat":
        x = x * 1e-4
    elif kind == "equal":
        x = np.full(size, -3.25)
    elif kind == "peaked":
        x[rng.integers(size)] += 40
    elif kind == "ascending":
        x.sort()
    return x.astype(np.float32)


KINDS = ["normal", "ties", "holes", "huge", "flat", "equal", "peaked", "ascending"]
cases_st = st.lists(
    st.tuples(params_st, st.lists(st.integers(0, V - 1), max_size=8), st.sampled_from(KINDS), st.integers(0, 10**9)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(params_st, st.integers(0, 10**9)), min_size=1, max_size=4), st.data())
def test_the_same_rows_are_sampled_as_if_they_were_others(
    libraries: dict[int, Libraries], cases: list[Any], data: st.DataObject
) -> None:
    """In the same logits, as a recorded step has them, or in others; with other rows in between."""
    kept, several = sampling.Sampler(libraries[1][levels()[-1]]), [row([], seed=seed, **p) for p, seed in cases]
    buffer = torch.zeros(len(several), V)
    for _ in range(6):
        rows = data.draw(st.sampled_from([several, [*several], several[::-1], [*several[:-1], row([3])]]))
        logits = some_logits(data.draw(st.sampled_from(KINDS)), buffer.numel(), data.draw(st.integers(0, 99)))
        logits = logits.reshape(buffer.shape)
        expected = run(kept._library, logits, rows)
        there = buffer if data.draw(st.booleans()) else torch.empty_like(buffer)
        assert kept.sample(there.copy_(torch.from_numpy(logits)), rows) == expected
        for one, sample in zip(rows, expected, strict=True):
            one.append(0 if isinstance(sample, Fault) else sample.token_id)


def test_rows_that_have_ended_are_not_kept(libraries: dict[int, Libraries]) -> None:
    kept, rows = sampling.Sampler(libraries[1][levels()[-1]]), [row(temperature=0)]
    kept.sample(torch.zeros(1, V), rows)
    ended = weakref.ref(rows.pop())
    gc.collect()
    assert ended() is None


def test_columns_of_wider_logits_are_sampled_each_time(libraries: dict[int, Libraries]) -> None:
    kept, rows, wide = (
        sampling.Sampler(libraries[1][levels()[-1]]),
        [row(temperature=0), row(temperature=0)],
        torch.zeros(2, 2 * V),
    )
    narrow = wide[:, :V]
    for token in (3, 9):
        wide[:, token] = float(token)
        assert tokens(kept.sample(narrow, rows)) == [token, token]


@settings(max_examples=120, deadline=None)
@given(cases_st, st.sampled_from([V, V + 1, 200, 1023, 1025, 3000]))
def test_agrees_with_the_oracle_whatever_is_asked(libraries: dict[int, Libraries], cases: list[Any], size: int) -> None:
    rows = [row(outputs, seed=seed, **params) for params, outputs, _, seed in cases]
    logits = np.stack([some_logits(kind, size, seed) for _, _, kind, seed in cases])
    expected = sampler.sample(torch.from_numpy(logits.copy()), rows)
    for library in libraries[2].values():
        assert_agrees(logits, rows, run(library, logits, rows), expected)


def assert_agrees(
    logits: np.ndarray, rows: list[Row], samples: list[Sample | Fault], expected: list[Sample | Fault]
) -> None:
    for r, values, got, oracle in zip(rows, logits, samples, expected, strict=True):
        if isinstance(oracle, Fault):
            assert got == oracle
            continue
        assert isinstance(got, Sample)
        assert got.token_id == oracle.token_id or got.token_id in acceptable(values, r)
        if oracle.logprobs is None:
            assert got.logprobs is None
        elif got.token_id == oracle.token_id:
            assert_same_report(got.logprobs, oracle.logprobs)


def assert_same_report(got: Any, expected: Any) -> None:
    assert (got.rank, got.top_ids) == (expected.rank, expected.top_ids)
    np.testing.assert_allclose(got.logprob, expected.logprob, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs, rtol=1e-6, atol=1e-5)


MANNERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "logprobs": 20},
    {"temperature": 0.6},
    {"temperature": 2.0},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.5},
    {"top_k": 50},
    {"top_k": 3000, "top_p": 0.95},
    {"min_p": 0.02},
    {"min_p": 1e-7, "top_p": 0.98},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "logprobs": 5},
]


@cache
def of_any_size(size: int) -> tuple[list[Row], np.ndarray, list[set[int]]]:
    """Rows with all kinds of parameters, their logits, and their acceptable tokens: computed once for all levels."""
    made = [(kind, manner) for kind in ("normal", "peaked", "ties") for manner in MANNERS]
    rows = [row([], prompt=[0], seed=size + i, **manner) for i, (_, manner) in enumerate(made)]
    logits = np.stack([some_logits(kind, size, size + i) for i, (kind, _) in enumerate(made)])
    return rows, logits, [acceptable(values, r) for values, r in zip(logits, rows, strict=True)]


@pytest.mark.parametrize("size", SIZES)
def test_agrees_with_the_oracle_on_vocabularies_of_any_size(library: Library, size: int) -> None:
    rows, logits, expected = of_any_size(size)
    got = tokens(run(library, logits, rows))
    for one, chosen in zip(got, expected, strict=True):
        assert one in chosen


@cache
def many_draws(manner: int) -> tuple[np.ndarray, list[Row], list[int]]:
    """Logits, rows, and the oracle's tokens: computed once for all levels."""
    logits = np.tile(some_logits("normal", 500, 3), (2000, 1))
    params = SamplingParams(**MANNERS[manner])
    rows = [row_of(params, [], prompt=[0], seed=seed) for seed in range(len(logits))]
    return logits, rows, tokens(sampler.sample(torch.from_numpy(logits.copy()), rows))


@pytest.mark.parametrize("manner", range(len(MANNERS)), ids=str)
def test_differs_from_the_oracle_only_at_borders(library: Library, manner: int) -> None:
    """2000 draws would reveal an error in one of a thousand; borders affect a few in a million."""
    logits, rows, expected = many_draws(manner)
    assert tokens(run(library, logits, rows)) == expected


# --- exact where weights are ------------------------------------------------------------------------------------------


def exact_draws(size: int, rows: Sequence[Row]) -> list[int]:
    """floor(u * size) in integers."""
    draws = uniform(
        *(np.array([getattr(r, name) for r in rows], np.uint64) for name in ("seed", "choice", "num_outputs"))
    )
    return [int(u * 2**53) * size >> 53 for u in draws.tolist()]


@pytest.mark.parametrize(
    ("params", "survivors"),
    [
        ({}, 100_003),
        ({"temperature": 0.3}, 100_003),
        ({"top_k": 77}, 77),
        ({"top_k": 77_777}, 77_777),
        ({"top_p": 0.5}, 50_002),  # the first half, and the token that completes it
        ({"top_p": 1e-9}, 1),
        ({"top_k": 1000, "top_p": 0.25}, 250),
        ({"min_p": 1.0}, 100_003),
    ],
)
def test_equal_tokens_are_drawn_exactly(library: Library, params: dict[str, Any], survivors: int) -> None:
    rows = [row([0] * (i % 5), prompt=[0], seed=i * 2**40 + i, **params) for i in range(12)]
    for r, choice in zip(rows, range(12), strict=True):
        r.choice = choice
    expected = exact_draws(survivors, rows)
    assert tokens(run(library, np.full((12, 100_003), 1.5, np.float32), rows)) == expected


def test_masked_tokens_leave_the_others_exact(library: Library) -> None:
    logits = np.full((50, 4099), -np.inf, np.float32)
    open_tokens = np.arange(3, 4099, 7)
    logits[:, open_tokens] = 2.0
    for params in ({}, {"top_p": 0.99999999}, {"top_k": 4000}, {"temperature": 100.0}):
        rows = [row([], prompt=[0], seed=i, **params) for i in range(50)]
        assert tokens(run(library, logits, rows)) == open_tokens[exact_draws(len(open_tokens), rows)].tolist()


def test_the_two_zeros_are_one_logit(library: Library) -> None:
    logits = np.zeros((40, 1500), np.float32)
    logits[:, ::3] = -0.0
    for params in ({}, {"top_k": 700}, {"top_p": 0.5}):
        rows = [row([], prompt=[0], seed=i, **params) for i in range(40)]
        size = params.get("top_k", 1500) if "top_p" not in params else 750
        assert tokens(run(library, logits, rows)) == exact_draws(size, rows)
    greedy = row(temperature=0.0, logprobs=5)
    [got] = run(library, logits[:1], [greedy])
    assert isinstance(got, Sample)
    assert got.token_id == 0
    assert got.logprobs is not None
    assert (got.logprobs.rank, got.logprobs.top_ids) == (1, [0, 1, 2, 3, 4])


DISTRIBUTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 0.6}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1, "top_p": 0.95},
]  # fmt: skip


@cache
def rows_to_count(manner: int) -> list[Row]:
    params = SamplingParams(**DISTRIBUTIONS[manner])
    return [row_of(params, [0] * (i % 7), prompt=[0], seed=i * 7919) for i in range(4000)]


@pytest.mark.parametrize("manner", range(len(DISTRIBUTIONS)), ids=str)
def test_sampling_follows_the_distribution(library: Library, manner: int) -> None:
    logits, rows = some_logits("normal", 16, 8) / 2, rows_to_count(manner)
    draws = len(rows)
    ids, probabilities = oracle_survivors(logits.astype(np.float64), SamplingParams(**DISTRIBUTIONS[manner]))
    counts = Counter(tokens(run(library, np.tile(logits, (draws, 1)), rows)))
    assert set(counts) <= set(ids)
    expected, observed = probabilities * draws, np.array([counts[t] for t in ids])
    large = expected >= 5
    statistic = float(((observed - expected) ** 2 / expected)[large].sum())
    freedom = max(1, int(large.sum()) - 1)
    assert statistic < freedom + 3.1 * math.sqrt(2 * freedom) + 4.8  # above the 0.999 quantile of chi-square


# --- bits -------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(cases_st, st.sampled_from([V, 1025, 5000]))
def test_a_row_alone_in_company_and_on_any_threads_is_the_same(
    libraries: dict[int, Libraries], cases: list[Any], size: int
) -> None:
    rows = [row(outputs, seed=seed, **params) for params, outputs, _, seed in cases]
    logits = np.stack([some_logits(kind, size, seed) for _, _, kind, seed in cases])
    for level, library in libraries[2].items():
        together = run(library, logits, rows)
        assert together == [run(library, values[None], [r])[0] for values, r in zip(logits, rows, strict=True)]
        assert together[::-1] == run(library, logits[::-1].copy(), rows[::-1])
        for threads in (1, 3):
            assert run(libraries[threads][level], logits, rows) == together


def test_large_rows_alone_in_company_and_on_any_threads_are_the_same(library: Library) -> None:
    rows = [row([3], prompt=[0], seed=i, logprobs=20, **m) for i, m in enumerate(({}, {"top_p": 0.9}, {"top_k": 900}))]
    logits = np.stack([some_logits("normal", 151_936, seed) for seed in range(3)])
    together = run(library, logits, rows)
    assert together == [run(library, values[None], [r])[0] for values, r in zip(logits, rows, strict=True)]
    alone = Library([-1], library.level)
    assert run(alone, logits, rows) == together
    alone.close()


class Position(NamedTuple):
    """One position of a row with its full state, as verifying several draft tokens at once requires."""

    params: SamplingParams
    seed: int
    choice: int
    outputs: np.ndarray
    processing: Processing | None

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)


def test_positions_of_a_row_at_once_are_the_row_step_by_step(library: Library) -> None:
    params: dict[str, Any] = {"frequency_penalty": 0.7, "top_p": 0.9, "bad_words_token_ids": ((5,),), "logprobs": 1}
    growing = row([], prompt=[1], **params)
    logits = np.stack([some_logits("ties", 300, seed) for seed in range(6)])
    steps = []
    for values in logits:
        steps += run(library, values[None], [growing])
        growing.append(tokens(steps)[-1])
    positions = []
    for count in range(6):
        outputs = growing.outputs[:count]
        known = np.concatenate([[1], outputs])
        positions.append(Position(growing.params, 5, 0, outputs, Processing.of(growing.params, (), known, 1)))
    assert run(library, logits, positions) == steps


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {}, {"top_k": 2, "logprobs": 1}, {"allowed_token_ids": (5,)}, {"presence_penalty": 1.0}],
)
def test_logits_that_are_no_numbers_end_their_row_alone(library: Library, params: dict[str, Any]) -> None:
    logits = np.stack([some_logits("normal", 2050, seed) for seed in range(3)])
    rows = [row(seed=seed, **params) for seed in range(3)]
    expected = run(library, logits, rows)
    for bad, at in product((math.nan, math.inf, -math.nan), (0, 1023, 1024, 2049)):
        broken = logits.copy()
        broken[1, at] = bad
        assert run(library, broken, rows) == [expected[0], NOT_A_NUMBER, expected[2]], (bad, at)


def test_a_row_of_nothing_but_minus_infinity_is_a_fault(library: Library) -> None:
    assert run(library, np.full((1, 40), -np.inf, np.float32), [row()]) == [NOT_A_NUMBER]


def test_no_token_left_is_the_request_s_fault(library: Library) -> None:
    r = row(allowed_token_ids=(4,), min_tokens=1, stop_token_ids=(4,))
    assert run(library, np.zeros((1, 40), np.float32), [r]) == [NOTHING_ALLOWED]


def test_changes_that_overflow_are_a_fault(library: Library) -> None:
    logits = np.zeros((1, V), np.float32)
    logits[0, 3] = 3e38
    assert run(library, logits, [row(prompt=[3], repetition_penalty=0.01)]) == [NOT_A_NUMBER]


# --- log-probabilities ------------------------------------------------------------------------------------------------


@cache
def reported(kind: str, size: int) -> tuple[torch.Tensor, list[int], dict[int, list[Any]]]:
    """Logits, targets, and the oracle's reports by number of top tokens: computed once for all levels."""
    logits = torch.from_numpy(np.stack([some_logits(kind, size, seed) for seed in range(3)]))
    targets = [0, size - 1, int(logits[2].argmax())]
    return logits, targets, {num_top: logprobs.report(logits, targets, num_top) for num_top in (0, 20)}


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "ascending", "holes", "peaked"])
def test_reports_are_the_oracle_s(library: Library, kind: str) -> None:
    for size in SIZES:
        logits, targets, expected = reported(kind, size)
        for num_top, reports in expected.items():
            got = sampling.report(library, logits.clone(), targets, num_top)
            for ours, theirs in zip(got, reports, strict=True):
                assert_same_report(ours, theirs)


def test_reports_end_before_logits_that_are_no_numbers(library: Library) -> None:
    logits = torch.randn(5, 100)
    logits[3, 7] = math.nan
    assert sampling.report(library, logits.clone(), [1] * 5, 2) == sampling.report(library, logits[:3], [1] * 3, 2)


def test_a_row_may_report_on_what_it_has_changed(library: Library) -> None:
    """Ranks and values refer to the unprocessed logits, also for a token that only the processing made likely."""
    logits = some_logits("normal", 3000, 4)
    r = row([4], temperature=0.4, logprobs=4, allowed_token_ids=(9, 2999), logit_bias={2999: 100.0})
    [got] = run(library, logits[None], [r])
    [expected] = logprobs.report(torch.from_numpy(logits[None]), [2999], 4)
    assert isinstance(got, Sample)
    assert got.token_id == 2999
    assert_same_report(got.logprobs, expected)


def test_vocabularies_too_large_for_whole_sums_are_sampled_by_numpy(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MAX_VOCAB", 100)
    monkeypatch.setattr(Library, "sample", None)
    logits, r = torch.randn(1, 100), row(top_p=0.9, logprobs=1)
    assert sampling.Sampler(library).sample(logits.clone(), [r]) == sampler.sample(logits.clone(), [r])
    assert sampling.report(library, logits, [5], 2) == logprobs.report(logits, [5], 2)
