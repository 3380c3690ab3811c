"""Steps launched before the previous one has been answered, on an accelerator that answers on demand."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.fakes_accelerator import FakeAccelerator, HeldFetch
from tests.worker.fakes_model import BOMB, GONE, HUGE, POISON, Driver, FakeModel, fake_runner, new_row

from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import AppendBlocks, Chunk, RowOutput, StepPlan, StepResult
from pagoda_worker.step.pending import Pending
from pagoda_worker.step.runner import LostStep, ModelRunner

GREEDY = SamplingParams(temperature=0.0)
BY_HOST: list[dict[str, Any]] = [
    {"temperature": 1.1, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "prompt_logprobs": 0},
]


def first(*rows: list[int], **changes: Any) -> StepPlan:
    new = [new_row(i, tokens, [i], **changes) for i, tokens in enumerate(rows)]
    return StepPlan(step=1, new_rows=new, chunks=[Chunk(i, 0, len(tokens), True) for i, tokens in enumerate(rows)])


def then(step: int, *starts: int) -> StepPlan:
    return StepPlan(step=step, chunks=[Chunk(i, start, 1, True) for i, start in enumerate(starts)])


def tokens_of(result: StepResult) -> dict[int, list[int]]:
    return {output.row_id: output.token_ids for output in result.outputs}


def alone(tokens: list[int], steps: int) -> list[int]:
    """The greedy continuation of one row with these tokens, step by step on a CPU."""
    runner = fake_runner()
    results = [runner.execute(first(tokens))]
    results += [runner.execute(then(step, len(tokens) + step - 2)) for step in range(2, steps + 1)]
    return [result.outputs[0].token_ids[0] for result in results]


def test_the_next_step_is_launched_while_the_tokens_are_on_the_device() -> None:
    accelerator = FakeAccelerator()
    runner = fake_runner(accelerator=accelerator)
    one = runner.launch(first([5, 6, 7], [9, 8]))
    two = runner.launch(then(2, 3, 2))
    assert (one.done, two.done, accelerator.journal) == (False, False, [])
    accelerator.fetches[0].release()
    assert (one.done, two.done) == (True, False)
    results = [runner.collect(one), runner.collect(two)]
    assert accelerator.journal == ["waited"]
    assert [result.step for result in results] == [1, 2]
    for row_id, tokens in enumerate(([5, 6, 7], [9, 8])):
        assert [tokens_of(result)[row_id][0] for result in results] == alone(tokens, 2)


def test_a_third_step_waits_for_the_first() -> None:
    accelerator = FakeAccelerator()
    runner = fake_runner(accelerator=accelerator)
    pending = [runner.launch(plan) for plan in (first([5, 6]), then(2, 2), then(3, 3))]
    assert [one.result is not None for one in pending] == [True, False, False]
    assert [runner.collect(one).outputs[0].token_ids[0] for one in pending] == alone([5, 6], 3)


@pytest.mark.parametrize("params", BY_HOST)
def test_tokens_that_the_host_chooses_are_chosen_before_the_next_launch(params: dict[str, Any]) -> None:
    accelerator = FakeAccelerator()
    runner = fake_runner(accelerator=accelerator)
    one = runner.launch(first([5, 6], params=SamplingParams(**params)))
    assert one.done
    assert accelerator.fetches == []
    two = runner.launch(then(2, 2))
    assert one.result is not None
    plain = fake_runner()
    expected = [plain.execute(plan) for plan in (first([5, 6], params=SamplingParams(**params)), then(2, 2))]
    assert [runner.collect(one).outputs, runner.collect(two).outputs] == [result.outputs for result in expected]


def test_a_row_may_turn_from_the_device_to_the_host_and_back() -> None:
    """The host samples row 1, and so whole steps with it; row 0 continues with the same tokens throughout."""
    runner = fake_runner(accelerator=FakeAccelerator())
    plans = [
        first([5, 6, 7]),
        StepPlan(
            step=2,
            new_rows=[new_row(1, [4, 4], [1], params=SamplingParams(temperature=1.0))],
            chunks=[Chunk(0, 3, 1, True), Chunk(1, 0, 2, True)],
        ),
        StepPlan(step=3, finished_rows=[1], chunks=[Chunk(0, 4, 1, True)]),
        then(4, 5),
    ]
    pending = [runner.launch(plan) for plan in plans]
    assert [tokens_of(runner.collect(one))[0][0] for one in pending] == alone([5, 6, 7], 4)


def test_a_step_that_samples_nothing_is_over_when_the_device_is() -> None:
    accelerator = FakeAccelerator()
    runner = fake_runner(accelerator=accelerator)
    plan = StepPlan(step=1, new_rows=[new_row(0, [5, 6, 7], [0])], chunks=[Chunk(0, 0, 2, False)])
    one = runner.launch(plan)
    assert not one.done
    two = runner.launch(StepPlan(step=2, chunks=[Chunk(0, 2, 1, True)]))
    assert runner.collect(one).outputs == []
    assert runner.collect(two).outputs[0].token_ids == alone([5, 6, 7], 1)


manners = st.sampled_from([{"temperature": 0.0}, {"temperature": 0.0}, *BY_HOST])


def played(runner: ModelRunner, seed: int, given_manners: list[dict[str, Any]], ahead: bool) -> dict[int, list[Any]]:
    """The outputs of rows with these parameters over a dozen steps; `ahead` collects results at random moments."""
    rng, when = random.Random(seed), random.Random(seed + 1)
    driver, streams = Driver(runner), {i: [] for i in range(len(given_manners))}
    waiting = list(enumerate(given_manners))
    pending: deque[Pending] = deque()

    def take(result: StepResult) -> None:
        assert result.errors == []
        for output in result.outputs:
            streams[output.row_id].append(RowOutput(0, output.token_ids, output.logprobs, output.prompt_logprobs))

    for _ in range(12):
        new = []
        if waiting and rng.random() < 0.6:
            i, manner = waiting.pop(0)
            prompt = [rng.randrange(400) for _ in range(rng.randrange(1, 20))]
            new.append(driver.add(i, prompt, params=SamplingParams(**manner), seed=i))
        pending.append(runner.launch(driver.plan(new, chunk_tokens=rng.choice([3, 7, 100]))))
        while pending and (not ahead or when.random() < 0.4):
            take(runner.collect(pending.popleft()))
    while pending:
        take(runner.collect(pending.popleft()))
    return streams


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.lists(manners, min_size=1, max_size=4))
def test_launching_ahead_changes_no_answer(seed: int, given_manners: list[dict[str, Any]]) -> None:
    expected = played(fake_runner(), seed, given_manners, ahead=False)
    assert played(fake_runner(accelerator=FakeAccelerator()), seed, given_manners, ahead=True) == expected


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_row_that_ends_in_one_step_is_unknown_in_the_next() -> None:
    model = FakeModel()
    runner = fake_runner(model, accelerator=FakeAccelerator())
    one, two = runner.launch(first([5, 6], [POISON])), runner.launch(then(2, 2, 1))
    assert model.batches[1].token_ids.tolist() == [*alone([5, 6], 1), 0]  # not an id outside the embedding table
    assert [(error.row_id, error.code) for error in runner.collect(one).errors] == [(1, ErrorCode.NUMERICAL_ERROR)]
    second = runner.collect(two)
    assert [(error.row_id, error.code) for error in second.errors] == [(1, ErrorCode.PROTOCOL_ERROR)]
    assert "unknown" in second.errors[0].message
    assert [tokens_of(result)[0][0] for result in (one.result, two.result) if result] == alone([5, 6], 2)
    assert list(tokens_of(second)) == [0]


def test_a_launch_that_fails_is_a_lost_step_and_takes_the_step_before_it_along() -> None:
    runner = fake_runner(accelerator=FakeAccelerator())
    one = runner.launch(first([5, 6]))
    bomb = StepPlan(step=2, new_rows=[new_row(1, [BOMB], [1])], chunks=[Chunk(0, 2, 1, True), Chunk(1, 0, 1, True)])
    with pytest.raises(LostStep, match="step 2"):
        runner.launch(bomb)
    assert one.result is None
    assert "unknown" in runner.execute(then(1, 2)).errors[0].message


def test_a_step_that_fails_while_a_later_one_is_launched_is_named_by_its_own_number() -> None:
    class Broken(HeldFetch):
        def wait(self) -> list[torch.Tensor]:
            raise RuntimeError("boom")

    class BrokenFetches(FakeAccelerator):
        def fetch(self, *tensors: torch.Tensor) -> HeldFetch:
            return Broken(tensors, self.journal)

    runner = fake_runner(accelerator=BrokenFetches())
    runner.launch(first([5, 6]))
    runner.launch(then(2, 2))
    with pytest.raises(LostStep) as raised:
        runner.launch(then(3, 3))
    assert raised.value.step == 1


def test_claims_that_do_not_hold_are_answered_with_their_own_step() -> None:
    runner = fake_runner(accelerator=FakeAccelerator())
    one = runner.launch(first([5, 6]))
    two = runner.launch(StepPlan(step=2, append_blocks=[AppendBlocks(7, [1])], chunks=[Chunk(0, 2, 1, True)]))
    assert runner.collect(one).errors == []
    assert [error.row_id for error in runner.collect(two).errors] == [7]


def test_too_little_memory_costs_the_step_and_gives_back_what_it_held() -> None:
    accelerator = FakeAccelerator()
    runner = fake_runner(accelerator=accelerator)
    runner.execute(first([5, 6]))
    with pytest.raises(LostStep) as raised:
        runner.execute(StepPlan(step=2, new_rows=[new_row(1, [HUGE, 1], [1])], chunks=[Chunk(1, 0, 2, True)]))
    assert raised.value.out_of_memory
    assert raised.value.reason == "out of memory in a step of 1 rows and 2 tokens"
    assert accelerator.journal[-1] == "emptied"
    assert tokens_of(runner.execute(first([5, 6]))) == {0: alone([5, 6], 1)}


def test_a_lost_device_is_nobodys_to_survive() -> None:
    runner = fake_runner(accelerator=FakeAccelerator())
    with pytest.raises(torch.AcceleratorError):
        runner.launch(first([GONE]))


def test_reset_waits_for_the_device_and_drops_what_was_launched() -> None:
    accelerator = FakeAccelerator()
    runner = fake_runner(accelerator=accelerator)
    runner.launch(first([5, 6]))
    runner.reset()
    assert accelerator.journal == ["synchronized"]
    assert "unknown" in runner.execute(then(1, 2)).errors[0].message
    one, two = runner.launch(first([5, 6])), runner.launch(then(2, 2))
    assert [runner.collect(step).outputs[0].token_ids[0] for step in (one, two)] == alone([5, 6], 2)


def test_times_of_overlapping_steps_do_not_count_twice() -> None:
    model = FakeModel()
    runner = fake_runner(model, accelerator=FakeAccelerator())
    one, two = runner.launch(first([5, 6])), runner.launch(then(2, 2))
    first_result = runner.collect(one)
    second_result = runner.collect(two)
    assert first_result.elapsed_s >= first_result.forward_s > 0
    assert second_result.elapsed_s == second_result.forward_s > 0
    whole = runner._settled_at - one.began
    assert first_result.elapsed_s + second_result.elapsed_s == pytest.approx(whole, abs=1e-9)
