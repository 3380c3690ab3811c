from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.worker.checkpoints.formats.sources import PlainSource
from tests.worker.fakes_model import (
    BOMB,
    INFINITE,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    POISON,
    VOCAB,
    Driver,
    FakeModel,
    fake_runner,
    new_row,
)
from tests.worker.fakes_spec import spec_of

from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import AppendBlocks, Chunk, NewRow, ReplaceBlock, RowOutput, StepPlan
from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.spec import expected_tensors
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.kernels.ops import Needs
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.rows.batch import Batch
from pagoda_worker.step.runner import LostStep, ModelRunner, ran_out_of_memory

MakeRunner = Callable[[], ModelRunner]

PROMPT = [(7 * i + 3) % 400 for i in range(37)]
MANNERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "logprobs": 2},
    {"temperature": 1.3, "top_k": 30, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.5, "min_tokens": 4, "stop_token_ids": tuple(range(99)), "logprobs": 1},
    {"temperature": 1.0, "bad_words_token_ids": ((3,), (4, 5)), "logit_bias": {9: 2.0}, "min_p": 0.01},
]


def tiny_llama(kernels: str = "torch", **options: Any) -> ModelRunner:
    """A small real model: a llama with two layers and random weights, in bfloat16."""
    spec = spec_of(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        max_positions=MAX_MODEL_LEN,
        ropes=(RopeShape(theta=10_000.0, head_dim=16),),
        rope_of_layer=(0, 0),
        windows=(None, None),
        attention_scale=0.25,
        tied=True,
    )
    ops, _ = load_ops(torch.device("cpu"), kernels, Needs(dtype=torch.bfloat16, hidden_size=64, head_dims=(16,)))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.2 if len(shape) == 2 else torch.ones(shape)
        for name, shape in expected_tensors(spec).items()
    }
    model = Decoder(spec, ops, PlainSource(lambda name: weights[name].bfloat16()), torch.bfloat16, MAX_MODEL_LEN)
    loaded = LoadedModel(
        model=model,
        kv_groups=tuple(replace(one, quantized=options.get("kv_cache_dtype") == "int8") for one in model.kv_groups),
        ops=ops,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        vocab_size=VOCAB,
        max_model_len=MAX_MODEL_LEN,
        fingerprint="tiny",
        numerics_id="tiny",
        batch_invariant=ops.batch_invariant,
    )
    return ModelRunner(loaded, NUM_BLOCKS, WorkerConfig(block_size=16, **options))


def native_llama() -> ModelRunner:
    """The same on the native kernels, which have their own sampling."""
    return tiny_llama("native")


RUNNERS = {"fake": fake_runner, "llama": tiny_llama} | ({"native": native_llama} if LIBRARY.exists() else {})


@pytest.fixture(params=RUNNERS.values(), ids=RUNNERS)
def make_runner(request: pytest.FixtureRequest) -> MakeRunner:
    made: MakeRunner = request.param
    return made


def outputs_of(
    driver: Driver, row_id: int, new: list[NewRow], steps: int, chunk_tokens: int = 10**6
) -> list[RowOutput]:
    """The row's outputs over `steps` samples, while the other rows run beside it."""
    outputs: list[RowOutput] = []
    while len(outputs) < steps:
        result = driver.run(new, chunk_tokens)
        assert result.errors == []
        outputs += [output for output in result.outputs if output.row_id == row_id and output.token_ids]
        new = []
    return outputs


