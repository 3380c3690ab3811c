"""The device sampler's lines stay right whatever happens to rows; a runner that uses it answers as one on the host."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.fakes_accelerator import FakeAccelerator
from tests.worker.fakes_model import POISON, VOCAB, Driver, fake_runner, new_row
from tests.worker.kernels.triton.support import DEVICE, walking
from tests.worker.process.test_startup import Device, config, loaded_by, start, streams

from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import Chunk, RowOutput, StepPlan, StepResult, TopLogprobs
from pagoda_worker.kernels.triton.device_sampler import TritonSampler
from pagoda_worker.kernels.triton.sampling_lines import MAX_EDITS
from pagoda_worker.rows.rows import Row
from pagoda_worker.sampling import sampler as host
from pagoda_worker.sampling.device_sampler import Chosen, samples_of
from pagoda_worker.sampling.sampler import NOT_A_NUMBER, NOTHING_ALLOWED, Fault
from pagoda_worker.step.pending import Pending
from pagoda_worker.step.runner import ModelRunner

BAD_WORDS = ((1, 2), (2, 2, 1), (3, 3, 3, 3, 2), (2, 1, 3), (3,) * 6)
MANNERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "logprobs": 2},
    {"temperature": 1.3, "top_k": 30, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.5, "min_tokens": 4, "stop_token_ids": (1, 2, 8, 9), "logprobs": 9},
    {"temperature": 1.0, "bad_words_token_ids": ((3,), (4, 5)), "logit_bias": {9: 2.0}, "min_p": 0.01, "logprobs": 0},
    {"temperature": 9.0, "allowed_token_ids": (1, 2, 3), "bad_words_token_ids": BAD_WORDS},
    {"temperature": 0.0, "allowed_token_ids": (1, 2, 3), "bad_words_token_ids": BAD_WORDS, "presence_penalty": 1.0},
    {"temperature": 50.0, "frequency_penalty": -1.0},
]
BY_HOST = {"temperature": 1.0, "top_p": 0.9, "prompt_logprobs": 1}  # the step waits for the host, the sampling does not


class OnDevice:
    """A TritonSampler on the kernels' device, for logits on the host."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.uploads: list[int] = []
        self.inner = TritonSampler(max_rows, vocab_size, DEVICE, self._upload)

    def _upload(self, given: torch.Tensor) -> torch.Tensor:
        self.uploads.append(given.numel())
        return given.to(DEVICE, copy=True)

    def takes(self, rows: Sequence[Row]) -> bool:
        return self.inner.takes(rows)

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> Chosen:
        return Chosen(*(tensor.cpu() for tensor in self.inner.sample(logits.to(DEVICE), rows).tensors))


# --- lines ------------------------------------------------------------------------------------------------------------


def row(row_id: int, prior: Sequence[int] = (), **params: Any) -> Row:
    tokens = np.array([5, 6, 7, *prior])
    new = new_row(row_id, tokens.tolist(), [], num_prompt_tokens=3, params=SamplingParams(**params), seed=row_id)
    return Row.of(new, tokens, np.zeros(0, np.int64))


def copy_of(given: Row) -> Row:
    """The row as the host would sample it, with its own state."""
    new = new_row(given.row_id, [], [], num_prompt_tokens=3, params=given.params, seed=given.seed)
    return Row.of(new, given.tokens.array.copy(), np.zeros(0, np.int64))


def step(sampler: OnDevice, rows: list[Row], number: int, vocab: int = 64) -> list[int]:
    """Run one step on the host and on the device and compare; append the tokens to the rows."""
    logits = 2 * torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(number))
    expected = host.sample(logits.clone(), [copy_of(one) for one in rows])
    assert sampler.takes(rows)
    got = samples_of(rows, sampler.sample(logits, rows).tensors)
    assert same(got, expected)
    tokens = [one.token_id for one in got if not isinstance(one, Fault)]
    for one, token in zip(rows, tokens, strict=True):
        one.append(token)
    return tokens


