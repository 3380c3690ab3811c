"""The device samples rows with grammars, under masks uploaded as bits, as the host would."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from llguidance import LLTokenizer
from tests.gateway.model_dir import byte_level_tokenizer
from tests.worker.fakes_accelerator import FakeAccelerator
from tests.worker.fakes_model import BLOCK_SIZE, NUM_BLOCKS, VOCAB, FakeLoaded, FakeOps, new_row
from tests.worker.grammars.support import end, small_tokenizer, started
from tests.worker.grammars.test_matching import DIES, death
from tests.worker.kernels.triton.test_device_sampler import MANNERS, OnDevice, copy_of, row, same

from pagoda_proto.grammars import regex
from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import Chunk, RowOutput, StepPlan
from pagoda_worker.config import WorkerConfig
from pagoda_worker.grammars.compiling import CompiledGrammars
from pagoda_worker.rows.rows import Row
from pagoda_worker.sampling import sampler as host
from pagoda_worker.sampling.device_sampler import samples_of
from pagoda_worker.sampling.sampler import Fault, Sample
from pagoda_worker.speculation.drafting import NoDrafts
from pagoda_worker.speculation.forced import ForcedDrafts
from pagoda_worker.step.pending import Pending
from pagoda_worker.step.runner import ModelRunner

TOKENIZER = LLTokenizer(byte_level_tokenizer().to_str(), n_vocab=VOCAB, eos_token=end())
GRAMMARS = CompiledGrammars(TOKENIZER, VOCAB)
WORDS = regex("(he|hello|ha+)( (hello|she)){2,3}")
FORMED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 2.0, "min_p": 0.3, "logprobs": 0},
    {"temperature": 9.0, "top_k": 2, "presence_penalty": 1.0},
    {"temperature": 1.5, "top_p": 0.6, "min_tokens": 3, "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "allowed_token_ids": tuple(token for token in range(VOCAB) if token % 64 != 63)},
    {"temperature": 0.0, "bad_words_token_ids": ((ord("h") % 9, 5), (3,), (1, 2, 3)), "logprobs": 4},
]


def formed(row_id: int, prior: Sequence[int] = (), grammar: str = WORDS, **params: Any) -> Row:
    tokens = np.array([5, 6, 7, *prior])
    asked = SamplingParams(**params, grammar=grammar)
    new = new_row(row_id, tokens.tolist(), [], num_prompt_tokens=3, params=asked, seed=row_id, eos_token_ids=(end(),))
    return Row.of(new, tokens, np.zeros(0, np.int64), started(grammar, list(prior), GRAMMARS))


def again(one: Row) -> Row:
    """The same row with its own state, as recomputed after a loss."""
    if one.matcher is None:
        return copy_of(one)
    params = msgspec.structs.asdict(one.params)
    return formed(one.row_id, one.outputs.tolist(), params.pop("grammar"), **params)


def formed_step(sampler: OnDevice, rows: list[Row], number: int) -> list[Any]:
    """Check that the device chooses as the host does; append the tokens to the rows that got one."""
    logits = 2 * torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(number))
    expected = host.sample(logits.clone(), [again(one) for one in rows])
    assert sampler.takes(rows)
    got = samples_of(rows, sampler.sample(logits, rows).tensors)
    assert same(got, expected)
    for one, found in zip(rows, got, strict=True):
        if not isinstance(found, Fault):
            one.append(found.token_id)
    return got


def test_masks_come_as_bits_in_one_copy_for_all_rows_of_a_step() -> None:
    sampler = OnDevice(len(FORMED) + 2, VOCAB)
    rows = [formed(i, **params) for i, params in enumerate(FORMED)] + [row(8, **MANNERS[2]), row(7, **MANNERS[1])]
    formed_step(sampler, rows, 0)
    for number in range(1, 6):
        sampler.uploads.clear()
        formed_step(sampler, rows, number)
        assert sampler.uploads[-1:] == [len(FORMED) * (1 + -(-VOCAB // 32))]
        assert len(sampler.uploads) <= 2  # at most also the bad words of one row, when its outputs approach others
    rows = [rows[place] for place in (6, 1, 8, 0)]
    formed_step(sampler, rows, 6)


def test_a_row_with_a_grammar_ends_where_the_host_ends_it() -> None:
    sampler, one = OnDevice(1, VOCAB), formed(0, temperature=1.0, grammar=regex("hello"))
    tokens = []
    while end() not in tokens:
        (found,) = formed_step(sampler, [one], len(tokens))
        tokens.append(found.token_id)
    (found,) = formed_step(sampler, [one], 99)
    assert found.token_id == end()  # after an end token, only end tokens


def test_nothing_is_left_where_parameters_and_grammar_do_not_meet() -> None:
    rows = [formed(0, allowed_token_ids=(1, 2)), formed(1, temperature=0.0), row(2, temperature=1.0)]
    assert [isinstance(one, Fault) for one in formed_step(OnDevice(3, VOCAB), rows, 0)] == [True, False, False]


def test_what_a_grammar_leaves_is_found_in_outputs_that_the_host_knows() -> None:
    sampler, one, plain = OnDevice(2, VOCAB), formed(0), row(1)
    formed_step(sampler, [one, plain], 0)
    one.promise()
    plain.promise()
    assert sampler.takes([plain])
    assert not sampler.takes([plain, one])


def test_a_chosen_line_has_no_mask_of_the_row_before_it() -> None:
    sampler = OnDevice(1, VOCAB)
    for number, one in enumerate([formed(0), row(1, temperature=1.0), formed(2), row(3, allowed_token_ids=(1, 2))]):
        formed_step(sampler, [one], number)


@dataclass
class Steps:
    """Plans as an engine core makes them, with two steps in flight or with as many drafts as the worker would try."""

    runner: ModelRunner
    manners: list[dict[str, Any]]
    step: int = 0
    outputs: list[list[RowOutput]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    hints: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in self.manners]
        self.starts, self.hints = [0 for _ in self.manners], [0 for _ in self.manners]

    def launch(self) -> Pending:
        first, self.step = not self.step, self.step + 1
        new = [
            new_row(i, [1, 2, 3], [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3], params=SamplingParams(**manner), seed=i,
                    eos_token_ids=(end(),))
            for i, manner in enumerate(self.manners)
        ]  # fmt: skip
        size = 3 if first else 1
        chunks = [Chunk(i, start, size, True, self.hints[i]) for i, start in enumerate(self.starts)]
        self.starts = [start + size for start in self.starts]
        return self.runner.launch(StepPlan(step=self.step, new_rows=new if first else [], chunks=chunks))

    def collect(self, pending: Pending, *, drafting: bool) -> None:
        result = self.runner.collect(pending)
        assert result.errors == []
        for output in result.outputs:
            self.outputs[output.row_id].append(output)
            self.starts[output.row_id] += len(output.token_ids) - 1
            self.hints[output.row_id] = min(4, output.num_drafts) if drafting else 0

    def play(self, count: int, *, ahead: bool = False, drafting: bool = False) -> list[list[Any]]:
        """`count` tokens of each row, with their log-probabilities."""
        pending = deque([self.launch()])
        while min(sum(len(one.token_ids) for one in outputs) for outputs in self.outputs) < count:
            if ahead:
                pending.append(self.launch())
            self.collect(pending.popleft(), drafting=drafting)
            if not ahead:
                pending.append(self.launch())
        return [
            [pair for one in outputs for pair in zip(one.token_ids, one.logprobs or [None] * 99, strict=False)][:count]
            for outputs in self.outputs
        ]


def runner_of(manners: list[dict[str, Any]], accelerator: FakeAccelerator | None) -> ModelRunner:
    config = WorkerConfig(block_size=BLOCK_SIZE, max_rows=len(manners))
    sampler = None if accelerator is None else OnDevice(len(manners), VOCAB)
    loaded: Any = FakeLoaded(grammars=CompiledGrammars(TOKENIZER, VOCAB))
    return ModelRunner(loaded, NUM_BLOCKS, config, ForcedDrafts(NoDrafts(), 64), accelerator, sampler)


@pytest.mark.parametrize("way", [{}, {"ahead": True}, {"drafting": True}])
def test_a_runner_follows_grammars_as_by_the_host(way: dict[str, bool]) -> None:
    """Beside rows without grammars; no row's logits come to the host."""
    manners = [{**params, "grammar": WORDS} for params in FORMED[:5]] + [MANNERS[1], MANNERS[2]]
    expected = Steps(runner_of(manners, None), manners).play(8)
    on_device = runner_of(manners, FakeAccelerator())
    on_device._compute._ops = NothingOnTheHost()  # type: ignore[assignment]
    steps = Steps(on_device, manners)
    for found, one in zip(steps.play(8, **way), expected, strict=True):
        assert same([Sample(*pair) for pair in found], [Sample(*pair) for pair in one])
    drafted = sum(one.num_drafted for outputs in steps.outputs for one in outputs)
    assert (drafted > 0) is way.get("drafting", False)


