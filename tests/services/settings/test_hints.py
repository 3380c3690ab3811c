"""Hints for option names that are not ours."""

from __future__ import annotations

import pytest

from pagoda.settings.hints import ABSENT, NO, RENAMED, as_key, hint, names_of
from pagoda.settings.resolving import ALL


def test_every_name_that_is_offered_instead_exists_and_none_of_the_others_does() -> None:
    assert {name.removeprefix(NO) for name in RENAMED.values()} <= set(ALL)
    assert all(type(ALL[name.removeprefix(NO)].defaults[0]) is bool for name in RENAMED.values() if name.startswith(NO))
    assert not (set(RENAMED) | set(ABSENT)) & set(ALL)
    assert not set(RENAMED) & set(ABSENT)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("--prt", "; did you mean <port>?"),
        ("--max-num-seqs", "; here it is <max_rows>"),
        ("--enable-prefix-caching", "; here it is <prefix_cache>"),
        ("--no-enable-prefix-caching", "; here it is <no_prefix_cache>"),
        ("--disable-radix-cache", "; here it is <no_prefix_cache>"),
        ("--no-disable-radix-cache", "; here it is <prefix_cache>"),
        ("--no-enable-chunked-prefill", "; this is always on"),
        ("no_page", "; did you mean <no_page>?"),
        ("no_port", "; did you mean <port>?"),
        ("--no-async-scheduling", "; here it is <max_steps_in_flight>"),
        ("--max_rows", "; did you mean <max_rows>?"),
        ("tensor_parallel_size", "; a model runs on one device; workers starts several whole copies of it"),
        ("--trust-remote-code", "; code that comes with a checkpoint is never run"),
        ("--tokenizer", "; the tokenizer in the model's directory is used"),
        ("xyzzy", ""),
        ("", ""),
    ],
)
def test_a_name_is_answered_by_what_was_meant(name: str, said: str) -> None:
    assert hint(name, names_of(ALL), "<{}>".format) == said


def test_nothing_is_offered_that_this_command_does_not_have() -> None:
    assert hint("max_num_seqs", ["port"]) == ""
    assert hint("config", ["config", "port"]) == "", "it is known, and has no place here"


def test_what_another_command_has_is_said_to_be_there() -> None:
    def elsewhere(name: str) -> str:
        return "engine-core" if name in ("max_rows", "block_size") else ""

    assert hint("max_num_seqs", ["port"], elsewhere=elsewhere) == "; here it is max_rows, of engine-core"
    assert hint("no_prefix_cache", ["port"], elsewhere=lambda name: "engine-core" * (name == "prefix_cache")) == (
        "; it is an option of engine-core"
    )
    assert hint("block_size", ["port"], elsewhere=elsewhere) == "; it is an option of engine-core"
    assert hint("tokenizer", ["port"], elsewhere=elsewhere).startswith("; the tokenizer")


def test_what_is_no_flag_has_no_name_for_off() -> None:
    assert hint("disable_radix_cache", names_of(ALL), as_key) == "; here it is prefix_cache with the opposite value"
    assert hint("no_page", names_of(ALL), as_key) == "; did you mean page with the opposite value?"