def tokens_of(outputs: list[RowOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def alone(manner: dict[str, Any], steps: int = 8, make: MakeRunner = fake_runner) -> list[RowOutput]:
    return _alone(MANNERS.index(manner), steps, make)


@functools.cache
def _alone(manner: int, steps: int, make: MakeRunner) -> list[RowOutput]:
    driver = Driver(make())
    row = driver.add(1, PROMPT, params=SamplingParams(**MANNERS[manner]), seed=99, choice=1)
    return outputs_of(driver, 1, [row], steps)


@pytest.mark.parametrize("manner", MANNERS)
def test_neighbours_do_not_matter(make_runner: MakeRunner, manner: dict[str, Any]) -> None:
    rng = random.Random(4)
    driver = Driver(make_runner())
    rows = [
        driver.add(
            i + 10,
            [rng.randrange(400) for _ in range(rng.randrange(1, 20))],
            params=SamplingParams(**rng.choice(MANNERS)),
            seed=i,
        )
        for i in range(15)
    ]
    rows.insert(7, driver.add(1, PROMPT, params=SamplingParams(**manner), seed=99, choice=1))
    assert outputs_of(driver, 1, rows, 8) == alone(manner, make=make_runner)


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("chunk_tokens", [1, 7])
def test_chunking_does_not_matter(make_runner: MakeRunner, manner: dict[str, Any], chunk_tokens: int) -> None:
    driver = Driver(make_runner())
    row = driver.add(1, PROMPT, params=SamplingParams(**manner), seed=99, choice=1)
    assert outputs_of(driver, 1, [row], 8, chunk_tokens) == alone(manner, make=make_runner)


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("done", [1, 5])
def test_a_replayed_row_goes_on(make_runner: MakeRunner, manner: dict[str, Any], done: int) -> None:
    undisturbed = alone(manner, make=make_runner)
    prior = tokens_of(undisturbed)[:done]
    driver = Driver(make_runner())
    row = driver.add(
        1, PROMPT + prior, num_prompt_tokens=len(PROMPT), params=SamplingParams(**manner), seed=99, choice=1
    )
    assert outputs_of(driver, 1, [row], 8 - done, chunk_tokens=11) == undisturbed[done:]


def test_the_random_stream_is_keyed_by_seed_and_choice() -> None:
    driver = Driver(fake_runner())
    keys = [(99, 1), (99, 0), (100, 1)]
    rows = [
        driver.add(i, PROMPT, params=SamplingParams(temperature=1.0), seed=seed, choice=choice)
        for i, (seed, choice) in enumerate(keys)
    ]
    streams: dict[int, list[int]] = {i: [] for i in range(3)}
    for _ in range(6):
        for output in driver.run(rows).outputs:
            streams[output.row_id] += output.token_ids
        rows = []
    assert len({tuple(stream) for stream in streams.values()}) == 3


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_a_forked_row_computes_the_last_prompt_token_in_a_copied_block() -> None:
    runner = fake_runner()
    first = runner.execute(
        StepPlan(step=1, new_rows=[new_row(1, PROMPT, [0, 1, 2])], chunks=[Chunk(1, 0, len(PROMPT), True)])
    )
    fork = new_row(2, PROMPT, [0, 1, 2], num_computed=len(PROMPT) - 1)
    second = runner.execute(
        StepPlan(
            step=2,
            new_rows=[fork],
            replace_blocks=[ReplaceBlock(2, 2, 5)],
            block_copies=[(2, 5)],
            chunks=[Chunk(1, len(PROMPT), 1, True), Chunk(2, len(PROMPT) - 1, 1, True)],
        )
    )
    assert second.errors == []
    assert [output.row_id for output in second.outputs] == [1, 2]
    assert second.outputs[1].token_ids == first.outputs[0].token_ids


def test_blocks_of_a_finished_row_serve_another_in_the_same_plan() -> None:
    runner = fake_runner()
    expected = runner.execute(StepPlan(step=1, new_rows=[new_row(2, [9, 8], [4])], chunks=[Chunk(2, 0, 2, True)]))
    runner.execute(StepPlan(step=2, new_rows=[new_row(3, PROMPT, [0, 1, 2])], chunks=[Chunk(3, 0, 37, True)]))
    result = runner.execute(
        StepPlan(step=3, finished_rows=[3], new_rows=[new_row(4, [9, 8], [0])], chunks=[Chunk(4, 0, 2, True)])
    )
    assert result.outputs[0].token_ids == expected.outputs[0].token_ids


def test_the_next_chunk_may_start_at_a_token_nobody_else_knows() -> None:
    runner = fake_runner()
    plans = [
        StepPlan(step=1, new_rows=[new_row(1, [5] * 16, [0])], chunks=[Chunk(1, 0, 16, True)]),
        StepPlan(step=2, append_blocks=[AppendBlocks(1, [1])], chunks=[Chunk(1, 16, 1, True)]),
        StepPlan(step=3, chunks=[Chunk(1, 17, 1, True)]),
    ]
    results = [runner.execute(plan) for plan in plans]
    assert [result.step for result in results] == [1, 2, 3]
    assert all(len(result.outputs[0].token_ids) == 1 for result in results)


# --- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 100])
def test_prompt_logprobs_cover_every_prompt_token_but_the_first_once(chunk_tokens: int) -> None:
    model = FakeModel()
    driver = Driver(fake_runner(model))
    row = driver.add(1, PROMPT, params=SamplingParams(temperature=0.0, prompt_logprobs=2))
    reports, new = [], [row]
    while driver.known[1] < len(PROMPT) + 3:
        result = driver.run(new, chunk_tokens)
        new = []
        for output in result.outputs:
            reports += output.prompt_logprobs or []
    assert len(reports) == len(PROMPT) - 1
    hidden = [model.forward(batch, [torch.full((NUM_BLOCKS, 16), -1)]) for batch in model.batches[:1]]
    if chunk_tokens >= len(PROMPT):
        expected = torch.log_softmax(model.logits(hidden[0]).double(), -1)
        for place, report in enumerate(reports):
            target = PROMPT[place + 1]
            assert report.logprob == pytest.approx(float(expected[place, target]), abs=1e-5)
            assert report.top_logprobs[0] == pytest.approx(float(expected[place].max()), abs=1e-5)


def test_prompt_logprobs_of_a_replayed_row_stop_at_the_prompt() -> None:
    driver = Driver(fake_runner())
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    result = driver.run([driver.add(1, [*PROMPT, 4, 5], num_prompt_tokens=len(PROMPT), params=params)])
    assert result.outputs[0].prompt_logprobs is not None
    assert len(result.outputs[0].prompt_logprobs) == len(PROMPT) - 1


def test_a_chunk_that_does_not_sample_is_listed_only_for_its_prompt_logprobs() -> None:
    runner = fake_runner()
    rows = [new_row(1, [5] * 9, [0]), new_row(2, [5] * 9, [1], params=SamplingParams(prompt_logprobs=0))]
    result = runner.execute(StepPlan(step=1, new_rows=rows, chunks=[Chunk(1, 0, 4, False), Chunk(2, 0, 4, False)]))
    [output] = result.outputs
    assert (output.row_id, output.token_ids, output.logprobs) == (2, [], None)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 4


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [POISON, INFINITE])
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_logits_that_are_no_numbers_end_one_row(bad: int, prompt_logprobs: int | None) -> None:
    runner = fake_runner()
    params = SamplingParams(temperature=0.0, prompt_logprobs=prompt_logprobs)
    rows = [new_row(i, [1, bad if i == 1 else 2, 3], [i], params=params) for i in range(3)]
    result = runner.execute(StepPlan(step=1, new_rows=rows, chunks=[Chunk(i, 0, 3, True) for i in range(3)]))
    assert [(error.row_id, error.code) for error in result.errors] == [(1, ErrorCode.NUMERICAL_ERROR)]
    assert [output.row_id for output in result.outputs] == [0, 2]
    again = runner.execute(StepPlan(step=2, chunks=[Chunk(i, 3, 1, True) for i in range(3)]))
    assert [output.row_id for output in again.outputs] == [0, 2]
    assert "unknown" in again.errors[0].message


def test_whatever_a_forward_pass_raises_costs_the_step_and_no_row_is_blamed(caplog: pytest.LogCaptureFixture) -> None:
    runner = fake_runner()
    runner.execute(StepPlan(step=1, new_rows=[new_row(3, [1, 2], [2])]))
    rows = [new_row(1, [1, 2], [0]), new_row(2, [1, BOMB], [1])]
    with caplog.at_level(logging.ERROR), pytest.raises(LostStep) as raised:
        runner.execute(StepPlan(step=2, new_rows=rows, chunks=[Chunk(1, 0, 2, True), Chunk(2, 0, 2, True)]))
    assert (raised.value.step, raised.value.out_of_memory) == (2, False)
    assert raised.value.reason == "RuntimeError in a step of 2 rows and 4 tokens"
    assert raised.value.__context__ is None  # it would keep the failed step's tensors
    forgotten = runner.execute(StepPlan(step=1, chunks=[Chunk(3, 0, 2, True)]))
    assert "unknown" in forgotten.errors[0].message
    assert len(runner.execute(StepPlan(step=2, new_rows=rows[:1], chunks=[Chunk(1, 0, 2, True)])).outputs) == 1


def test_a_failure_is_traced_when_it_first_appears(caplog: pytest.LogCaptureFixture) -> None:
    runner = fake_runner()
    bomb = StepPlan(step=1, new_rows=[new_row(1, [BOMB], [5])], chunks=[Chunk(1, 0, 1, True)])
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with pytest.raises(LostStep):
                runner.execute(bomb)
    assert [record.exc_info is not None for record in caplog.records] == [True, False, False]


HOST_ALLOCATION = "[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."
MEMORY_ERRORS = [MemoryError(), torch.OutOfMemoryError("tried to allocate 9 GiB"), RuntimeError(HOST_ALLOCATION)]


@pytest.mark.parametrize(("error", "memory"), [*((error, True) for error in MEMORY_ERRORS), (ValueError("no"), False)])
def test_it_is_told_whether_memory_ran_out(error: Exception, memory: bool) -> None:
    class Failing(FakeModel):
        def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
            raise error

    with pytest.raises(LostStep) as raised:
        fake_runner(Failing()).execute(StepPlan(step=1, new_rows=[new_row(1, [5], [0])], chunks=[Chunk(1, 0, 1, True)]))
    assert raised.value.out_of_memory == memory
    assert raised.value.reason.startswith("out of memory in" if memory else "ValueError in")


def test_torch_says_what_we_take_for_a_lack_of_host_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**15)
    assert ran_out_of_memory(raised.value)


