"""A mask allows exactly its tokens, whether it lists the allowed ones or the others."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_worker.grammars.masks import has, mask_of, put


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 90), st.integers(0, 3), st.data())
def test_a_mask_allows_what_its_bits_say(vocab_size: int, spare_bytes: int, data: st.DataObject) -> None:
    allowed = data.draw(st.sets(st.integers(0, vocab_size - 1)) | st.just(set(range(vocab_size))))
    behind = data.draw(st.sets(st.integers(vocab_size, 8 * (-(-vocab_size // 8) + spare_bytes))))
    bits = np.zeros(-(-vocab_size // 8) + spare_bytes, np.uint8)
    for token in allowed | {one for one in behind if one < 8 * len(bits)}:
        bits[token // 8] |= 1 << token % 8
    mask = mask_of(bits, vocab_size)
    assert {token for token in range(vocab_size) if mask.allows(token)} == allowed
    assert (np.diff(mask.ids) > 0).all()
    assert all(0 <= one < vocab_size for one in mask.ids.tolist())
    if len(allowed) * 32 < vocab_size:
        assert mask.keeps or vocab_size < 16


def test_bits_behind_the_vocabulary_do_not_turn_a_mask_round() -> None:
    assert mask_of(np.array([1, 0, 0, 0, 128, 1, 1], np.uint8), 39) == (np.array([0]), True)


@given(st.lists(st.integers(0, 47)), st.lists(st.integers(0, 47)))
def test_bits_are_set_and_cleared_one_by_one(given_ids: list[int], taken: list[int]) -> None:
    bits = np.zeros(6, np.uint8)
    put(bits, np.array(given_ids, np.int64), to=True)
    put(bits, np.array(taken, np.int64), to=False)
    found = has(bits, np.arange(48))
    assert set(np.flatnonzero(found).tolist()) == set(given_ids) - set(taken)
