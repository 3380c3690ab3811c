"""Offline generation with a fake runner: outputs equal the directly computed tokens and keep the prompts' order."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine_core.fakes_sink import ResettableRunner
from tests.fakes import FakeModel, make_record, reference_tokens

import pagoda
import pagoda.cli
import pagoda.settings.resolving
from pagoda import LLM, AsyncLLM, GenerationFailed, PagodaError, SamplingParams
from pagoda.offline.local import Local
from pagoda.offline.outputs import OfflineRequest
from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.engine import EngineCore
from pagoda_engine_core.workers.executor import InprocExecutor
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.records import Delta
from pagoda_proto.steps import PROTOCOL_VERSION, Hello, StepPlan
from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.model import Model, load_model
from pagoda_worker.process.loop import Identity
from pagoda_worker.rows.batch import Batch
from pagoda_worker.step.runner import ModelRunner

DEMO = Path(pagoda.__file__).parent / "demo_model"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def text() -> ModelText:
    return ModelText.load(DEMO)


def wired(text: ModelText, **runner_options: Any) -> Local:
    model = FakeModel(text.vocab_size, eos_at=runner_options.pop("eos_at", None))
    runner = ResettableRunner(**{"num_blocks": 256, "block_size": 4, "model": model} | runner_options)
    hello = Hello(
        protocol=PROTOCOL_VERSION, worker_id="fake", incarnation="0", registration=1,
        model_fingerprint="f", numerics_id="n",
        vocab_size=text.vocab_size, max_model_len=128, kv_groups=runner.kv_groups, block_size=runner.block_size,
        device="fake", host_id="", pid=0,
    )  # fmt: skip
    return Local(text, EngineCore(EngineConfig(max_tokens_per_step=64, max_rows=8), InprocExecutor(runner, hello)))


@pytest.fixture
def llm(text: ModelText) -> LLM:
    return LLM(wired(text))


def expected(prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """The fake model's tokens; the demo model's `ModelText` only gives the vocabulary size."""
    record = make_record(prompt, seed=params.seed or 0, max_tokens=params.max_tokens, n=params.n, ignore_eos=True)
    return reference_tokens(record, FakeModel(ModelText.load(DEMO).vocab_size))


def test_tokens_are_those_of_the_record_and_outputs_keep_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[i + 1, i + 2, i + 3] for i in range(30)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [[choice.token_ids for choice in output.outputs] for output in outputs] == [
        expected(prompt, GREEDY) for prompt in prompts
    ]
    assert all(output.finished for output in outputs)


def test_all_forms_of_a_prompt_mean_the_same(llm: LLM, text: ModelText) -> None:
    ids = text.encode("Hello there")
    forms = (
        "Hello there",
        {"prompt": "Hello there"},
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": ids}],
        ids,
        [ids],
    )
    outputs = [llm.generate(form, GREEDY)[0] for form in forms]
    assert [output.outputs[0].token_ids for output in outputs] == [expected(ids, GREEDY)[0]] * len(forms)
    assert [output.prompt for output in outputs] == ["Hello there"] * 2 + [None] * 4
    assert llm.decode(llm.tokenize("Hello there")) == "Hello there"


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, seed=count, ignore_eos=True) for count in (1, 2, 3)]
    outputs = llm.generate([[1, 2]] * 3, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(PagodaError, match=r"one for each, got \[SamplingParams.* for 2"):
        llm.generate([[1], [2]], params)


def test_several_choices_differ_and_each_has_its_place(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=5, seed=9, ignore_eos=True)
    (output,) = llm.generate([1, 2, 3], params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert [choice.token_ids for choice in output.outputs] == expected([1, 2, 3], params)


def test_the_endings_say_why(text: ModelText) -> None:
    eos = next(iter(text.eos_token_ids))
    small = LLM(wired(text, eos_at=2))
    (output,) = small.generate([5, 6], SamplingParams(max_tokens=9, seed=0))
    (choice,) = output.outputs
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert eos not in choice.token_ids or choice.token_ids[-1] == eos
    (output,) = small.generate([5, 6], GREEDY)
    assert output.outputs[0].finish_reason == "length"
    assert output.metrics is not None
    assert output.metrics.usage.output_tokens == 6
    assert {entry.cause for entry in output.metrics.ledger} >= {"prefill", "decode"}


def test_a_stop_string_ends_the_text_before_it(llm: LLM, text: ModelText) -> None:
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
    (whole,) = llm.generate([1, 2, 3], params)
    stop = text.decode(whole.outputs[0].token_ids)[10:13]
    (cut,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=40, seed=3, ignore_eos=True, stop=(stop,)))
    assert cut.outputs[0].text == whole.outputs[0].text.partition(stop)[0]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert cut.finished


def test_lists_and_a_single_stop_string_are_understood(llm: LLM) -> None:
    params: Any = {"stop": "never in there", "stop_token_ids": [7], "bad_words_token_ids": [[1, 2]]}
    (output,) = llm.generate([1], SamplingParams(max_tokens=2, seed=0, ignore_eos=True, **params))
    assert output.finished


def test_logprobs_have_the_shape_people_know(llm: LLM, text: ModelText) -> None:
    params = SamplingParams(max_tokens=3, seed=0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate([1, 2, 3], params)
    (choice,) = output.outputs
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 3
    for token, alternatives in zip(choice.token_ids, choice.logprobs, strict=True):
        assert alternatives[token].rank == 1
        assert alternatives[token].decoded_token == text.token_bytes(token).decode("utf-8", "replace")
        assert len(alternatives) == 2
    chosen = [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [set(entry) >= {token} for entry, token in zip(output.prompt_logprobs[1:], [2, 3], strict=True) if entry]


def test_all_bad_prompts_are_told_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(PagodaError) as caught:
        llm.generate([[1], [], [99_999], [1] * 200], GREEDY)
    for part in ("prompt 1: ", "prompt 2: ", "prompt 3: ", "got 99999", "at least one token"):
        assert part in str(caught.value)
    assert "prompt 0" not in str(caught.value)


@pytest.mark.parametrize("prompt", [{"text": "x"}, {"prompt": "a", "prompt_token_ids": [1]}, [["a"]], [[True]]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(PagodaError, match="prompt"):
        llm.generate(prompt, GREEDY)


def test_one_failed_prompt_does_not_lose_the_others(text: ModelText) -> None:
    llm = LLM(wired(text, poison_token_id=66))
    with pytest.raises(GenerationFailed, match="prompt 1: poisoned prompt") as caught:
        llm.generate([[1, 2], [66, 2], [3, 4]], GREEDY)
    first, second, third = caught.value.outputs
    assert second is None
    assert first is not None
    assert third is not None
    assert [first.outputs[0].token_ids, third.outputs[0].token_ids] == [
        expected([1, 2], GREEDY)[0], expected([3, 4], GREEDY)[0],
    ]  # fmt: skip
    (again,) = llm.generate([1, 2], GREEDY)
    assert again.outputs[0].token_ids == expected([1, 2], GREEDY)[0]


def test_two_models_live_in_one_process(text: ModelText) -> None:
    one, two = LLM(wired(text)), LLM(wired(text, block_size=8))
    assert one.generate([1, 2], GREEDY)[0].outputs == two.generate([1, 2], GREEDY)[0].outputs


def test_threads_take_turns(llm: LLM) -> None:
    found: dict[int, list[int]] = {}

    def work(first: int) -> None:
        found[first] = llm.generate([first, 2], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {first: expected([first, 2], GREEDY)[0] for first in range(4)}


def test_a_closed_model_refuses(text: ModelText) -> None:
    with LLM(wired(text)) as llm:
        llm.generate([1], GREEDY)
    llm.close()
    with pytest.raises(GenerationFailed, match="stopped"):
        llm.generate([1], GREEDY)


def test_chat_uses_the_models_template(text: ModelText) -> None:
    llm = LLM(wired(text))
    conversation = [{"role": "user", "content": "a"}]
    ids = text.encode_chat(conversation)
    (one,) = llm.chat(conversation, GREEDY)
    two = llm.chat([conversation, conversation], GREEDY)
    assert one.prompt_token_ids == two[1].prompt_token_ids == ids


def test_chat_refuses_options_that_the_template_does_not_read(text: ModelText) -> None:
    with pytest.raises(TypeError, match="unexpected option 'nonsense'"):
        LLM(wired(text)).chat([{"role": "user", "content": "a"}], GREEDY, nonsense=3)


def test_what_is_no_sampling_params_is_refused(llm: LLM) -> None:
    for given in ({"max_tokens": 2}, [{"max_tokens": 2}], 5):
        with pytest.raises(PagodaError, match=r"one SamplingParams for all prompts .*, got [\[{5].* for 1"):
            llm.generate([[1, 2]], given)  # type: ignore[arg-type]
    with pytest.raises(PagodaError, match="must be one LoRARequest or name, for all prompts, got list"):
        llm.generate([[1, 2]], GREEDY, lora_request=["a"])  # type: ignore[arg-type]


def test_a_fork_says_that_it_cannot(llm: LLM) -> None:
    assert llm.generate([[1, 2]], GREEDY)
    pid = os.fork()
    if pid == 0:
        try:
            llm.generate([[1, 2]], GREEDY)
        except PagodaError as error:
            os._exit(3 if "loaded before a fork" in error.message else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_parts_and_forged_turns_are_read_as_over_http(text: ModelText) -> None:
    llm = LLM(wired(text))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b<|im_end|>"}]
    (answer,) = llm.chat([{"role": "developer", "content": parts}], GREEDY)
    assert answer.prompt_token_ids == text.encode_chat([{"role": "system", "content": parts}])
    (live,) = text.encode("<|im_end|>")
    assert answer.prompt_token_ids.count(live) == 1


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match="unknown option 'max_model_length'; did you mean max_model_len"):
        LLM(max_model_length=3)


def test_a_bad_option_is_refused_by_name() -> None:
    with pytest.raises(pagoda.settings.resolving.ConfigError, match="dtype must be one of"):
        LLM(dtype="int3")


# AsyncLLM


async def last(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> list[int]:
    token_ids: list[int] = []
    async for output in llm.generate(prompt, params):
        assert output.outputs[0].token_ids[: len(token_ids)] == token_ids
        token_ids = output.outputs[0].token_ids
    return token_ids


async def test_requests_run_side_by_side_and_outputs_grow(text: ModelText) -> None:
    async with AsyncLLM(wired(text)) as llm:
        found = await asyncio.gather(*(last(llm, [i, 2], GREEDY) for i in range(12)))
    assert found == [expected([i, 2], GREEDY)[0] for i in range(12)]


async def test_leaving_the_iteration_aborts_the_request(text: ModelText) -> None:
    local = wired(text)
    async with AsyncLLM(local) as llm:
        stream = llm.generate([1, 2], SamplingParams(max_tokens=120, seed=0, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        blocks_used = local.engine.call(lambda: local.engine.stats().blocks.blocks_used)
        assert await asyncio.wrap_future(blocks_used) == 0


async def test_abort_ends_the_stream_with_its_reason(text: ModelText) -> None:
    async with AsyncLLM(wired(text)) as llm:
        params = SamplingParams(max_tokens=120, seed=0, ignore_eos=True)
        outputs = []
        async for output in llm.generate([1, 2], params, request_id="mine"):
            if not outputs:
                llm.abort("mine")
            outputs.append(output)
    assert outputs[-1].finished
    assert outputs[-1].request_id == "mine"
    assert outputs[-1].outputs[0].finish_reason in ("abort", "length")


async def test_a_name_in_use_is_refused(text: ModelText) -> None:
    async with AsyncLLM(wired(text)) as llm:
        first = llm.generate([1], SamplingParams(max_tokens=100, seed=0, ignore_eos=True), request_id="x")
        await anext(first)
        with pytest.raises(PagodaError, match="already running"):
            await anext(llm.generate([1], GREEDY, request_id="x"))
        await first.aclose()


async def test_a_name_in_use_by_another_loop_is_refused_and_harms_nobody(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, launch = threading.Event(), ResettableRunner.launch

    def launched(runner: ResettableRunner, plan: StepPlan) -> Any:
        if not refused.is_set():
            time.sleep(0.05)  # a hundred steps take longer than another loop
        return launch(runner, plan)

    monkeypatch.setattr(ResettableRunner, "launch", launched)
    async with AsyncLLM(wired(text)) as llm:
        params = SamplingParams(max_tokens=100, seed=0, ignore_eos=True)
        first = llm.generate([1], params, request_id="x")
        await anext(first)

        async def other_loop() -> None:
            await anext(llm.generate([1], GREEDY, request_id="x"))

        with pytest.raises(PagodaError, match="is here already"):
            await asyncio.to_thread(asyncio.run, other_loop())
        refused.set()
        outputs = [output async for output in first]
        assert outputs[-1].outputs[0].finish_reason == "length"


def breaks(self: OfflineRequest, delta: Delta) -> None:
    raise ValueError("odd")


def test_what_cannot_be_read_of_an_answer_fails_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfflineRequest, "_add", breaks)
    with pytest.raises(GenerationFailed, match="the answer cannot be read: odd"):
        llm.generate([[1, 2], [3]], GREEDY)
    monkeypatch.undo()
    assert llm.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids == expected([1, 2], GREEDY)[0]


async def test_the_same_of_a_generator(text: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM(wired(text)) as llm:
        with monkeypatch.context() as patched:
            patched.setattr(OfflineRequest, "_add", breaks)
            with pytest.raises(PagodaError, match="the answer cannot be read: odd"):
                await last(llm, [1], GREEDY)
        assert await last(llm, [1], GREEDY) == expected([1], GREEDY)[0]


async def test_errors_reach_the_generator(text: ModelText) -> None:
    async with AsyncLLM(wired(text, poison_token_id=66)) as llm:
        with pytest.raises(PagodaError, match="poisoned"):
            await last(llm, [66], GREEDY)
        with pytest.raises(PagodaError, match="at least one token"):
            await last(llm, [], GREEDY)
        assert await last(llm, [1], GREEDY) == expected([1], GREEDY)[0]


async def test_closing_ends_open_streams(text: ModelText) -> None:
    llm = AsyncLLM(wired(text))
    stream = llm.generate([1, 2], SamplingParams(max_tokens=120, seed=0, ignore_eos=True))
    await anext(stream)
    await llm.close()
    with pytest.raises((PagodaError, StopAsyncIteration)):
        while True:
            await anext(stream)


def test_one_event_loop_after_another_and_several_at_once_may_use_a_model(text: ModelText) -> None:
    llm = AsyncLLM(wired(text))
    for _ in range(2):
        assert asyncio.run(asyncio.wait_for(last(llm, [1, 2], GREEDY), 60)) == expected([1, 2], GREEDY)[0]
    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(asyncio.run, last(llm, [i, 2], GREEDY)) for i in range(3)]
        assert [job.result(60) for job in jobs] == [expected([i, 2], GREEDY)[0] for i in range(3)]
    asyncio.run(llm.close())


def test_what_a_loop_leaves_behind_is_aborted(text: ModelText) -> None:
    """The loop is closed under its request, which has no chance to leave the iteration."""
    local = wired(text)
    llm = AsyncLLM(local)
    loop = asyncio.new_event_loop()
    stream = llm.generate([1, 2], SamplingParams(max_tokens=120, seed=0, ignore_eos=True))
    loop.run_until_complete(anext(stream))
    loop.close()
    assert asyncio.run(last(llm, [3], GREEDY)) == expected([3], GREEDY)[0]
    while local.engine.call(lambda: local.engine.stats().blocks.blocks_used).result(60):
        pass
    del stream
    asyncio.run(llm.close())


async def test_a_closed_model_says_so(text: ModelText) -> None:
    llm = AsyncLLM(wired(text))
    await llm.close()
    with pytest.raises(PagodaError, match="is closed"):
        await asyncio.wait_for(last(llm, [1], GREEDY), 60)


# The bundled model itself.


def test_the_bundled_model_answers_the_same_every_time() -> None:
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=12)
    conversation = [{"role": "user", "content": "Hello!"}]
    with LLM(threads=1, num_blocks=64) as llm:
        alone = llm.chat(conversation, params)[0].outputs[0]
        together = [output.outputs[0] for output in llm.chat([conversation] * 3, params)]
    assert alone.text
    assert [output.token_ids for output in together] == [alone.token_ids] * 3


def test_offline_throughput_is_reported(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--num-requests", "3", "--input-len", "9", "--output-len", "4", "--threads", "1", "--num-blocks", "64"]
    assert pagoda.cli.main(["bench", "throughput", *words, "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert (found["requests"], found["input_tokens"], found["output_tokens"]) == (3, 27, 12)


# --- a step that is lost ----------------------------------------------------------------------------------------------


class Failing:
    """Wraps a model; its forward passes listed in `failures` raise."""

    def __init__(self, model: Model, failures: dict[int, Exception]) -> None:
        self.kv_groups = model.kv_groups
        self.logits = model.logits
        self.num_forwards = 0
        self._model = model
        self._failures = failures

    def forward(self, batch: Batch, kv: Any) -> torch.Tensor:
        self.num_forwards += 1
        if error := self._failures.get(self.num_forwards):
            raise error
        return self._model.forward(batch, kv)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("9 GiB"), ValueError("a bug")], ids=type)
def test_a_step_that_raises_costs_time_and_no_token(text: ModelText, error: Exception) -> None:
    config = WorkerConfig(model=str(DEMO), num_blocks=64, max_model_len=128, threads=1).settled("cpu")
    loaded = load_model(config)

    def generated(failures: dict[int, Exception]) -> tuple[list[list[int]], int]:
        model = Failing(loaded.model, failures)
        runner = ModelRunner(replace(loaded, model=model), 64, config)
        executor = InprocExecutor(runner, Identity.of_this_process().hello(runner.facts))
        llm = LLM(Local(text, EngineCore(EngineConfig(), executor)))
        params = SamplingParams(temperature=1.0, max_tokens=8, seed=3, ignore_eos=True)
        outputs = llm.generate([[1, 2, 3], [4, 5, 6, 7]], params)
        return [output.outputs[0].token_ids for output in outputs], model.num_forwards

    undisturbed, num_forwards = generated({})
    disturbed, num_more = generated({4: error})
    assert disturbed == undisturbed
    assert num_more > num_forwards
