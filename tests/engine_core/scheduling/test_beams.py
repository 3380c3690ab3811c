"""Beam selection, compared with a plain implementation that looks at the whole vocabulary."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import mix

from pagoda_engine_core.scheduling.beams import BeamSearch, score
from pagoda_proto.steps import TopLogprobs

VOCAB = 7
Found = list[tuple[tuple[int, ...], float]]


def likelihoods(seed: int, tokens: tuple[int, ...]) -> list[float]:
    """Log-probability of each vocabulary token after `tokens`; ties are frequent."""
    state = seed
    for token in tokens:
        state = mix(state, token)
    return [-(mix(state, token) % 12) / 4 for token in range(VOCAB)]


def named(values: list[float], count: int) -> TopLogprobs:
    order = sorted(range(VOCAB), key=lambda token: -values[token])[:count]
    return TopLogprobs(values[order[0]], 1, order, [values[token] for token in order])


def found_by(search: BeamSearch, seed: int, count: int) -> Found:
    while not search.done:
        known = [search.find(place, named(likelihoods(seed, beam.token_ids), count))
                 for place, beam in enumerate(search.running)]  # fmt: skip
        assert known == [False] * (len(known) - 1) + [True]
        search.advance()
    return [(beam.token_ids, value) for beam, value, _ in search.best]


def plainly(seed: int, width: int, penalty: float, ends: set[int], limit: int) -> Found:
    """transformers' beam search. Of the candidates of all beams, sorted, those among the best `width` that end are
    kept as results, and the best `width` that do not end continue."""
    running: Found = [((), 0.0)]
    ended: Found = []
    for length in range(1, limit + 1):
        ways = [
            ((*tokens, token), total + value)
            for tokens, total in running
            for token, value in sorted(enumerate(likelihoods(seed, tokens)), key=lambda pair: -pair[1])
        ]
        ways.sort(key=lambda way: -way[1])
        last = length == limit
        ended += [(way, score(total, length, penalty)) for way, total in ways[:width] if last or way[-1] in ends]
        ended = sorted(ended, key=lambda one: -one[1])[:width]
        running = [way for way in ways if way[0][-1] not in ends][:width]
        if len(ended) == width and (not running or score(running[0][1], length, penalty) <= ended[-1][1]):
            break
    return ended


SEARCHES = {
    "seed": st.integers(0, 2**32),
    "width": st.integers(1, 4),
    "penalty": st.sampled_from([1.0, 0.0, 2.5, -1.0]),
    "ends": st.sets(st.integers(0, VOCAB - 1), max_size=2),
    "limit": st.integers(1, 6),
}


@settings(max_examples=150)
@given(**SEARCHES)
def test_it_finds_what_a_plain_search_over_everything_finds(
    seed: int, width: int, penalty: float, ends: set[int], limit: int
) -> None:
    search = BeamSearch(width, penalty, frozenset(ends), limit)
    found = found_by(search, seed, width + len(ends))
    assert found == plainly(seed, width, penalty, ends, limit)
    assert len(found) == width
    assert [at_end for *_, at_end in search.best] == [tokens[-1] in ends for tokens, _ in found]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 2))
def test_beams_for_everything_find_the_best_there_is(seed: int, limit: int) -> None:
    width = VOCAB**limit
    found = found_by(BeamSearch(width, 0.0, frozenset(), limit), seed, VOCAB)
    every = {
        tokens: sum(likelihoods(seed, tokens[:place])[token] for place, token in enumerate(tokens))
        for tokens in product(range(VOCAB), repeat=limit)
    }
    assert dict(found) == every
    assert [value for _, value in found] == sorted(every.values(), reverse=True)


@settings(max_examples=30)
@given(**SEARCHES, count=st.integers(0, 3))
def test_what_is_told_of_tokens_adds_up(
    seed: int, width: int, penalty: float, ends: set[int], limit: int, count: int
) -> None:
    search = BeamSearch(width, penalty, frozenset(ends), limit, count)
    found_by(search, seed, width + len(ends))
    for beam, *_ in search.best:
        assert [likelihoods(seed, beam.token_ids[:i])[t] for i, t in enumerate(beam.token_ids)] == [
            one.logprob for one in beam.told
        ]
        assert sum(one.logprob for one in beam.told) == beam.logprob
        assert all(len(one.top_ids) == min(count, width + len(ends)) for one in beam.told)
        assert all(one.top_ids[one.rank - 1] == token for one, token in zip(beam.told, beam.token_ids, strict=True)
                   if one.rank <= count)  # fmt: skip


def test_fewer_ways_than_beams() -> None:
    """A search of width three over a vocabulary of two still fills its results."""
    search = BeamSearch(3, 1.0, frozenset({0}), 2)
    two = TopLogprobs(-1.0, 1, [0, 1], [-1.0, -2.0])
    while not search.done:
        assert [search.find(place, two) for place in range(len(search.running))][-1]
        search.advance()
    assert [beam.token_ids for beam, *_ in search.best] == [(0,), (1, 0), (1, 1)]
