"""Finds stop strings, holding back only the end of the text that could be the start of one.

The number of characters held back is the depth of the state of an Aho-Corasick automaton (Aho and Corasick 1975) over
the stop strings, so it does not depend on how the text was split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(slots=True)
class _Node:
    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None
    word: str | None = None  # the longest stop string that ends here


@lru_cache(maxsize=8)
def _automaton(words: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for word in words:
        node = root
        for char in word:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.word = word
    level = [root]
    while level:
        level = [child for node in level for child in _link(node, root)]
    return root


def _link(node: _Node, root: _Node) -> list[_Node]:
    """Set the failure links of the children of `node`; all shallower nodes must have theirs. Returns the children."""
    for char, child in node.next.items():
        fail = node.fail
        while fail is not None and char not in fail.next:
            fail = fail.fail
        child.fail = fail.next[char] if fail is not None else root
        child.word = child.word or child.fail.word
    return list(node.next.values())


class StopMatcher:
    """Finds the stop string that ends first in the text; the longest if several end there.

    `stopped_by` is that string once found; from then on, nothing more is returned.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self._root = self._node = _automaton(tuple(stop))
        self._include = include_stop
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Take more text and return text that is certain to be shown. Unless `armed`, stop strings pass as text."""
        if not self._root.next:
            return text
        if self.stopped_by is not None:
            return ""
        for i, char in enumerate(text):
            self._step(char)
            if armed and self._node.word is not None:
                return self._stop(text[: i + 1], self._node.word)
        return self._hold(text)

    def flush(self) -> str:
        """End of the text: return what was held back, which is ordinary text after all."""
        held, self._held = self._held, ""
        return "" if self.stopped_by is not None else held

    def _step(self, char: str) -> None:
        node: _Node | None = self._node
        while node is not None and char not in node.next:
            node = node.fail
        self._node = node.next[char] if node is not None else self._root

    def _hold(self, text: str) -> str:
        pending = self._held + text
        shown = len(pending) - self._node.depth
        self._held = pending[shown:]
        return pending[:shown]

    def _stop(self, text: str, word: str) -> str:
        self.stopped_by = word
        pending, self._held = self._held + text, ""
        return pending if self._include else pending[: len(pending) - len(word)]
