"""Speculation changes how many steps a generation takes and nothing else: tokens, log-probabilities and endings are
those of plain decoding, bit for bit, with the real scheduler, the real runner and real (small) models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes import make_record
from tests.gateway.model_dir import byte_level_tokenizer
from tests.worker.models.checkpoints import NATIVE, VOCAB, make_model, save

from pagoda import LLM, SamplingParams
from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.engine import EngineCore
from pagoda_engine_core.grammars.turns import Told
from pagoda_engine_core.grammars.verdicts import Verdict
from pagoda_engine_core.workers.executor import InprocExecutor
from pagoda_proto.errors import PagodaError
from pagoda_proto.records import Delta, NextTokens, RequestRecord
from pagoda_proto.steps import StepResult
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.process.loop import Identity
from pagoda_worker.process.startup import load_runner
from pagoda_worker.step.pending import Pending
from pagoda_worker.step.runner import ModelRunner

BACKENDS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(not LIBRARY.exists(), reason="no C++ compiler here")),
]
SPECULATION = ["suffix", "twin", "near", "far", "narrow"]
"""Suffixes, and draft models: the model itself, with noise on its weights, another one, and itself drafting among few
tokens."""
NARROW = 24


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_records(cache_salt: str = "") -> list[RequestRecord]:
    """Cases that drafts could break: state that sampling reads, endings among the drafts, several choices."""
    few = tuple(range(20, 24))  # an output of four kinds of tokens repeats itself, by chance or for good
    manners: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "allowed_token_ids": few, "logprobs": 0},
        {"temperature": 0.7, "seed": 5, "logprobs": 1, "top_p": 0.9},
        {"temperature": 1.0, "allowed_token_ids": few, "n": 3, "seed": 6, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0.8, "allowed_token_ids": few, "frequency_penalty": 0.3, "seed": 7, "logprobs": 0},
        {"temperature": 0.0, "allowed_token_ids": few, "stop_token_ids": (22,), "min_tokens": 9, "max_tokens": 40},
        {"temperature": 1.0, "allowed_token_ids": few, "stop_token_ids": (23,), "seed": 8, "n": 2, "max_tokens": 40},
        {"temperature": 1.0, "allowed_token_ids": few, "bad_words_token_ids": ((20, 21), (22, 22, 23)), "seed": 9},
        {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 1, "max_tokens": 5},
    ]
    records, common = [], {"max_tokens": 24, "cache_salt": cache_salt}
    for i, manner in enumerate(manners):
        text = ids(11 + 7 * i, i % 3) * (1 + i % 2)  # every other prompt repeats its text
        records.append(make_record(text, request_id=f"r{i}", eos_token_ids=(2,), **(common | manner)))
    return records


@dataclass
class Answers:
    """What a client received, and the engine's totals."""

    choices: dict[tuple[str, int], list[Any]] = field(default_factory=dict)  # tokens, logprobs, ending
    prompts: dict[str, Any] = field(default_factory=dict)
    num_ended: int = 0
    totals: dict[str, int] = field(default_factory=dict)

    def accepted(self, request_id: str, attempt: int, stream: int) -> None: ...

    def rejected(self, request_id: str, attempt: int, error: PagodaError, retry_after_s: float) -> None:
        raise error

    def migrate(self, request_id: str, attempt: int, reason: str) -> None:
        raise AssertionError(reason)

    def next_tokens(self, tokens: NextTokens) -> None:
        self.deltas(tokens.deltas())

    def deltas(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            choice = self.choices.setdefault((delta.request_id, delta.choice), [[], [], None])
            assert delta.result.first_index == len(choice[0])
            choice[0] += delta.result.token_ids
            choice[1] += delta.result.logprobs or []
            if delta.result.prompt_logprobs is not None:
                self.prompts[delta.request_id] = delta.result.prompt_logprobs
            if delta.finish_reason is not None:
                choice[2] = (delta.finish_reason, delta.result.stop_token_id)
            self.num_ended += delta.ends_request


class Crashing:
    """A runner that fails when some of its steps are collected."""

    def __init__(self, runner: ModelRunner, at: tuple[int, ...]) -> None:
        self._runner = runner
        self._at = at
        self._count = 0
        self.depth, self.launch, self.reset = runner.depth, runner.launch, runner.reset

    def collect(self, launched: Pending) -> StepResult:
        self._count += 1
        result = self._runner.collect(launched)
        if self._count in self._at:
            raise RuntimeError("killed")
        return result


class Trusting:
    """Accepts every grammar at once. With a real checker, its time would decide which request starts when."""

    def check(self, grammar: str, tenant: str, told: Told) -> None:
        told(grammar, Verdict(None, final=True))

    def close(self) -> None:
        pass


def run(runner: ModelRunner, records: list[RequestRecord], crashes: tuple[int, ...] = (), **config: Any) -> Answers:
    """Run all records at once. No plan depends on time, so that steps can be counted."""
    runner.reset()
    hello = Identity.of_this_process("w").hello(runner.facts)
    executor = InprocExecutor(Crashing(runner, crashes), hello)
    engine = EngineCore(
        EngineConfig(**({"max_attempts": 9, "prompt_step_s": 0.0} | config)), executor, checker=Trusting()
    )
    answers = Answers()
    for record in records:
        engine.submit(record, answers)
    while answers.num_ended < len(records):
        engine.step(0.0)
    answers.totals = engine.stats().totals
    engine.close()
    return answers


Runners = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def path(name: str, model: Any) -> Path:
        directory = tmp_path_factory.mktemp(name)
        byte_level_tokenizer().save(str(directory / "tokenizer.json"))
        return save(model, directory, torch.bfloat16)

    near = make_model(*NATIVE["llama"])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02 * parameter.abs().mean())
    other = make_model("llama", NATIVE["llama"][1] | {"num_hidden_layers": 1}, seed=8)
    return {
        "twin": (twin := path("twin", make_model(*NATIVE["llama"]))),
        "near": path("near", near),
        "far": path("far", other),
        "narrow": twin,
    }


