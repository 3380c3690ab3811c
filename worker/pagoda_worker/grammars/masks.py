"""Which tokens may come next, as the shorter of two lists: those that may, or those that may not.

llguidance returns bits. They stay bits until the end, because a list of a whole vocabulary costs more than a bit mask.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Bits = NDArray[np.uint8]


class Mask(NamedTuple):
    """If `keeps`, only the tokens in `ids` (ascending) may come next; otherwise all others may."""

    ids: Ids
    keeps: bool

    def allows(self, token: int) -> bool:
        place = int(np.searchsorted(self.ids, token))
        return (place < len(self.ids) and int(self.ids[place]) == token) == self.keeps


def mask_of(bits: Bits, vocab_size: int) -> Mask:
    """The mask of one bit per token, lowest bit of a byte first; bits beyond the vocabulary are ignored."""
    bits = bits[: -(-vocab_size // 8)]
    places = np.flatnonzero(bits)
    keeps = 2 * len(places) <= len(bits)
    if not keeps:
        bits = ~bits
        places = np.flatnonzero(bits)
    rows, columns = np.nonzero(np.unpackbits(bits[places, None], axis=1, bitorder="little"))
    ids = 8 * places[rows] + columns
    return Mask(ids[: np.searchsorted(ids, vocab_size)], keeps)


def has(bits: Bits, ids: Ids) -> NDArray[np.bool_]:
    """Whether the bits of these tokens are set."""
    found: NDArray[np.bool_] = (bits[ids >> 3] >> (ids & 7).astype(np.uint8) & 1).astype(np.bool_)
    return found


def put(bits: Bits, ids: Ids, *, to: bool) -> None:
    """Set the bits of these tokens, or clear them."""
    places, single = ids >> 3, np.left_shift(1, ids & 7).astype(np.uint8)
    if to:
        np.bitwise_or.at(bits, places, single)
    else:
        np.bitwise_and.at(bits, places, ~single)
