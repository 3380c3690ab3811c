"""bench/embeddings.py: ranks, and the files of pairs that people scored."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import embeddings


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    assert embeddings.ranks([3.0, 1.0, 3.0, 2.0, 3.0]).tolist() == [4.0, 1.0, 4.0, 2.0, 4.0]


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30))
def test_ranks_by_counting(values: list[int]) -> None:
    found = embeddings.ranks([float(value) for value in values]).tolist()
    assert found == [sum(x < y for x in values) + (sum(x == y for x in values) + 1) / 2 for y in values]


def test_the_correlation_is_that_of_ranks_alone() -> None:
    """Whatever the cosines are, their order counts."""
    angles = {"a": 0.0, "b": 0.1, "c": 0.5, "d": 1.4}
    vectors = {text: [math.cos(angle), math.sin(angle)] for text, angle in angles.items()}
    pairs = [(5.0, "a", "b"), (4.9, "a", "c"), (0.1, "a", "d")]
    read = lambda texts: [vectors[text] for text in texts]  # noqa: E731
    assert embeddings.rank_correlation(read, pairs) == pytest.approx(1.0)
    assert embeddings.rank_correlation(read, [(-score, *texts) for score, *texts in pairs]) == pytest.approx(-1.0)


def test_lines_without_a_score_are_left_out(tmp_path: Path) -> None:
    (file := tmp_path / "sts.tsv").write_text("\tno score\tx\n4.5\tone\tother\tmore\n\n2\ta\tb\n")
    assert embeddings.judged_pairs(file) == [(4.5, "one", "other"), (2.0, "a", "b")]
    file.write_bytes("1\ta\u2028b\tc\x0bd\r\n2\te\tf".encode())
    assert embeddings.judged_pairs(file) == [(1.0, "a\u2028b", "c\x0bd"), (2.0, "e", "f")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\ta\tb\n", "two different scores"),
        ("1\ta\tb\n1\tc\td\n", "two different scores"),
        ("score\ta\tb\n", "line 1: a score and two texts are wanted, got 'score"),
        ("1\ta\tb\nnan\ta\tb\n", "line 2"),
        ("1\ta\n", "line 1"),
        (None, "No such file"),
    ],
)
def test_other_files_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "sts.tsv"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit, match=message):
        embeddings.judged_pairs(file)
