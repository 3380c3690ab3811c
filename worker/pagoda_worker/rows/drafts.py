"""How many tokens to guess for a row: more while guesses hold, fewer when they fail, none for a while when they always
do. It depends on the row's own history alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagoda_worker.rows.ngram import NgramIndex
from pagoda_worker.rows.texts import Text

FIRST_LENGTH = 2
MAX_PAUSE = 64  # tokens without drafts; one failed draft in so many costs less than a hundredth of a step


class DraftLength:
    """Doubles when all drafts held, falls to what held otherwise; each failure in a row doubles the pause after it."""

    __slots__ = ("_failures", "_length", "_most", "_pause")

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = min(FIRST_LENGTH, most)
        self._failures = 0
        self._pause = 0

    @property
    def now(self) -> int:
        """Drafts to try with the next token; 0 in a pause."""
        return 0 if self._pause else self._length

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """A token has been sampled, with so many drafts tried behind it, of which the first `num_accepted` held."""
        if not num_drafted:
            self._pause = max(0, self._pause - 1)
        elif num_accepted == num_drafted:
            self._length, self._failures = min(2 * self._length, self._most), 0
        elif num_accepted:
            self._length, self._failures = num_accepted, 0
        else:
            self._length = max(1, self._length // 2)
            self._failures += 1
            self._pause = min(2**self._failures, MAX_PAUSE)


@dataclass(slots=True)
class RowDrafts:
    """What a drafter keeps about a row.

    Attributes:
        length: How many drafts are worth trying.
        index: Of the row's tokens, for prompt lookup.
        distance: How far back the text last read as it does now; 0: nowhere.
        guess: What is likely to follow, with suffixes.
        text: The row's outputs as others of its domain may read them, with suffixes.
        num_computed: Leading tokens whose K and V are in the draft model's cache.
    """

    length: DraftLength
    index: NgramIndex | None = None
    distance: int = 0
    guess: list[int] = field(default_factory=list)
    text: Text = field(default_factory=lambda: Text(0))
    num_computed: int = 0
