"""What is said of a name that is not ours."""

from __future__ import annotations

import pytest

from pagoda.settings.hints import ABSENT, RENAMED, hint
from pagoda.settings.resolving import ALL


def test_every_name_that_is_offered_instead_exists_and_none_of_the_others_does() -> None:
    assert set(RENAMED.values()) <= set(ALL)
    assert not (set(RENAMED) | set(ABSENT)) & set(ALL)
    assert not set(RENAMED) & set(ABSENT)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("--prt", "; did you mean <port>?"),
        ("--max-num-seqs", "; here it is <max_rows>"),
        ("--no-enable-prefix-caching", "; here it is <prefix_cache>"),
        ("tensor_parallel_size", "; a model runs on one device here; workers starts several whole copies of it"),
        ("--trust-remote-code", "; code that comes with a checkpoint is never run"),
        ("--tokenizer", "; the tokenizer is the one in the model's directory"),
        ("xyzzy", ""),
        ("", ""),
    ],
)
def test_a_name_is_answered_by_what_was_meant(name: str, said: str) -> None:
    assert hint(name, ALL, "<{}>".format) == said


def test_nothing_is_offered_that_this_command_does_not_have() -> None:
    assert hint("max_num_seqs", ["port"]) == ""
    assert hint("config", ["config", "port"]) == "", "it is known, and has no place here"
