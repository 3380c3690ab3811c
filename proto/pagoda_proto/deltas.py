"""Output that one reader has not taken yet: at most one delta per choice, however long it does not read.

Deltas are ordered by their latest addition. A request's ending comes with its last output, so the delta that carries it
is the last of its request, and a receiver may stop reading the request there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pagoda_proto.pooling.params import FLOAT_BYTES
from pagoda_proto.records import Delta, Result, Stream, Tokens
from pagoda_proto.steps import TopLogprobs

_LATER_WINS = ("finish_reason", "error_code", "usage", "ledger")


class WaitingDeltas:
    """Owns the deltas it is given, and extends them in place. `num_numbers` is their total weight."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], Delta] = {}  # by request and choice
        self.num_numbers = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def has_any_of(self, stream: Stream) -> bool:
        """Whether a delta of this choice waits."""
        return (stream.request_id, stream.choice) in self._waiting

    def add(self, delta: Delta) -> None:
        """Add a delta; those of one choice must come in order. One that does not continue the waiting delta belongs to
        another attempt and replaces it, because the earlier attempt is void."""
        key = (delta.request_id, delta.choice)
        waiting = self._waiting.pop(key, None)
        self.num_numbers += count_numbers(delta)
        if waiting is not None and _follows(delta.result, waiting.result):
            self.num_numbers -= 1  # merged into one
            _extend(waiting, delta)
            delta = waiting
        elif waiting is not None:
            self.num_numbers -= count_numbers(waiting)
        self._waiting[key] = delta

    def take(self, most_numbers: float = math.inf) -> list[Delta]:
        """Remove and return waiting deltas, in order, up to a total weight of `most_numbers`, but at least one."""
        if self.num_numbers <= most_numbers:
            taken = self.all()
            self._waiting.clear()
            self.num_numbers = 0
            return taken
        return list(self._first(most_numbers))

    def _first(self, most_numbers: float) -> Iterator[Delta]:
        room = most_numbers
        for key, delta in list(self._waiting.items()):
            numbers = count_numbers(delta)
            if numbers > room and room < most_numbers:
                return
            room -= numbers
            self.num_numbers -= numbers
            yield self._waiting.pop(key)

    def all(self) -> list[Delta]:
        """What `take` would return, without removing it; not to be changed."""
        return list(self._waiting.values())

    def last(self) -> Delta:
        """The last delta, which may be changed in place. Raises StopIteration if nothing waits."""
        return next(reversed(self._waiting.values()))


def count_numbers(delta: Delta) -> int:
    """The approximate weight of a delta: its token ids, log-probabilities and vector elements."""
    tokens = delta.result
    if not isinstance(tokens, Tokens):
        return 1 + len(tokens.data) // FLOAT_BYTES
    number = 1 + len(tokens.token_ids)
    for entries in (tokens.logprobs, tokens.prompt_logprobs):
        if entries:
            number += sum(2 + 2 * len(entry.top_ids) for entry in entries)
    return number


def _extend(first: Delta, then: Delta) -> None:
    first.attempt = then.attempt
    _extend_tokens(first.tokens, then.tokens)
    for name in _LATER_WINS:
        value = getattr(then, name)
        if value is not None:
            setattr(first, name, value)
    first.error_message = then.error_message or first.error_message


def _follows(tokens: Result, before: Result) -> bool:
    if not (isinstance(tokens, Tokens) and isinstance(before, Tokens)):
        return False  # pooled output comes in one delta
    return before.first_index + len(before.token_ids) == tokens.first_index


def _extend_tokens(first: Tokens, then: Tokens) -> None:
    first.token_ids.extend(then.token_ids)
    first.logprobs = _joined(first.logprobs, then.logprobs)
    first.prompt_logprobs = _joined(first.prompt_logprobs, then.prompt_logprobs)
    first.stop_token_id = first.stop_token_id if then.stop_token_id is None else then.stop_token_id
    first.begun = then.begun or first.begun


def _joined(first: list[TopLogprobs] | None, then: list[TopLogprobs] | None) -> list[TopLogprobs] | None:
    if first is None or then is None:
        return then if first is None else first
    first.extend(then)
    return first
