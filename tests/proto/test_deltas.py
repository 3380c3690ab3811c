from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import make_delta

from pagoda_proto.deltas import WaitingDeltas, count_numbers
from pagoda_proto.records import Begun, Delta, FinishReason, Usage
from pagoda_proto.steps import TopLogprobs


def delta(first_index: int, tokens: list[int], choice: int = 0, **fields: Any) -> Delta:
    return make_delta(first_index, tokens, choice=choice, **fields)


USAGE = Usage(prompt_tokens=1)


def test_the_delta_that_ends_a_request_stands_last_whichever_choice_it_belongs_to() -> None:
    waiting = WaitingDeltas()
    waiting.add(delta(0, [1], choice=0))
    waiting.add(delta(0, [2], choice=1))
    waiting.add(delta(1, [], choice=1, finish_reason=FinishReason.STOP))
    waiting.add(delta(1, [3], choice=0, finish_reason=FinishReason.LENGTH, usage=USAGE))
    taken = waiting.take()
    assert [(d.choice, d.result.token_ids, d.ends_request) for d in taken] == [(1, [2], False), (0, [1, 3], True)]
    assert not waiting
    assert waiting.num_numbers == 0


def test_what_was_said_once_is_kept_by_a_merge() -> None:
    begun = Begun(model_fingerprint="m", numerics_id="n", cached_prompt_tokens=3)
    entry = TopLogprobs(-1.0, 1, [4], [-1.0])
    waiting = WaitingDeltas()
    waiting.add(delta(0, [1], begun=begun, prompt_logprobs=[entry], logprobs=[entry]))
    waiting.add(delta(1, [2], logprobs=[entry], error_message="late", finish_reason=FinishReason.ERROR))
    [merged] = waiting.take()
    assert (merged.result.begun, merged.result.prompt_logprobs, merged.result.logprobs) == (
        begun,
        [entry],
        [entry, entry],
    )
    assert (merged.result.token_ids, merged.finish_reason, merged.error_message) == ([1, 2], FinishReason.ERROR, "late")


def weights(waiting: WaitingDeltas) -> list[int]:
    return [count_numbers(one) for one in waiting.all()]


def test_what_is_taken_weighs_no_more_than_is_asked_for_but_is_one_at_least() -> None:
    waiting = WaitingDeltas()
    for choice, size in enumerate((9, 4, 4, 1)):
        waiting.add(delta(0, [7] * size, choice))
    assert [len(one.result.token_ids) for one in waiting.take(1)] == [9]
    assert [len(one.result.token_ids) for one in waiting.take(11)] == [4, 4]
    waiting.add(delta(5, [1] * 6, choice=3, attempt=1))
    assert (weights(waiting), waiting.num_numbers) == ([7], 7)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([0, 2, 6, 100])), max_size=40))
def test_however_it_is_read_nothing_is_lost_and_the_end_is_the_end(steps: list[tuple[int, int, int]]) -> None:
    waiting, sent, received = WaitingDeltas(), [0] * 4, [0] * 4
    taken: list[Delta] = []
    for choice, count, most in steps:
        new = delta(sent[choice], list(range(count)), choice)
        waiting.add(new)
        sent[choice] += count
        assert waiting.num_numbers == sum(weights(waiting))
        if most:
            taken += waiting.take(most)
    last = steps[-1][0] if steps else 0
    waiting.add(delta(sent[last], [], last, finish_reason=FinishReason.STOP, usage=USAGE))
    taken += waiting.take()
    for got in taken:
        assert got.result.first_index == received[got.choice]
        received[got.choice] += len(got.result.token_ids)
    assert received == sent
    assert [got.ends_request for got in taken].index(True) == len(taken) - 1
