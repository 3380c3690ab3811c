from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.effort import num_calls
from tests.proto.strategies import sampling_params

from pagoda_proto import params as limits
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError
from pagoda_proto.params import ModelLimits, SamplingParams, check_for_model, model_problems

MODEL = ModelLimits(vocab_size=100, max_model_len=32)


def faulty(**fields: Any) -> list[str]:
    """Names of the fields that the error complains about."""
    try:
        SamplingParams(**fields)
    except InvalidParams as error:
        return [problem.param for problem in error.problems]
    return []


BOUNDS: list[tuple[str, Any, Any]] = [  # field, last good value, first bad one
    ("n", 1, 0),
    ("n", limits.MAX_N, limits.MAX_N + 1),
    ("temperature", 0.0, -0.001),
    ("temperature", 100.0, 100.001),
    ("top_k", -1, -2),
    ("top_k", limits.MAX_TOKENS_CEILING, limits.MAX_TOKENS_CEILING + 1),
    ("top_p", 1e-9, 0.0),
    ("top_p", 1.0, 1.001),
    ("min_p", 0.0, -0.001),
    ("min_p", 1.0, 1.001),
    ("repetition_penalty", 1e-9, 0.0),
    ("repetition_penalty", 100.0, 100.001),
    ("presence_penalty", -2.0, -2.001),
    ("presence_penalty", 2.0, 2.001),
    ("frequency_penalty", -2.0, -2.001),
    ("frequency_penalty", 2.0, 2.001),
    ("seed", limits.MIN_SEED, limits.MIN_SEED - 1),
    ("seed", limits.MAX_SEED, limits.MAX_SEED + 1),
    ("seed", 1, 10**400),
    ("temperature", 1, 10**400),
    ("max_tokens", 1, 0),
    ("max_tokens", limits.MAX_TOKENS_CEILING, limits.MAX_TOKENS_CEILING + 1),
    ("min_tokens", 0, -1),
    ("min_tokens", limits.MAX_TOKENS_CEILING, limits.MAX_TOKENS_CEILING + 1),
    ("logprobs", 0, -1),
    ("logprobs", limits.MAX_LOGPROBS, limits.MAX_LOGPROBS + 1),
    ("prompt_logprobs", 0, -1),
    ("prompt_logprobs", limits.MAX_LOGPROBS, limits.MAX_LOGPROBS + 1),
    ("stop", ("x",) * limits.MAX_STOP_STRINGS, ("x",) * (limits.MAX_STOP_STRINGS + 1)),
    ("stop", ("x" * limits.MAX_STOP_STRING_CHARS,), ("x" * (limits.MAX_STOP_STRING_CHARS + 1),)),
    ("stop", ("x",), ("",)),
    ("stop_token_ids", (1,) * limits.MAX_STOP_TOKEN_IDS, (1,) * (limits.MAX_STOP_TOKEN_IDS + 1)),
    ("allowed_token_ids", (1,) * limits.MAX_ALLOWED_TOKEN_IDS, (1,) * (limits.MAX_ALLOWED_TOKEN_IDS + 1)),
    (
        "logit_bias",
        dict.fromkeys(range(limits.MAX_LOGIT_BIAS), 1.0),
        dict.fromkeys(range(limits.MAX_LOGIT_BIAS + 1), 1.0),
    ),
]


@pytest.mark.parametrize(("field", "good", "bad"), BOUNDS, ids=[f"{bound[0]}-{i}" for i, bound in enumerate(BOUNDS)])
def test_limits(field: str, good: Any, bad: Any) -> None:
    assert faulty(**{field: good}) == []
    assert faulty(**{field: bad}) == [field]


@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(field: str, value: float) -> None:
    assert faulty(**{field: value}) == [field]


@pytest.mark.parametrize(("bias", "ok"), [(-100.0, True), (100.0, True), (-100.1, False), (100.1, False)])
def test_logit_bias_names_the_token(bias: float, ok: bool) -> None:
    assert faulty(logit_bias={7: bias, 8: 0.0}) == ([] if ok else ["logit_bias[7]"])


