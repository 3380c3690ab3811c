"""Structured output always conforms, and is the same alone, in a batch, preempted, replayed and with drafts."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tests.fakes import make_record
from tests.gateway.model_dir import EOS, byte_level_tokenizer
from tests.services.offline.schemas import SCHEMAS, Schema
from tests.services.offline.test_speculation import BACKENDS, Answers, run
from tests.worker.grammars.support import end, vocabulary
from tests.worker.models.checkpoints import NATIVE, make_model, save

from pagoda import LLM, GenerationFailed, SamplingParams
from pagoda_proto import grammars
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import FinishReason, RequestRecord
from pagoda_worker.config import WorkerConfig
from pagoda_worker.process.startup import load_runner
from pagoda_worker.step.runner import ModelRunner

VOCAB = 320  # a few logits more than there are tokens
PROMPT = [72, 101, 108, 108, 111]
AMBIGUOUS = grammars.lark(
    f"start: {' | '.join(f'r{i}' for i in range(200))}\n"
    + "\n".join(f'r{i}: r{(i + 1) % 200} r{(i + 7) % 200} | "h" | r{i * 3 % 200} "h"' for i in range(200))
)
"""It compiles and has a first mask, but becomes too complex with the first token."""
COLOURS = ["red", "green", "the world", "the hello", "grün"]


@functools.cache
def tiny_model() -> Any:
    return make_model("llama", NATIVE["llama"][1] | {"vocab_size": VOCAB, "eos_token_id": end()})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, which would follow no grammar by itself."""
    directory = tmp_path_factory.mktemp("tiny")
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    return save(tiny_model(), directory, torch.float32)


@pytest.fixture(scope="module")
def tiny_llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), kv_cache_gib=0.1, dtype="float32", kernels="torch") as llm:
        yield llm


@pytest.fixture(scope="module")
def demo_llm() -> Iterator[LLM]:
    with LLM(kv_cache_gib=0.1) as llm:
        yield llm


@pytest.fixture(scope="module", params=["tiny", "demo"])
def llm(request: pytest.FixtureRequest) -> LLM:
    found: LLM = request.getfixturevalue(f"{request.param}_llm")
    return found


def follows(text: str, schema: Schema) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_output_follows_its_schema(llm: LLM, temperature: float) -> None:
    params = [
        SamplingParams(
            temperature=temperature, n=4, seed=i, max_tokens=200, grammar=grammars.json_schema(schema), logprobs=0
        )
        for i, schema in enumerate(SCHEMAS.values())
    ]
    outputs = llm.generate(["Answer in JSON."] * len(params), params)
    assert len(outputs) == len(SCHEMAS) >= 24
    for name, schema, output in zip(SCHEMAS, SCHEMAS.values(), outputs, strict=True):
        for choice in output.outputs:
            assert choice.finish_reason == FinishReason.STOP, f"{name}: {choice.text!r}"
            follows(choice.text, schema)
        if temperature and name == "uuid":
            assert len({choice.text for choice in output.outputs}) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_expressions_texts_and_rules_are_followed_likewise(llm: LLM, temperature: float) -> None:
    forms: dict[str, Callable[[str], object]] = {
        grammars.regex("[a-f]{3}(/[0-9]{1,3}){1,2}z"): re.compile("[a-f]{3}(/[0-9]{1,3}){1,2}z").fullmatch,
        grammars.choice(COLOURS): COLOURS.__contains__,
        grammars.lark('start: "(" x ("," x){0,2} ")"\nx: /[xy]{2}/'): re.compile(
            r"\([xy]{2}(,[xy]{2}){0,2}\)"
        ).fullmatch,
    }
    params = [SamplingParams(temperature=temperature, n=3, seed=2, max_tokens=60, grammar=grammar) for grammar in forms]
    for fits, output in zip(forms.values(), llm.generate(["Say:"] * len(forms), params), strict=True):
        for choice in output.outputs:
            assert choice.finish_reason == FinishReason.STOP
            assert fits(choice.text), choice.text


