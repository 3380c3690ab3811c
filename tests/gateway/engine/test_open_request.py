"""Deltas may be duplicated, merged, reordered across choices or lost: no token is lost or duplicated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import make_delta

from pagoda_gateway.engine.open_request import OpenRequest, Taken
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import Delta, FinishReason, Generate, RequestRecord, Usage
from pagoda_proto.steps import TopLogprobs


def opened(n: int = 1) -> OpenRequest:
    task = Generate(params=SamplingParams(n=n), seed=0)
    record = RequestRecord(request_id="r", prompt_token_ids=[1, 2], task=task)
    return OpenRequest(record)


def delta(first_index: int, tokens: list[int], choice: int = 0, **fields: Any) -> Delta:
    return make_delta(first_index, tokens, choice=choice, **fields)


def test_duplicates_are_dropped_and_overlaps_cut() -> None:
    request = opened()
    entries = [TopLogprobs(-1.0, 1, [], []), TopLogprobs(-2.0, 1, [], []), TopLogprobs(-3.0, 1, [], [])]
    assert request.take(delta(0, [5, 6], logprobs=entries[:2])) is Taken.NEWS
    assert request.take(delta(0, [5], logprobs=entries[:1])) is Taken.NOTHING
    assert request.take(delta(1, [6, 7], logprobs=entries[1:])) is Taken.NEWS
    [merged] = request.drain()
    assert (merged.result.first_index, merged.result.token_ids, merged.result.logprobs) == (0, [5, 6, 7], entries)


def test_the_next_token_is_taken_as_its_delta_is() -> None:
    short, long = opened(2), opened(2)
    for choice, index, token in ((0, 0, 5), (1, 0, 6), (0, 1, 7)):
        assert short.take_next(choice, index, token)
        assert long.take(long.next_token(choice, index, token)) is Taken.NEWS
    assert short.resume() == long.resume()
    assert short.drain() == long.drain()


@pytest.mark.parametrize(("choice", "index"), [(0, 0), (0, 2), (1, 0)])
def test_what_is_not_the_next_token_changes_nothing(choice: int, index: int) -> None:
    request = opened(2)
    request.take(delta(0, [5]))
    request.take(delta(0, [], choice=1, finish_reason=FinishReason.STOP))
    request.drain()
    before = request.resume()
    assert not request.take_next(choice, index, 9)
    assert (request.resume(), request.drain()) == (before, [])


def test_an_ended_request_takes_no_next_token() -> None:
    request = opened()
    request.drop()
    assert not request.take_next(0, 0, 5)


def test_an_ending_on_known_tokens_is_news() -> None:
    request = opened()
    request.take(delta(0, [5]))
    assert request.drain()[0].result.token_ids == [5]
    usage = Usage(prompt_tokens=2, output_tokens=1)
    assert request.take(delta(0, [5], finish_reason=FinishReason.STOP, usage=usage)) is Taken.NEWS
    [last] = request.drain()
    assert (last.result.first_index, last.result.token_ids, last.finish_reason) == (1, [], FinishReason.STOP)
    assert request.ended
    assert request.take(delta(1, [9])) is Taken.NOTHING


@pytest.mark.parametrize("bad", [delta(2, [1]), delta(0, [1], choice=1), delta(1, [], finish_reason=FinishReason.STOP)])
def test_a_hole_is_a_gap_and_changes_nothing(bad: Delta) -> None:
    request = opened()
    assert request.take(bad) is Taken.GAP
    assert request.drain() == []
    assert request.take(delta(0, [1])) is Taken.NEWS


def test_the_ending_is_delivered_last() -> None:
    request = opened(n=2)
    request.take(delta(0, [1], choice=0))
    request.take(delta(0, [2], choice=1, finish_reason=FinishReason.STOP))
    request.take(delta(1, [3], choice=0, finish_reason=FinishReason.STOP, usage=Usage(prompt_tokens=2)))
    deltas = request.drain()
    assert [d.choice for d in deltas] == [1, 0]
    assert deltas[-1].ends_request
    assert deltas[-1].result.token_ids == [1, 3]


def test_prompt_logprobs_come_once() -> None:
    request = opened()
    entries = [TopLogprobs(-1.0, 1, [], [])]
    request.take(delta(0, [], prompt_logprobs=entries))
    request.attempt = 1
    request.take(delta(0, [4], prompt_logprobs=entries, attempt=1))
    [merged] = request.drain()
    assert merged.result.prompt_logprobs == entries
    request.take(delta(0, [4, 5], prompt_logprobs=entries, attempt=1))
    assert request.drain()[0].result.prompt_logprobs is None


def test_a_failure_ends_every_open_choice_after_its_tokens() -> None:
    request = opened(n=3)
    request.take(delta(0, [1], choice=0))
    request.take(delta(0, [2], choice=1, finish_reason=FinishReason.LENGTH))
    request.close((2,))
    request.fail(PagodaError(ErrorCode.STREAM_INTERRUPTED, "gone"))
    assert {d.choice: d.result.token_ids for d in request.drain()} == {0: [1], 1: [2], 2: []}
    [last] = request.drain()
    assert (last.choice, last.result.token_ids, last.finish_reason) == (0, [], FinishReason.ERROR)
    assert last.error_code is ErrorCode.STREAM_INTERRUPTED
    assert last.ends_request
    assert request.drain() == []


def test_an_engine_cores_error_comes_after_the_tokens_and_last() -> None:
    request = opened(n=2)
    failure = {"finish_reason": FinishReason.ERROR, "error_code": ErrorCode.NUMERICAL_ERROR}
    request.take(delta(0, [1], choice=0))
    request.take(delta(1, [], choice=0, **failure))
    request.take(delta(0, [2], choice=1))
    request.take(delta(1, [], choice=1, usage=Usage(prompt_tokens=2), **failure))
    assert {d.choice: d.result.token_ids for d in request.drain()} == {0: [1], 1: [2]}
    assert [(d.choice, d.ends_request) for d in request.drain()] == [(0, False), (1, True)]


CHOICES = {0: list(range(100, 112)), 1: list(range(200, 212))}


@given(st.data())
def test_any_faulty_stream_yields_each_token_once(data: st.DataObject) -> None:
    request = opened(n=2)
    seen: dict[int, list[int]] = {0: [], 1: []}
    endings = 0

    def read() -> None:
        nonlocal endings
        for d in request.drain():
            assert d.result.first_index == len(seen[d.choice])
            seen[d.choice] += d.result.token_ids
            endings += d.ends_request

    for _ in range(data.draw(st.integers(0, 40))):
        choice = data.draw(st.integers(0, 1))
        first = data.draw(st.integers(0, 12))
        stop = data.draw(st.integers(first, 12))
        fault = data.draw(st.sampled_from(["none", "none", "stale", "loss"]))
        d = delta(first, CHOICES[choice][first:stop], choice=choice, attempt=request.attempt - (fault == "stale"))
        known = {p.choice: len(p.token_ids) for p in request.resume().prior_outputs}.get(choice, 0)
        taken = request.take(d)
        assert (taken is Taken.GAP) == (fault != "stale" and first > known)
        if fault == "loss":
            request.attempt += 1
        if data.draw(st.booleans()):
            read()
    for choice in CHOICES:
        usage = Usage(prompt_tokens=2) if choice == 1 else None
        d = delta(0, CHOICES[choice], choice=choice, finish_reason=FinishReason.LENGTH, usage=usage)
        d.attempt = request.attempt
        assert request.take(d) is Taken.NEWS
    read()
    assert seen == CHOICES
    assert endings == 1