class NothingOnTheHost(FakeOps):
    def sample(self, logits: torch.Tensor, rows: Sequence[Any]) -> list[Any]:  # type: ignore[override]
        raise AssertionError("the host was to choose")


def test_a_grammar_that_fails_ends_its_row_on_the_device_as_it_does_on_the_host() -> None:
    (token,) = small_tokenizer().tokenize_str("h")
    outputs = [token] * (death([token] * 200)[0] - 1)
    params = SamplingParams(grammar=DIES, allowed_token_ids=(token,))
    tokens, blocks = [1, 2, 3, *outputs], list(range(20))
    dying = new_row(0, tokens, blocks, num_prompt_tokens=3, params=params, eos_token_ids=(end(),))
    ends = []
    for accelerator in (None, FakeAccelerator()):
        runner, errors, start = runner_of([{}], accelerator), [], len(tokens)
        plan = StepPlan(step=1, new_rows=[dying], chunks=[Chunk(0, 0, start, True)])
        while not errors:
            errors = runner.execute(plan).errors
            plan = StepPlan(step=plan.step + 1, chunks=[Chunk(0, start, 1, True)])
            start += 1
        ends.append((plan.step, errors))
    assert ends[0] == ends[1]
    (error,) = ends[0][1]
    assert error.message.startswith("grammar: ")