def test_greedy_output_is_the_best_of_what_is_allowed(tiny_llm: LLM) -> None:
    """The test derives the allowed tokens from the texts, and takes the logits from transformers."""
    params = SamplingParams(temperature=0.0, max_tokens=30, grammar=grammars.choice(COLOURS))
    found = tiny_llm.generate([PROMPT], params)[0].outputs[0].token_ids
    model, ids, written = tiny_model().float(), list(PROMPT), b""
    for token in found:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        wholes = [text.encode() for text in COLOURS if text.encode().startswith(written)]
        fitting = [i for i, piece in vocabulary().items() if any(one.startswith(written + piece) for one in wholes)]
        fitting += [end()] if written in wholes else []
        if len({one[len(written) : len(written) + 1] for one in wholes}) > 1:  # otherwise the tokenizer decides
            assert token == max(fitting, key=lambda i: logits[i].item())
        assert token in fitting
        ids.append(token)
        written += vocabulary().get(token, b"")
    assert written.decode() in COLOURS


def test_log_probabilities_are_those_of_the_model_as_ever(tiny_llm: LLM) -> None:
    """They are raw: taken before the mask and every other change to the logits."""
    formed = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, grammar=grammars.choice(["hello"]))
    free = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    one, other = (tiny_llm.generate([PROMPT], params)[0].outputs[0] for params in (formed, free))
    assert one.token_ids != other.token_ids
    best = [sorted(output.logprobs[0].items(), key=lambda item: item[1].rank)[:5] for output in (one, other)]
    assert [(token, entry.logprob) for token, entry in best[0]] == [(token, entry.logprob) for token, entry in best[1]]


def test_a_length_cuts_and_an_end_may_have_to_wait(tiny_llm: LLM) -> None:
    cut = tiny_llm.generate([PROMPT], SamplingParams(max_tokens=3, grammar=grammars.regex("h{40}")))[0].outputs[0]
    assert (cut.finish_reason, len(cut.token_ids)) == (FinishReason.LENGTH, 3)
    late = SamplingParams(temperature=0.0, max_tokens=40, min_tokens=20, grammar=grammars.regex("[hw]*"))
    assert len(tiny_llm.generate([PROMPT], late)[0].outputs[0].token_ids) >= 20


@pytest.mark.parametrize(
    ("params", "code", "says"),
    [
        ({"grammar": grammars.json_schema({"not": {}})}, ErrorCode.INVALID_ARGUMENT, "/not: Unimplemented"),
        ({"grammar": grammars.lark("start: <nobody>")}, ErrorCode.INVALID_ARGUMENT, "unknown special token"),
        ({"grammar": grammars.regex("h"), "allowed_token_ids": (3,)}, ErrorCode.INVALID_ARGUMENT, "leave no token"),
        ({"grammar": grammars.regex("h"), "min_tokens": 3}, ErrorCode.INVALID_ARGUMENT, "leave no token"),
        ({"grammar": AMBIGUOUS}, ErrorCode.INVALID_ARGUMENT, "Current row has .* items"),
    ],
)
def test_what_cannot_go_on_ends_alone(tiny_llm: LLM, params: dict[str, Any], code: ErrorCode, says: str) -> None:
    fine = SamplingParams(temperature=0.0, max_tokens=60, grammar=grammars.json_schema(SCHEMAS["uuid"]))
    alone = tiny_llm.generate([PROMPT], fine)[0].outputs[0].token_ids
    bad = SamplingParams(**{"temperature": 1.5, "seed": 1, "max_tokens": 200} | params)
    with pytest.raises(GenerationFailed, match=says) as failed:
        tiny_llm.generate([PROMPT] * 3, [fine, bad, fine])
    assert failed.value.code is code
    assert [output and output.outputs[0].token_ids for output in failed.value.outputs] == [alone, None, alone]


def test_a_grammar_does_not_go_with_ignored_ends() -> None:
    with pytest.raises(PagodaError, match="ignore_eos"):
        SamplingParams(grammar="start: /a/", ignore_eos=True)


# --- the same tokens, however they came about ------------------------------------------------------------------------

MANNERS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.5, "n": 4, "logprobs": 0},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "n": 2},
    {"temperature": 0.8, "top_p": 0.9, "min_tokens": 6, "logit_bias": {34: 2.0}},
]