def test_bad_words() -> None:
    most = ((1,),) * limits.MAX_BAD_WORDS
    longest = (tuple(range(limits.MAX_BAD_WORD_TOKENS)),)
    assert faulty(bad_words_token_ids=most) == faulty(bad_words_token_ids=longest) == []
    assert faulty(bad_words_token_ids=(*most, (1,))) == ["bad_words"]
    assert faulty(bad_words_token_ids=(*longest, (1,))) == ["bad_words"]
    assert faulty(bad_words_token_ids=((),)) == ["bad_words"]


def test_what_says_the_same_has_one_form() -> None:
    assert SamplingParams(stop="END") == SamplingParams(stop=("END",)) == SamplingParams(stop=["END"])  # type: ignore[arg-type]
    lists: Any = {"stop_token_ids": [1, 2], "bad_words_token_ids": [[1], [2, 3]]}
    tuples: Any = {"stop_token_ids": (1, 2), "bad_words_token_ids": ((1,), (2, 3))}
    assert SamplingParams(**lists) == SamplingParams(**tuples)
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(seed=-1).seed == 2**64 - 1
    assert SamplingParams(seed=limits.MIN_SEED).seed == 2**63
    assert faulty(stop="x" * (limits.MAX_STOP_STRING_CHARS + 1)) == ["stop"]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "a"}, {"temperature": True}, {"logprobs": 1.5}, {"max_tokens": 3.5}, {"max_tokens": "3"},
        {"seed": 1.5}, {"top_k": 2.5}, {"n": 2.0}, {"n": True}, {"n": None}, {"ignore_eos": 1}, {"grammar": None},
        {"stop": 5}, {"stop": [5]}, {"stop": b"x"}, {"stop_token_ids": "abc"}, {"allowed_token_ids": [1.5]},
        {"logit_bias": 1.0}, {"logit_bias": {"50": 1.0}}, {"logit_bias": [1]},
        {"bad_words_token_ids": [1]}, {"bad_words_token_ids": 3},
    ],
)  # fmt: skip
def test_what_is_of_another_type_is_refused_by_its_name(fields: dict[str, Any]) -> None:
    assert faulty(**fields) == list(fields)


class Warm(float):
    pass


