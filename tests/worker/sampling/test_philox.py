from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_worker.sampling.philox import philox4x32, uniform

# Known answers from the Random123 distribution (kat_vectors, philox4x32 10).
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert [int(word) for word in philox4x32(counter, key)] == expected


def test_vectors_agree_with_single_draws() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 12345678901234567890], np.uint64)
    choices = np.array([0, 1, 2**32 - 1, 7], np.uint64)
    positions = np.array([5, 0, 2**32 - 1, 9], np.uint64)
    together = uniform(seeds, choices, positions)
    alone = [float(uniform(*draw)) for draw in zip(seeds, choices, positions, strict=True)]
    assert together.tolist() == alone


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_uniform_uses_53_bits_of_the_first_two_words(seed: int, choice: int, position: int) -> None:
    first, second, _, _ = philox4x32((choice, position, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    value = float(uniform(seed, choice, position))
    assert 0.0 <= value < 1.0
    assert value == ((int(first) << 32 | int(second)) >> 11) / 2**53


def test_draws_of_neighbouring_positions_choices_and_seeds_differ() -> None:
    grid = uniform(np.arange(8)[:, None, None], np.arange(8)[None, :, None], np.arange(64)[None, None, :])
    assert len(np.unique(grid)) == grid.size
    counts, _ = np.histogram(grid, bins=16, range=(0, 1))
    expected = grid.size / 16
    assert ((counts - expected) ** 2 / expected).sum() < 37.7  # chi-square, 15 degrees of freedom, p = 0.001