@pytest.fixture(scope="module")
def runners(checkpoints: dict[str, Path]) -> Runners:
    @functools.cache
    def make(kernels: str, speculation: str = "", num_blocks: int = 256) -> ModelRunner:
        drafting: dict[str, Any] = {"speculation": speculation}
        if speculation in checkpoints:
            drafting = {"speculation": "draft-model", "draft_model": str(checkpoints[speculation])}
            drafting |= {"draft_vocab_size": NARROW} if speculation == "narrow" else {}
        config = WorkerConfig(
            model=str(checkpoints["twin"]), kernels=kernels, num_blocks=num_blocks, block_size=16, threads=1,
            max_model_len=min(256, num_blocks * 16), **drafting,
        )  # fmt: skip
        return load_runner(config, lambda done, total: None)

    return make


@pytest.fixture(scope="module", params=BACKENDS)
def kernels(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def plain(kernels: str, runners: Runners) -> Answers:
    """The answers to each request alone, without speculation."""
    answers = Answers()
    for record in make_records():
        one = run(runners(kernels), [record])
        answers.choices |= one.choices
        answers.prompts |= one.prompts
    assert len(answers.choices) == 13
    return answers


def check(answers: Answers, plain: Answers, drafts: bool = True) -> None:
    for key, expected in plain.choices.items():
        assert answers.choices[key] == expected, f"{key} differs"
    assert answers.prompts == plain.prompts
    assert (answers.totals.get("draft_tokens", 0) > 0) == drafts


@pytest.mark.parametrize("speculation", SPECULATION)
def test_alone(speculation: str, kernels: str, runners: Runners, plain: Answers) -> None:
    drafted: dict[str, tuple[int, int]] = {}
    for record in make_records():
        one = run(runners(kernels, speculation), [record])
        for key, choice in one.choices.items():
            assert choice == plain.choices[key], f"{key} differs"
        assert one.prompts.get(record.request_id) == plain.prompts.get(record.request_id)
        drafted[record.request_id] = one.totals.get("draft_tokens", 0), one.totals.get("accepted_draft_tokens", 0)
    assert sum(accepted for _, accepted in drafted.values()) > 0 or speculation == "far"
    assert any(accepted < tried for tried, accepted in drafted.values())
    if speculation == "twin":
        assert drafted["r0"][1] == drafted["r0"][0] > 15, (
            "greedy without processing: what the twin says, the model says"
        )


@pytest.mark.parametrize("speculation", SPECULATION)
@pytest.mark.parametrize("chunk_size", [7, 512])
def test_together(speculation: str, chunk_size: int, kernels: str, runners: Runners, plain: Answers) -> None:
    """Thirteen rows share the drafts of a step; prompts are computed in chunks."""
    runner = runners(kernels, speculation)
    check(run(runner, make_records(), chunk_size=chunk_size, speculation_tokens=64), plain)


@pytest.mark.parametrize("speculation", ["suffix", "near"])
def test_after_a_prefix_hit(speculation: str, kernels: str, runners: Runners) -> None:
    """The second time the prompt and the first answer come from the cache."""
    first = make_record(ids(40, 1), request_id="first", temperature=0.0, max_tokens=40, allowed_token_ids=(20, 21, 22))
    alone = run(runners(kernels), [first]).choices["first", 0]
    again = make_record(
        first.prompt_token_ids + alone[0], request_id="again", temperature=0.0, max_tokens=30, logprobs=1
    )
    expected = run(runners(kernels), [again]).choices["again", 0]
    runner = runners(kernels, speculation)
    runner.reset()
    hello = Identity.of_this_process("w").hello(runner.facts)
    engine, answers = EngineCore(EngineConfig(), InprocExecutor(runner, hello)), Answers()
    for count, record in enumerate((first, again), 1):
        engine.submit(record, answers)
        while answers.num_ended < count:
            engine.step(0.0)
    assert engine.stats().totals["cached_prompt_tokens"] >= 64
    assert answers.choices["first", 0] == alone
    assert answers.choices["again", 0] == expected


@pytest.mark.parametrize("speculation", SPECULATION)
def test_on_a_tiny_block_pool(speculation: str, kernels: str, runners: Runners) -> None:
    """Three rows begin with room for drafts; then they outgrow the pool, are preempted and computed again."""
    few = {"max_tokens": 60, "allowed_token_ids": (20, 21, 22), "logprobs": 0}
    records = [make_record(ids(20 + i, i), request_id=f"{i}", temperature=0.4 * i, seed=i, **few) for i in range(3)]
    answers = run(runners(kernels, speculation, 9), records)
    for record in records:
        assert answers.choices[record.request_id, 0] == run(runners(kernels), [record]).choices[record.request_id, 0]
    assert answers.totals["preemptions"] > 0
    assert answers.totals["draft_tokens"] > 0


@pytest.mark.parametrize("speculation", ["suffix", "near"])
def test_after_a_crash(speculation: str, kernels: str, runners: Runners, plain: Answers) -> None:
    """The runner computes a step, then loses its result and all its state. Nothing was said before with this salt, or
    there would be too few steps."""
    crashes = (2, 5, 9, 14, 20)
    answers = run(runners(kernels, speculation), make_records("crashing"), crashes, speculation_tokens=64)
    check(answers, plain)
    assert answers.totals["worker_deaths"] == len(crashes)


def test_many_rows_have_no_drafts(kernels: str, runners: Runners, plain: Answers) -> None:
    records = make_records()
    answers = run(runners(kernels, "twin"), records, speculation_tokens=1)
    check(answers, plain, drafts=False)


# --- what it is for --------------------------------------------------------------------------------------------------


def totals_of(runner: ModelRunner, **params: Any) -> dict[str, int]:
    """Of one request, with a salt with which nothing was said before."""
    record = make_record(ids(30, 4), max_tokens=160, cache_salt=f"{params}", **params)
    return run(runner, [record]).totals


def test_text_that_repeats_takes_fewer_steps(runners: Runners) -> None:
    totals = totals_of(runners("torch", "suffix"), allowed_token_ids=(20,))
    assert totals["accepted_draft_tokens"] == totals["draft_tokens"] > 120
    assert totals["steps"] < 40


def test_text_that_does_not_repeat_costs_nothing(runners: Runners) -> None:
    totals = totals_of(runners("torch", "suffix"), temperature=5.0, seed=3)
    assert totals.get("draft_tokens", 0) <= 3
    assert totals["steps"] <= 161


def test_a_draft_model_that_is_never_right_is_seldom_asked(runners: Runners) -> None:
    totals = totals_of(runners("torch", "far"), temperature=5.0, seed=3)
    assert 1 <= totals["draft_tokens"] <= 8
    assert totals["steps"] <= 161


# --- a draft that gives NaN ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_a_hole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that computes NaN for token 9, which it never outputs."""
    model = make_model(*NATIVE["llama3"])
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = torch.nan
    return save(model, tmp_path_factory.mktemp("hole"), torch.bfloat16)


def hole_runner(path: Path, kernels: str, guesses: list[int]) -> tuple[ModelRunner, list[int]]:
    """A runner whose drafts are always `guesses`; the list counts how many were tried."""
    config = WorkerConfig(model=str(path), kernels=kernels, num_blocks=64, block_size=16, threads=1)
    tried: list[int] = []

    class Guessing:
        caches = ()
        reads_all = True

        def draft(self, work: Any) -> dict[int, Any]:
            found = {row.row_id: torch.tensor(guesses[: c.num_drafts]).numpy() for row, c in work if c.num_drafts}
            tried.extend(map(len, found.values()))
            return found

        def learn(self, row: Any, num_drafted: int, num_accepted: int) -> int:
            return len(guesses)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pagoda_worker.process.startup.make_drafter", lambda *_: Guessing())
        return load_runner(config, lambda done, total: None), tried


def test_a_draft_that_makes_no_number_harms_nobody(with_a_hole: Path, kernels: str) -> None:
    others = tuple(i for i in range(VOCAB) if i != 9)
    record = make_record(
        ids(20, 2), request_id="r", temperature=0.0, max_tokens=40, logprobs=2, allowed_token_ids=others
    )
    record.prompt_token_ids[:] = [token if token != 9 else 10 for token in record.prompt_token_ids]
    expected = run(hole_runner(with_a_hole, kernels, [])[0], [record]).choices
    runner, tried = hole_runner(with_a_hole, kernels, [9, 5, 9])
    assert run(runner, [record]).choices == expected
    assert len(tried) > 30


# --- where users meet it ---------------------------------------------------------------------------------------------


@pytest.fixture
def llm(checkpoints: dict[str, Path]) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def make(**options: Any) -> LLM:
        opened.append(LLM(str(checkpoints["twin"]), num_blocks=64, max_model_len=256, threads=1, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_the_offline_engine_takes_the_options(llm: Callable[..., LLM], checkpoints: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
    outputs = []
    for options in (
        {},
        {"speculation": "suffix", "max_drafts": 4},
        {"speculation": "draft-model", "draft_model": str(checkpoints["near"])},
    ):
        (output,) = llm(**options).generate([ids(20, 0) * 2], params, use_tqdm=False)
        outputs.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert all(one == outputs[0] for one in outputs)