class Array:
    """Stands in for arrays of numpy and torch, which have no place here."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __iter__(self) -> Iterator[Any]:
        return map(Array, self.value)

    def tolist(self) -> Any:
        return self.value


def test_numbers_of_other_libraries_are_numbers() -> None:
    given: Any = {
        "temperature": Warm(0.5), "top_p": Array(0.5), "max_tokens": Array(3), "seed": Array(-1), "top_k": Array(-1),
        "stop_token_ids": Array([1, 2]), "bad_words_token_ids": [Array([1, 2])], "ignore_eos": Array(True),
    }  # fmt: skip
    plain: Any = {
        "temperature": 0.5, "top_p": 0.5, "max_tokens": 3, "seed": -1, "stop_token_ids": (1, 2),
        "bad_words_token_ids": ((1, 2),), "ignore_eos": True,
    }  # fmt: skip
    found = SamplingParams(**given)
    assert found == SamplingParams(**plain)
    assert (type(found.temperature), type(found.max_tokens), found.top_k) == (float, int, 0)


@pytest.mark.parametrize("number", ["-5", "NaN", "1e400"])
def test_exact_numbers_have_bounds_too(number: str) -> None:
    assert faulty(temperature=Decimal(number)) == ["temperature"]


def test_none_of_a_list_is_an_empty_one() -> None:
    none: Any = dict.fromkeys(("stop", "stop_token_ids", "allowed_token_ids", "bad_words_token_ids", "logit_bias"))
    assert SamplingParams(**none) == SamplingParams()
    assert SamplingParams(temperature=1, allowed_token_ids=range(3)).allowed_token_ids == (0, 1, 2)  # type: ignore[arg-type]


@given(st.integers(limits.MIN_PRIORITY, limits.MAX_PRIORITY), st.integers(limits.MIN_PRIORITY, limits.MAX_PRIORITY))
def test_the_background_keeps_the_order_and_is_behind_all_of_it(one: int, other: int) -> None:
    behind = limits.in_background(one)
    assert limits.MAX_PRIORITY < limits.BACKGROUND_PRIORITY <= behind <= limits.LAST_PRIORITY < 2**31
    assert (behind < limits.in_background(other)) == (one < other)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert faulty(min_tokens=5, max_tokens=5) == []
    assert faulty(min_tokens=6, max_tokens=5) == ["min_tokens"]


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(n=0, top_p=2.0, seed=2**64, stop=("",), logit_bias={3: 1000.0})
    assert [problem.param for problem in caught.value.problems] == ["n", "top_p", "seed", "stop", "logit_bias[3]"]
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "n")
    assert "n: must be between 1 and 16, got 0; top_p: " in caught.value.message
    assert "got 2.0" in caught.value.message


def test_unknown_fields_raise() -> None:
    with pytest.raises(TypeError):
        SamplingParams(beams=3)  # type: ignore[call-arg]


def test_frozen_and_greedy() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=0.1).greedy
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_decoding_checks_too() -> None:
    with pytest.raises(InvalidParams):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"n": 99}), type=SamplingParams)


@given(sampling_params(text=True))
def test_valid_parameters_survive_the_wire(params: SamplingParams) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_a_search_is_checked_in_as_few_calls_as_anything_else() -> None:
    calls = [num_calls(lambda: SamplingParams(use_beam_search=searches)) for searches in (False, True)]  # noqa: B023
    assert calls[1] < 3 * calls[0], "each step says it of each beam"


def test_every_field_is_explained() -> None:
    doc = inspect.cleandoc(SamplingParams.__doc__ or "")  # Python 3.13 has done so itself
    assert [name for name in SamplingParams.__struct_fields__ if f"\n    {name}: " not in doc] == []


# --- against a model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("stop_token_ids", {"stop_token_ids": (99, 100)}),
        ("allowed_token_ids", {"allowed_token_ids": (-1,)}),
        ("logit_bias", {"logit_bias": {100: 1.0}}),
        ("bad_words", {"bad_words_token_ids": ((1,), (2, 100))}),
    ],
)
def test_ids_must_be_in_the_vocabulary(name: str, fields: dict[str, Any]) -> None:
    (problem,) = model_problems(SamplingParams(**fields), [1], MODEL)
    assert problem.param == name
    assert "between 0 and 99" in problem.message


def test_prompt_ids_and_length() -> None:
    assert model_problems(SamplingParams(), [0, 99], MODEL) == []
    assert [p.param for p in model_problems(SamplingParams(stop_token_ids=(100,)), [1, 100], MODEL)] == [
        "prompt", "stop_token_ids",
    ]  # fmt: skip
    assert [p.param for p in model_problems(SamplingParams(), [], MODEL)] == ["prompt"]
    with pytest.raises(InvalidParams, match="prompt: token ids"):
        check_for_model(SamplingParams(), [-1], MODEL)


@pytest.mark.parametrize(
    ("num_prompt", "fields", "output"),
    [
        (31, {}, 1),
        (1, {}, 31),
        (22, {"max_tokens": 10}, 10),
        (22, {"min_tokens": 10}, 10),
        (32, {}, "prompt"),
        (40, {"max_tokens": 1}, "prompt"),
        (22, {"max_tokens": 11}, "max_tokens"),
        (22, {"min_tokens": 11}, "max_tokens"),
    ],
)
def test_room_in_the_context(num_prompt: int, fields: dict[str, Any], output: int | str) -> None:
    if isinstance(output, int):
        assert check_for_model(SamplingParams(**fields), [1] * num_prompt, MODEL) == output
        return
    with pytest.raises(PagodaError, match=f"{num_prompt} in the prompt") as caught:
        check_for_model(SamplingParams(**fields), [1] * num_prompt, MODEL)
    assert (caught.value.code, caught.value.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, output)


@given(num_prompt=st.integers(1, 40), max_tokens=st.none() | st.integers(1, 40))
def test_whatever_is_admitted_fits(num_prompt: int, max_tokens: int | None) -> None:
    try:
        room = check_for_model(SamplingParams(max_tokens=max_tokens), [1] * num_prompt, MODEL)
    except PagodaError:
        assert num_prompt + (max_tokens or 1) > MODEL.max_model_len
    else:
        assert 1 <= room <= MODEL.max_model_len - num_prompt
        assert max_tokens is None or room == max_tokens
