"""How many tokens to draft for a row: more while drafts are accepted, fewer when they fail, none for a while when they
keep failing. It depends on the row's own history alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagoda_worker.rows.ngram import NgramIndex
from pagoda_worker.rows.texts import Text

FIRST_LENGTH = 2
MAX_PAUSE = 64  # tokens without drafts; one failed draft in so many costs less than a hundredth of a step


class DraftLength:
    """Doubles if all drafts held, falls to how many did, halves if none did; failures in a row double the pause."""

    __slots__ = ("_failures", "_length", "_most", "_pause")

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = min(FIRST_LENGTH, most)
        self._failures = 0
        self._pause = 0

    @property
    def now(self) -> int:
        """Drafts to try with the next token; 0 during a pause."""
        return 0 if self._pause else self._length

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """A token was sampled, with `num_drafted` drafts tried after it, of which the first `num_accepted` held."""
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
        index: Of the row's tokens.
        guess: The likely continuation.
        text: The row's outputs as other rows of its domain may read them.
        num_computed: Leading tokens whose K and V are in the draft model's cache.
    """

    length: DraftLength
    index: NgramIndex | None = None
    guess: list[int] = field(default_factory=list)
    text: Text = field(default_factory=lambda: Text(0))
    num_computed: int = 0