def make_records() -> list[RequestRecord]:
    """Grammars and sampling parameters mixed; every fourth request has no grammar."""
    forms = [grammars.json_schema(SCHEMAS[name]) for name in ("nested", "uuid", "list", "any of")]
    forms += [grammars.regex("([a-z]{2} ){12}"), grammars.choice(["hello world " * 8, "hello the " * 9])]
    return [
        make_record(
            [(i * 7 + k * 3) % 200 for k in range(9 + 5 * i)],
            request_id=f"s{i}", eos_token_ids=(end(),), seed=i, grammar="" if i % 4 == 3 else forms[i % len(forms)],
            **{"max_tokens": 48} | MANNERS[i % len(MANNERS)],
        )
        for i in range(12)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runners(tiny: Path) -> Callable[..., ModelRunner]:
    @functools.cache
    def make(kernels: str, speculation: str = "", num_blocks: int = 256) -> ModelRunner:
        config = WorkerConfig(
            model=str(tiny), kernels=kernels, num_blocks=num_blocks, block_size=16, threads=1, dtype="bfloat16",
            max_model_len=128, speculation=speculation,
        )  # fmt: skip
        return load_runner(config, lambda done, total: None)

    return make


@pytest.fixture(scope="module", params=BACKENDS)
def kernels(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def alone(kernels: str, runners: Callable[..., ModelRunner]) -> dict[tuple[str, int], list[Any]]:
    found: dict[tuple[str, int], list[Any]] = {}
    for record in make_records():
        found |= run(runners(kernels), [record], speculation_tokens=0).choices
    assert sum(ending == (FinishReason.STOP, end()) for _, _, ending in found.values()) > 8
    return found


def check(answers: Answers, alone: dict[tuple[str, int], list[Any]]) -> None:
    for key, expected in alone.items():
        assert answers.choices[key] == expected, f"{key} differs"


def check_some(answers: Answers, alone: dict[tuple[str, int], list[Any]]) -> None:
    for key, found in answers.choices.items():
        assert found == alone[key], f"{key} differs"


def test_together(kernels: str, runners: Callable[..., ModelRunner], alone: dict[tuple[str, int], list[Any]]) -> None:
    check(run(runners(kernels), make_records(), chunk_size=7), alone)


def test_preempted(kernels: str, runners: Callable[..., ModelRunner], alone: dict[tuple[str, int], list[Any]]) -> None:
    answers = run(runners(kernels, num_blocks=12), make_records())
    check(answers, alone)
    assert answers.totals["preemptions"] > 0


def test_replayed(kernels: str, runners: Callable[..., ModelRunner], alone: dict[tuple[str, int], list[Any]]) -> None:
    answers = run(runners(kernels), make_records(), crashes=(4, 9, 21, 40))
    check(answers, alone)
    assert answers.totals["replays"] > 0


def test_forced_tokens_come_as_drafts_that_hold(
    kernels: str, runners: Callable[..., ModelRunner], alone: dict[tuple[str, int], list[Any]]
) -> None:
    """Alone and in a batch, they give the same tokens in fewer steps."""
    records = make_records()
    plain = run(runners(kernels), records, speculation_tokens=0)
    assert "draft_tokens" not in plain.totals
    answers = run(runners(kernels), records, speculation_tokens=64)
    check(answers, alone)
    assert answers.totals["accepted_draft_tokens"] > 0
    assert 5 * answers.totals["accepted_draft_tokens"] > 4 * answers.totals["draft_tokens"]
    assert answers.totals["steps"] < plain.totals["steps"]
    for record in records[:4]:
        check_some(run(runners(kernels), [record]), alone)


def test_forced_tokens_preempted_and_replayed(
    kernels: str, runners: Callable[..., ModelRunner], alone: dict[tuple[str, int], list[Any]]
) -> None:
    answers = run(runners(kernels, num_blocks=12), make_records(), crashes=(5, 17), speculation_tokens=64)
    check(answers, alone)
    assert answers.totals["accepted_draft_tokens"] > 0


def test_with_drafts(
    kernels: str, runners: Callable[..., ModelRunner], alone: dict[tuple[str, int], list[Any]]
) -> None:
    """Each draft is checked under the mask of its own position."""
    forced = run(runners(kernels), make_records(), speculation_tokens=64)
    answers = run(runners(kernels, "suffix"), make_records(), speculation_tokens=64)
    check(answers, alone)
    assert answers.totals["accepted_draft_tokens"] > forced.totals["accepted_draft_tokens"]


def test_with_drafts_preempted_and_replayed(
    kernels: str, runners: Callable[..., ModelRunner], alone: dict[tuple[str, int], list[Any]]
) -> None:
    forced = run(runners(kernels, num_blocks=12), make_records(), crashes=(5, 17), speculation_tokens=64)
    answers = run(runners(kernels, "suffix", num_blocks=12), make_records(), crashes=(5, 17), speculation_tokens=64)
    check(answers, alone)
    assert answers.totals["accepted_draft_tokens"] > forced.totals["accepted_draft_tokens"]