def same(got: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Equal, except for the last bits of log-probabilities."""
    return [_without_logprobs(one) for one in got] == [_without_logprobs(one) for one in expected] and np.allclose(
        [value for one in got for value in _logprobs(one)], [value for one in expected for value in _logprobs(one)],
        rtol=1e-6, atol=1e-6,
    )  # fmt: skip


def _reports(one: Any) -> list[TopLogprobs]:
    found = getattr(one, "logprobs", None)
    return found if isinstance(found, list) else [] if found is None else [found]


def _without_logprobs(one: Any) -> Any:
    ids = one.token_ids if isinstance(one, RowOutput) else getattr(one, "token_id", one)
    return ids, [(found.rank, found.top_ids) for found in _reports(one)]


def _logprobs(one: Any) -> list[float]:
    return [value for found in _reports(one) for value in (found.logprob, *found.top_logprobs)]


PENALISED: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5}


def test_nothing_is_uploaded_between_steps_of_the_same_rows() -> None:
    rows = [row(i, **MANNERS[i % 5]) for i in range(7)]
    sampler = OnDevice(8, 64)
    step(sampler, rows, 0)
    sampler.uploads.clear()
    for number in range(1, 5):
        step(sampler, rows, number)
    assert sampler.uploads == []
    del rows[2]
    step(sampler, rows, 9)
    assert sampler.uploads == [6 + 4]  # which lines, and which of them want log-probabilities


def test_a_row_that_comes_uploads_its_own_line_alone() -> None:
    sampler = OnDevice(8, 64)
    rows = [row(i, temperature=1.0) for i in range(5)]
    step(sampler, rows, 0)
    columns = sampler.uploads[0] // 5
    sampler.uploads.clear()
    rows.insert(2, row(9, temperature=0.7))
    step(sampler, rows, 1)
    assert sampler.uploads == [columns, 6]


def test_bad_words_are_written_when_they_come_near() -> None:
    """The device checks the last output itself; the host updates the line when the outputs before it matter."""
    rows = [row(0, temperature=0.0, allowed_token_ids=(1, 2), bad_words_token_ids=((2, 2, 2, 1), (1, 1, 1, 2)))]
    sampler, tokens, writes = OnDevice(2, 64), [], []
    for number in range(12):
        tokens += step(sampler, rows, number)
        writes.append(len(sampler.uploads))
    changes = sum(before != after for before, after in pairwise(writes))
    assert {1, 2} == set(tokens)
    assert 0 < changes < 11


def test_a_line_goes_to_whoever_needs_it_next() -> None:
    """More rows than lines, in turns: a row that returns is uploaded again, with all its outputs so far."""
    sampler = OnDevice(3, 64)
    rows = [row(i, **MANNERS[i]) for i in range(8)]
    for number in range(16):
        step(sampler, [rows[number * stride % 8] for stride in (1, 3)[: 1 + number % 2]], number)


def test_the_line_least_recently_used_is_taken() -> None:
    sampler = OnDevice(3, 64)
    one, two, three, four = (row(i, temperature=1.0) for i in range(4))
    for number, rows in enumerate(([one, two, three], [two, three], [one, three], [four])):
        step(sampler, rows, number)
    sampler.uploads.clear()
    step(sampler, [one, three, four], 5)
    assert len(sampler.uploads) == 1  # only row two has lost its line
    step(sampler, [two], 6)
    assert len(sampler.uploads) == 3


def test_a_row_that_went_on_elsewhere_is_written_anew() -> None:
    sampler, rows = OnDevice(4, 64), [row(0, **PENALISED), row(1, **PENALISED), row(2, temperature=9.0)]
    step(sampler, rows, 0)
    for token in range(0, 64, 2):
        for one in rows[1:]:
            one.append(token)
    step(sampler, rows, 1)
    step(sampler, rows, 2)


def test_another_row_of_the_same_id_is_another_row() -> None:
    """As after a reset: the same id, parameters and number of outputs, but other tokens."""
    sampler = OnDevice(4, 64)
    rows = [row(3, **PENALISED)]
    (token,) = step(sampler, rows, 0)
    step(sampler, [row(3, [token + 1], **PENALISED)], 1)


def test_more_rows_than_lines_in_one_step_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows exceed the 2"):
        OnDevice(2, 64).sample(torch.zeros(3, 64), [row(i) for i in range(3)])


def test_a_line_that_could_not_be_written_holds_for_nobody() -> None:
    sampler = OnDevice(2, 64)
    rows = [row(0, **PENALISED), row(1, **PENALISED)]
    step(sampler, rows, 0)
    upload = sampler.inner._table._upload

    def fails(given: torch.Tensor) -> torch.Tensor:
        if len(sampler.uploads) > 1:
            raise torch.OutOfMemoryError
        return upload(given)

    sampler.inner._table._upload = fails
    sampler.uploads.clear()
    with pytest.raises(torch.OutOfMemoryError):
        sampler.sample(torch.zeros(2, 64), [row(2, **MANNERS[4]), row(3, **MANNERS[3])])
    sampler.inner._table._upload = upload
    step(sampler, rows, 1)


def test_what_could_not_be_asked_is_asked_again() -> None:
    sampler, one, two = OnDevice(1, 64), row(0, temperature=0.0), row(1, temperature=9.0, logprobs=1)
    step(sampler, [one], 0)
    upload = sampler.inner._upload

    def fails(given: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    sampler.inner._upload = fails
    with pytest.raises(torch.OutOfMemoryError):
        sampler.sample(torch.zeros(1, 64), [two])
    sampler.inner._upload = upload
    step(sampler, [two], 1)


@pytest.mark.parametrize("params", [PENALISED, MANNERS[4], MANNERS[5]])
def test_what_the_host_has_to_know_first(params: dict[str, Any]) -> None:
    sampler, plain = OnDevice(4, 64), row(1, temperature=1.0)
    one = row(0, **params)
    one.promise()
    plain.promise()
    assert sampler.takes([plain])  # its position in the random stream is known
    assert not sampler.takes([plain, one])  # its line would need the value of the pending output
    one.fulfil(3, 8)
    step(sampler, [one], 0)
    for promises, takes in ((1, True), (2, False)):
        one.num_promised = promises
        assert sampler.takes([one]) is takes


def test_more_ends_of_sequence_than_there_is_room_for() -> None:
    new = new_row(0, [1], [], params=SamplingParams(min_tokens=1), eos_token_ids=tuple(range(MAX_EDITS)))
    one = Row.of(new, np.array([1]), np.zeros(0, np.int64))
    assert OnDevice(1, 64).takes([one])
    more = msgspec.structs.replace(new, eos_token_ids=tuple(range(MAX_EDITS + 1)))
    assert not OnDevice(1, 64).takes([Row.of(more, np.array([1]), np.zeros(0, np.int64))])


def test_the_most_that_can_be_asked() -> None:
    vocab = 2048
    asked = {
        "logit_bias": {2 * i: float(i % 7 - 3) for i in range(1024)},
        "stop_token_ids": tuple(range(128)),
        "bad_words_token_ids": tuple((9, i) for i in range(128)),
        "min_tokens": 3,
        "logprobs": 20,
    }
    rows = [row(0, [9], **asked), row(1, [8], **asked, allowed_token_ids=tuple(range(2000)), **PENALISED)]
    sampler = OnDevice(2, vocab)
    for number in range(3):
        step(sampler, rows, number, vocab)


def test_there_may_be_fewer_tokens_than_reports() -> None:
    rows = [row(0, logprobs=20), row(1, logprobs=3)]
    step(OnDevice(2, 8), rows, 0, vocab=8)


def test_faults_are_the_rows_own() -> None:
    plain, none_left = {"logprobs": 2}, {"allowed_token_ids": (3,), "bad_words_token_ids": ((3,),), "logprobs": 1}
    rows = [row(i, **params) for i, params in enumerate([plain, plain, none_left, PENALISED, plain])]
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    logits[1, 60], logits[3, 6] = torch.nan, torch.inf
    expected = host.sample(logits.clone(), [copy_of(one) for one in rows])
    got = samples_of(rows, OnDevice(5, 64).sample(logits, rows).tensors)
    assert same(got, expected)
    assert [one for one in got if isinstance(one, Fault)] == [NOT_A_NUMBER, NOTHING_ALLOWED, NOT_A_NUMBER]


# --- a runner ---------------------------------------------------------------------------------------------------------


class Requests:
    """Acts as an engine core, at random: requests arrive, are preempted and resubmitted, and end."""

    def __init__(self, runner: ModelRunner, seed: int, manners: list[dict[str, Any]]) -> None:
        self.driver = Driver(runner)
        self.rng = random.Random(seed)
        self.manners = manners
        self.prompts = [[self.rng.randrange(1, 9) for _ in range(self.rng.randrange(2, 6))] for _ in manners]
        self.outputs: list[list[RowOutput]] = [[] for _ in manners]
        self.waiting = list(range(len(manners)))
        self.rows: dict[int, int] = {}  # row id -> request
        self.pending: deque[Pending] = deque()

    def plan(self) -> StepPlan:
        finished = [row_id for row_id in self.rows if self.rng.random() < 0.12]
        for row_id in finished:
            self.driver.finish(row_id)
            self.waiting.append(self.rows.pop(row_id))
        new = []
        for request in [one for one in self.waiting if self.rng.random() < 0.5]:
            self.waiting.remove(request)
            row_id = self.driver.step * 100 + request
            self.rows[row_id] = request
            prompt = self.prompts[request]
            prior = [token for output in self.outputs[request] for token in output.token_ids]
            params = SamplingParams(**self.manners[request])
            known = {"num_prompt_tokens": len(prompt), "params": params, "seed": 7, "choice": request}
            new.append(self.driver.add(row_id, prompt + prior, **known))
        plan = self.driver.plan(new, chunk_tokens=self.rng.choice([3, 100]))
        return msgspec.structs.replace(plan, finished_rows=finished)

    def take(self, result: StepResult) -> None:
        assert result.errors == []
        for output in result.outputs:
            if output.row_id in self.rows and output.token_ids:
                self.outputs[self.rows[output.row_id]].append(output)

    def play(self, steps: int) -> list[list[RowOutput]]:
        runner = self.driver.runner
        for _ in range(steps):
            self.pending.append(runner.launch(self.plan()))
            while self.pending and self.rng.random() < 0.5:
                self.take(runner.collect(self.pending.popleft()))
        while self.pending:
            self.take(runner.collect(self.pending.popleft()))
        return self.outputs


def undisturbed(prompt: list[int], manner: dict[str, Any], choice: int, count: int) -> list[RowOutput]:
    """The host's results for one request that has a runner for itself."""
    driver = Driver(fake_runner())
    new, outputs = [driver.add(0, prompt, params=SamplingParams(**manner), seed=7, choice=choice)], []
    while len(outputs) < count:
        outputs += driver.run(new).outputs
        new = []
    return outputs


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_a_runner_answers_as_by_the_host(seed: int, some_wait: bool) -> None:
    """All kinds of parameters in one batch, two steps in flight; rows are removed and return with their outputs."""
    manners = [*MANNERS, BY_HOST] if some_wait else MANNERS
    runner = fake_runner(accelerator=FakeAccelerator(), sampler=OnDevice(len(manners), VOCAB), max_rows=len(manners))
    found = Requests(runner, seed, manners)
    for request, outputs in enumerate(found.play(12)):
        plain = [RowOutput(0, one.token_ids, one.logprobs) for one in outputs]
        expected = undisturbed(found.prompts[request], manners[request], request, len(outputs))
        assert same(plain, [RowOutput(0, one.token_ids, one.logprobs) for one in expected]), manners[request]


def test_no_step_waits_for_the_one_before_it() -> None:
    accelerator = FakeAccelerator()
    runner = fake_runner(accelerator=accelerator, sampler=OnDevice(len(MANNERS), VOCAB))
    driver = Driver(runner)
    new = [driver.add(i, [1, 2, 3], params=SamplingParams(**manner), seed=i) for i, manner in enumerate(MANNERS)]
    pending = [runner.launch(driver.plan(new))]
    for _ in range(6):
        pending.append(runner.launch(driver.plan([])))
        assert not pending[-1].done
        assert not pending[-2].done
        accelerator.fetches[-2].release()
        runner.collect(pending[-2])
    assert accelerator.journal == []


def test_choices_of_a_request_are_their_own() -> None:
    """Forks: rows that differ only in their choice."""
    runner = fake_runner(accelerator=FakeAccelerator(), sampler=OnDevice(4, VOCAB))
    driver, params = Driver(runner), SamplingParams(temperature=2.0, frequency_penalty=0.5, logprobs=1)
    new = [driver.add(choice, [4, 4, 8], params=params, seed=7, choice=choice) for choice in range(4)]
    pending = [runner.launch(driver.plan(new)), *(runner.launch(driver.plan([])) for _ in range(5))]
    results = [runner.collect(one) for one in pending]
    streams = [[result.outputs[choice] for result in results] for choice in range(4)]
    manner = {"temperature": 2.0, "frequency_penalty": 0.5, "logprobs": 1}
    for choice, stream in enumerate(streams):
        assert same(stream, undisturbed([4, 4, 8], manner, choice, 6))
    assert len({tuple(one.token_ids[0] for one in stream) for stream in streams}) == 4


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_without_a_token_ends_alone_and_is_told_why(ahead: bool) -> None:
    none_left = SamplingParams(allowed_token_ids=(3,), bad_words_token_ids=((3,),))
    plan = StepPlan(
        step=1,
        new_rows=[
            new_row(0, [5, 6], [0], params=SamplingParams(logprobs=1)),
            new_row(1, [POISON], [1], params=SamplingParams(logprobs=1)),
            new_row(2, [5, 6], [2], params=none_left),
        ],
        chunks=[Chunk(0, 0, 2, True), Chunk(1, 0, 1, True), Chunk(2, 0, 2, True)],
    )
    runner = fake_runner(accelerator=FakeAccelerator(), sampler=OnDevice(4, VOCAB))
    one = runner.launch(plan)
    two = runner.launch(StepPlan(step=2, chunks=[Chunk(0, 2, 1, True), Chunk(1, 1, 1, True)])) if ahead else None
    result, plain = runner.collect(one), fake_runner().execute(plan)
    assert {(error.row_id, error.code) for error in result.errors} == {
        (1, ErrorCode.NUMERICAL_ERROR.value),
        (2, ErrorCode.INVALID_ARGUMENT.value),
    }
    assert result.errors == plain.errors
    assert same(result.outputs, plain.outputs)
    if two is not None:
        assert [output.row_id for output in runner.collect(two).outputs] == [0]


def test_a_reset_runner_starts_anew() -> None:
    runner = fake_runner(accelerator=FakeAccelerator(), sampler=OnDevice(2, VOCAB))
    for prompt in ([5, 6], [7, 8]):
        driver = Driver(runner)
        new = [driver.add(0, prompt, params=SamplingParams(**PENALISED), seed=7)]
        pending = [runner.launch(driver.plan(new)), *(runner.launch(driver.plan([])) for _ in range(3))]
        assert same([runner.collect(one).outputs[0] for one in pending], undisturbed(prompt, PENALISED, 0, 4))
        runner.launch(driver.plan([]))
        runner.reset()


def test_a_model_of_the_back_end_chooses_by_it() -> None:
    """From startup to tokens: real layers, rows that begin one after the other, one step launched ahead."""
    runner, _ = start(Device(), walking, config(enforce_eager=True))
    assert isinstance(runner._compute._sampler, TritonSampler)
    runner.warm_up()
    found, expected = streams(runner, 1), streams(ModelRunner(loaded_by(walking), 60, config()), 0)
    assert found == {row_id: tokens[: len(found[row_id])] for row_id, tokens in expected.items()}
    assert min(map(len, found.values())) > 5