def test_a_plan_about_nothing_is_answered() -> None:
    result = fake_runner().execute(StepPlan(step=3))
    assert (result.step, result.outputs, result.errors) == (3, [], [])
    assert result.elapsed_s >= result.forward_s >= 0


def test_reset_forgets_rows() -> None:
    runner = fake_runner()
    runner.execute(StepPlan(step=1, new_rows=[new_row(1, [1, 2], [0])]))
    runner.reset()
    result = runner.execute(StepPlan(step=1, new_rows=[new_row(1, [1, 2], [0])], chunks=[Chunk(1, 0, 2, True)]))
    assert result.errors == []


def test_warm_up_leaves_no_row_and_tells_of_a_broken_model() -> None:
    runner = fake_runner()
    runner.warm_up()
    assert runner.execute(StepPlan(step=1, new_rows=[new_row(0, [1, 2], [0])])).errors == []

    class Broken(FakeModel):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().logits(hidden) * torch.nan

    with pytest.raises(RuntimeError, match="first step"):
        fake_runner(Broken()).warm_up()


def test_facts() -> None:
    facts = fake_runner(max_rows=7).facts
    assert (facts.num_blocks, facts.block_size, facts.vocab_size, facts.max_rows) == (NUM_BLOCKS, 16, VOCAB, 7)


