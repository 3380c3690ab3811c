"""A choice's text depends only on its token ids, not on how they arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.model_dir import write_model_dir

from pagoda_gateway.text.generation import ChoiceText, TextDelta
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import FinishReason
from pagoda_proto.steps import TopLogprobs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText.load(write_model_dir(tmp_path_factory.mktemp("model")))


def ids(model: ModelText, text: str) -> list[int]:
    return model.encode(text, add_special_tokens=False)


def run(
    model: ModelText, params: SamplingParams, tokens: list[int], cuts: list[int]
) -> tuple[str, list[int], TextDelta]:
    """Text, token ids, and the delta that ends the choice."""
    choice = ChoiceText(model, params)
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    deltas = [
        choice.push(tokens[a:b], finish_reason=FinishReason.LENGTH if i == len(edges) - 2 else None)
        for i, (a, b) in enumerate(pairwise(edges))
    ]
    ended = next(delta for delta in deltas if delta.finish_reason is not None)
    assert choice.num_tokens == sum(len(delta.token_ids) for delta in deltas)
    return "".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids], ended


@settings(max_examples=200, deadline=None)
@given(data=st.data(), cuts=st.lists(st.integers(0, 30), max_size=8), min_tokens=st.integers(0, 5))
def test_replaying_the_ids_gives_the_same_text(
    model: ModelText, data: st.DataObject, cuts: list[int], min_tokens: int
) -> None:
    tokens = data.draw(st.lists(st.integers(0, model.vocab_size - 1), min_size=1, max_size=30))
    stop = data.draw(st.lists(st.sampled_from(["a", "hello", " w", "\ufffd", "b\x00"]), max_size=3))
    params = SamplingParams(stop=tuple(stop), min_tokens=min_tokens)
    text, taken, ended = run(model, params, tokens, cuts)
    again, taken_again, ended_again = run(model, params, tokens, [])
    assert (text, taken) == (again, taken_again)
    assert (ended.finish_reason, ended.stop_reason) == (ended_again.finish_reason, ended_again.stop_reason)
    one, taken_one, _ = run(model, params, taken, list(range(len(taken))))  # what was emitted, replayed
    assert (one, taken_one) == (text, taken)


def test_a_stop_string_cuts_text_tokens_and_logprobs(model: ModelText) -> None:
    tokens = ids(model, "one.two")
    logprobs = [TopLogprobs(-1.0, 1, [], []) for _ in tokens]
    choice = ChoiceText(model, SamplingParams(stop=("e.t",)))
    delta = choice.push(tokens, logprobs)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("on", FinishReason.STOP, "e.t")
    assert delta.token_ids == tokens[:5]
    assert delta.logprobs == logprobs[:5]
    assert choice.push([1, 2], finish_reason=FinishReason.ABORT) == TextDelta("", [])


def test_a_stop_string_beats_a_length_at_the_same_token(model: ModelText) -> None:
    choice = ChoiceText(model, SamplingParams(stop=(".",)))
    delta = choice.push(ids(model, "a."), finish_reason=FinishReason.LENGTH)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", FinishReason.STOP, ".")


def test_stop_strings_wait_for_min_tokens(model: ModelText) -> None:
    choice = ChoiceText(model, SamplingParams(stop=(".",), min_tokens=2))
    assert choice.push(ids(model, ".b.")).text == ".b"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_named_and_shown_on_request(model: ModelText, include: bool, text: str) -> None:
    a, b = ids(model, "ab")
    params = SamplingParams(stop_token_ids=(b,), include_stop_str_in_output=include)
    delta = ChoiceText(model, params).push([a, b], finish_reason=FinishReason.STOP, stop_token_id=b)
    assert (delta.text, delta.token_ids, delta.stop_reason) == (text, [a, b], b)


def test_an_end_of_sequence_is_no_stop_reason(model: ModelText) -> None:
    (eos,) = model.eos_token_ids
    choice = ChoiceText(model, SamplingParams(skip_special_tokens=False))
    delta = choice.push([*ids(model, "a"), eos], finish_reason=FinishReason.STOP, stop_token_id=eos)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", FinishReason.STOP, None)


def test_held_text_is_given_at_the_end(model: ModelText) -> None:
    choice = ChoiceText(model, SamplingParams(stop=("abc",)))
    assert choice.push(ids(model, "xab")).text == "x"
    assert choice.push([], finish_reason=FinishReason.LENGTH).text == "ab"


def test_half_a_character_at_the_end(model: ModelText) -> None:
    choice = ChoiceText(model, SamplingParams())
    assert choice.push(ids(model, "🙂")[:2]).text == ""
    assert choice.push([], finish_reason=FinishReason.LENGTH).text == "\ufffd"
