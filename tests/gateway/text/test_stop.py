"""Stop strings against an oracle that reads one character at a time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_gateway.text.stop import StopMatcher, _automaton

WORDS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=5), max_size=5)
TEXT = st.text(alphabet="ab🙂c", max_size=40)


def oracle(text: str, words: list[str], include: bool) -> tuple[str, str | None]:
    """The shortest prefix that ends with a stop string; of several, the longest stop string."""
    for end in range(len(text) + 1):
        hits = [word for word in words if text[:end].endswith(word)]
        if hits:
            word = max(hits, key=len)
            return text[: end if include else end - len(word)], word
    return text, None


@settings(max_examples=400, deadline=None)
@given(text=TEXT, words=WORDS, include=st.booleans(), cuts=st.lists(st.integers(0, 40), max_size=10))
def test_any_chunking_gives_the_oracles_answer(text: str, words: list[str], include: bool, cuts: list[int]) -> None:
    matcher = StopMatcher(words, include_stop=include)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = "".join(matcher.push(text[a:b]) for a, b in pairwise(edges)) + matcher.flush()
    assert (shown, matcher.stopped_by) == oracle(text, words, include)


@settings(max_examples=200, deadline=None)
@given(text=TEXT, words=WORDS)
def test_only_what_could_become_a_stop_string_is_held_back(text: str, words: list[str]) -> None:
    matcher = StopMatcher(words)
    shown = ""
    for i, char in enumerate(text, 1):
        shown += matcher.push(char)
        if matcher.stopped_by is not None:
            return
        longest = max((n for w in words for n in range(len(w)) if text[:i].endswith(w[:n])), default=0)
        assert shown == text[: i - longest]


def test_a_stop_string_over_many_pieces() -> None:
    matcher = StopMatcher(["<end>"])
    assert [matcher.push(piece) for piece in ("say <", "e", "nd", "> more")] == ["say ", "", "", ""]
    assert matcher.stopped_by == "<end>"
    assert matcher.push("later") == matcher.flush() == ""


def test_held_text_comes_back_when_it_was_no_stop_string() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("a <e") == "a "
    assert matcher.push("x") == "<ex"
    assert matcher.push("<en") == ""
    assert matcher.flush() == "<en"


def test_while_not_armed_stop_strings_are_text_but_may_begin_there() -> None:
    matcher = StopMatcher(["xy"])
    assert matcher.push("xyx", armed=False) == "xy"
    assert matcher.push("y") == ""
    assert matcher.stopped_by == "xy"


def test_many_long_stop_strings_cost_one_step_per_character() -> None:
    words = ["a" * 255 + chr(98 + i) for i in range(16)]
    matcher = StopMatcher(words)
    text = "a" * 100_000
    shown = matcher.push(text)
    assert shown + matcher.flush() == text
    assert len(shown) == len(text) - 255


def test_sec_17_automata_of_past_requests_are_forgotten() -> None:
    for number in range(1000):
        StopMatcher([f"stop {number}"])
    assert _automaton.cache_info().currsize <= 8