# --- arbitrary plans --------------------------------------------------------------------------------------------------

row_ids = st.integers(0, 4)
small = st.integers(-2, 40) | st.integers(-(2**63), 2**64 - 1)
block_ids = st.integers(0, NUM_BLOCKS - 1) | st.integers(-1, NUM_BLOCKS)
plans = st.builds(
    StepPlan,
    step=st.just(1),
    finished_rows=st.lists(row_ids, max_size=1),
    new_rows=st.lists(
        st.builds(
            NewRow,
            row_id=row_ids,
            token_ids=st.lists(st.integers(0, VOCAB - 1) | small, min_size=1, max_size=20),
            num_prompt_tokens=st.integers(1, 3) | small,
            num_computed=st.just(0) | small,
            block_ids=st.lists(block_ids, min_size=1, max_size=3),
            params=st.sampled_from([SamplingParams(**manner) for manner in MANNERS]),
            seed=st.integers(0, 2**64 - 1) | small,
            choice=st.just(0) | small,
            eos_token_ids=st.just(()) | st.lists(small, max_size=2).map(tuple),
        ),
        max_size=3,
    ),
    append_blocks=st.lists(st.builds(AppendBlocks, row_ids, st.lists(block_ids, max_size=2)), max_size=2),
    replace_blocks=st.lists(st.builds(ReplaceBlock, row_ids, st.integers(0, 2) | small, block_ids), max_size=2),
    block_copies=st.lists(st.tuples(block_ids, block_ids), max_size=2, unique_by=lambda pair: pair[1]),
    chunks=st.lists(
        st.builds(Chunk, row_ids, st.just(0) | small, st.integers(1, 20) | small, st.booleans()), max_size=4
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(plans, min_size=1, max_size=5))
def test_no_plan_breaks_the_runner_or_a_row_it_is_not_about(given_plans: list[StepPlan]) -> None:
    runner, expected = fake_runner(), tokens_of(alone(MANNERS[2], 5))
    plain_step(runner, new_row(1000, PROMPT, [], params=SamplingParams(**MANNERS[2]), seed=99, choice=1))
    for plan in given_plans:
        result = runner.execute(plan)
        asked = {chunk.row_id for chunk in plan.chunks}
        answered = [output.row_id for output in result.outputs]
        failed = [error.row_id for error in result.errors]
        assert len(set(answered)) == len(answered)
        assert len(set(failed)) == len(failed)
        assert not set(answered) & set(failed)
        assert set(answered) <= asked
        assert {chunk.row_id for chunk in plan.chunks if chunk.sample} <= set(answered) | set(failed)
    chunk = Chunk(1000, 0, len(PROMPT), True)
    bystander = runner.execute(StepPlan(step=9, append_blocks=[AppendBlocks(1000, [61, 62, 63])], chunks=[chunk]))
    assert [output.row_id for output in bystander.outputs] == [1000]
    assert bystander.outputs[0].token_ids == expected[:1]
    runner.reset()
    driver = Driver(runner)
    row = driver.add(1, PROMPT, params=SamplingParams(**MANNERS[2]), seed=99, choice=1)
    assert tokens_of(outputs_of(driver, 1, [row], 5)) == expected


def plain_step(runner: Any, row: NewRow) -> None:
    assert runner.execute(StepPlan(step=1, new_rows=[row])).errors == []


class Scribbling:
    """Operations that overwrite every tensor they are allowed to, except their results."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, *norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = (one.clone() for one in self._ops.add_rms_norm(x, residual, *norm))
        x.fill_(torch.nan)
        residual.fill_(torch.nan)
        return normed, total


def test_a_model_reads_nothing_that_add_rms_norm_may_have_overwritten() -> None:
    plain, scribbled = tiny_llama("reference"), tiny_llama("reference")
    model = scribbled._compute._model
    assert isinstance(model, Decoder)
    model.ops = Scribbling(model.ops)  # type: ignore[assignment]
    plan = StepPlan(step=1, new_rows=[new_row(1, PROMPT, [0, 1, 2])], chunks=[Chunk(1, 0, len(PROMPT), True)])
    assert scribbled.execute(plan).outputs == plain.execute(plan).outputs
