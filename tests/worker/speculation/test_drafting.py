"""Where drafts come from, and how they pass through a step. test_speculation checks that no draft changes a token."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.fakes_accelerator import FakeAccelerator
from tests.worker.fakes_model import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    POISON,
    VOCAB,
    FakeLoaded,
    FakeModel,
    fake_runner,
    new_row,
)
from tests.worker.models.checkpoints import FALLBACK, NATIVE, make_model, save

from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import AppendBlocks, Chunk, NewRow, ReplaceBlock, RowOutput, StepPlan
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.loading.memory import num_kv_blocks
from pagoda_worker.loading.model import load_model
from pagoda_worker.process.startup import load_runner
from pagoda_worker.rows.batch import build_batch
from pagoda_worker.rows.drafts import DraftLength
from pagoda_worker.rows.ngram import MAX_MATCH, MAX_PLACES, SIZE, NgramIndex, continuation
from pagoda_worker.rows.rows import Row
from pagoda_worker.speculation.choosing import check_invariant, load_draft_model, make_drafter
from pagoda_worker.speculation.drafting import Drafter, DraftModel
from pagoda_worker.speculation.suffixes import SuffixLookup
from pagoda_worker.step.runner import ModelRunner

# --- the index -------------------------------------------------------------------------------------------------------


def naive_matches(tokens: list[int]) -> list[tuple[int, int]]:
    """The same by exhaustive search."""
    last = len(tokens) - 1
    places = [p for p in range(SIZE - 1, last) if tokens[p - SIZE + 1 : p + 1] == tokens[last - SIZE + 1 :]]
    found = []
    for place in places[::-1][:MAX_PLACES]:
        length = 0
        while length < min(MAX_MATCH, place + 1) and tokens[place - length] == tokens[last - length]:
            length += 1
        found.append((length, last - place))
    return found


@given(
    tokens=st.lists(st.integers(0, 2), max_size=80) | st.lists(st.integers(0, 2**40), max_size=20).map(lambda t: t * 3),
    limits=st.lists(st.integers(1, 30), min_size=1, max_size=5),
)
def test_the_index_finds_what_a_search_finds(tokens: list[int], limits: list[int]) -> None:
    """However the tokens came to be indexed."""
    index, array = NgramIndex(), np.array(tokens, np.int64)
    calls = 0
    while len(index) < len(tokens):
        assert list(index.matches(array)) == [], "not all is indexed"
        before = len(index)
        added = index.extend(array, limits[calls % len(limits)])
        assert len(index) == before + added
        calls += 1
    assert index.extend(array, 10) == 0
    assert list(index.matches(array)) == naive_matches(tokens)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 12))
def test_a_continuation_repeats_itself_where_the_text_ends(tokens: list[int], count: int) -> None:
    array = np.array(tokens, np.int64)
    for distance in range(1, len(tokens) + 1):
        text = list(tokens)
        for _ in range(count):
            text.append(text[-distance])
        assert continuation(array, distance, count).tolist() == text[len(tokens) :]


# --- the number of drafts --------------------------------------------------------------------------------------------


def test_drafts_that_hold_make_more() -> None:
    length = DraftLength(12)
    seen = []
    for _ in range(5):
        seen.append(length.now)
        length.learn(length.now, length.now)
    assert seen == [2, 4, 8, 12, 12]
    length.learn(12, 3)
    assert length.now == 3
    assert DraftLength(1).now == 1


def test_drafts_that_fail_make_pauses() -> None:
    length = DraftLength(8)
    pauses = []
    for _ in range(9):
        length.learn(length.now, 0)
        pause = 0
        while not length.now:
            length.learn(0, 0)
            pause += 1
        pauses.append(pause)
    assert pauses == [2, 4, 8, 16, 32, 64, 64, 64, 64]
    assert length.now == 1
    length.learn(1, 1)
    length.learn(2, 0)
    assert not length.now
    length.learn(0, 0)
    length.learn(0, 0)
    assert length.now, "success is remembered: the next pause is short again"


def test_text_that_never_repeats_is_left_alone() -> None:
    """Drafts that are never accepted make up at most one token in fifty."""
    length, tried = DraftLength(8), 0
    for _ in range(5000):
        tried += length.now
        length.learn(length.now, 0)
    assert tried <= 5000 / 50


# --- layout and claims -----------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.booleans(), st.integers(0, 4)), min_size=1, max_size=6)
)
def test_drafts_are_laid_out_behind_the_chunk(shapes: list[tuple[int, int, bool, int]]) -> None:
    work, longer, drafts = [], [], {}
    for i, (start, count, sample, num_drafts) in enumerate(shapes):
        tokens = np.arange(start + count + num_drafts) + 1000 * i
        blocks = np.random.default_rng(i).permutation(50)
        known = tokens[: start + count]
        work.append((Row.of(new_row(i, known.tolist(), []), known, blocks), Chunk(i, start, count, sample)))
        row = Row.of(new_row(i, tokens.tolist(), []), tokens, blocks)
        longer.append((row, Chunk(i, start, count + num_drafts, sample)))
        if num_drafts:
            drafts[i] = tokens[start + count :]
    batch, plain = (
        build_batch(work, 4, torch.device("cpu"), drafts),
        build_batch(longer, 4, torch.device("cpu")),
    )
    for name in ("token_ids", "positions", "kv_indices", "block_tables"):
        assert torch.equal(getattr(batch, name), getattr(plain, name))
    assert (batch.query_starts, batch.query_lens, batch.context_lens) == (
        plain.query_starts, plain.query_lens, plain.context_lens,
    )  # fmt: skip
    wanted = [
        batch.query_starts[i] + place
        for i, (_, count, sample, num_drafts) in enumerate(shapes)
        for place in range(count - 1, count + num_drafts)
        if sample
    ]
    assert batch.logit_indices.tolist() == wanted


@pytest.mark.parametrize(
    ("chunk", "complaint"),
    [
        (Chunk(1, 0, 20, True, -1), "-1 drafts cannot follow"),
        (Chunk(1, 0, 8, False, 2), "2 drafts cannot follow a chunk with sample=False"),
        (Chunk(1, 0, 20, True, 13), "13 drafts after 20 tokens do not fit"),
        (Chunk(1, 0, 20, True, 12), "at most 24 tokens"),
    ],
)
def test_claims_about_drafts(chunk: Chunk, complaint: str) -> None:
    runner = fake_runner(max_tokens_per_step=24)
    other = new_row(2, [3, 4], [5])
    plan = StepPlan(step=1, new_rows=[new_row(1, [7] * 20, [0, 1]), other], chunks=[chunk, Chunk(2, 0, 2, True)])
    result = runner.execute(plan)
    assert [(error.row_id, error.code) for error in result.errors] == [(1, ErrorCode.PROTOCOL_ERROR)]
    assert complaint in result.errors[0].message
    assert [output.row_id for output in result.outputs] == [2]


def test_a_worker_without_speculation_ignores_what_it_is_allowed() -> None:
    runner = fake_runner()
    plan = StepPlan(step=1, new_rows=[new_row(1, [7] * 8, [0])], chunks=[Chunk(1, 0, 8, True, 4)])
    (output,) = runner.execute(plan).outputs
    assert (len(output.token_ids), output.num_drafted, output.num_drafts) == (1, 0, 0)


# --- drafters in a runner --------------------------------------------------------------------------------------------


@dataclass
class Allowing:
    """Drives a runner with one row at a time, allowing as many drafts as the runner hints at, or none."""

    runner: ModelRunner
    step: int = 0

    def run(self, chunks: list[Chunk], **plan: Any) -> dict[int, RowOutput]:
        self.step += 1
        result = self.runner.execute(StepPlan(step=self.step, chunks=chunks, **plan))
        assert result.errors == []
        return {output.row_id: output for output in result.outputs}

    def decode(self, row_id: int, prompt: list[int], steps: int, *, allow: bool = True, **row: Any) -> list[RowOutput]:
        """Run a row from its prompt through `steps` steps, with all blocks from the start."""
        blocks = row.pop("blocks", list(range(MAX_MODEL_LEN // BLOCK_SIZE)))
        new = new_row(row_id, prompt, blocks, **row)
        start = new.num_computed
        outputs = [self.run([Chunk(row_id, start, len(prompt) - start, True)], new_rows=[new])[row_id]]
        known = len(prompt) + 1
        for _ in range(steps):
            drafts = outputs[-1].num_drafts if allow else 0
            outputs.append(self.run([Chunk(row_id, known - 1, 1, True, drafts)])[row_id])
            known += len(outputs[-1].token_ids)
        return outputs


def speculating(
    drafter: Drafter, model: FakeModel | None = None, accelerator: FakeAccelerator | None = None, **config: int
) -> ModelRunner:
    loaded: Any = FakeLoaded(model or FakeModel())
    return ModelRunner(loaded, NUM_BLOCKS, WorkerConfig(block_size=BLOCK_SIZE, **config), drafter, accelerator)


def draft_model(model: FakeModel | None = None, max_drafts: int = 8, **config: int) -> DraftModel:
    loaded: Any = FakeLoaded(model or FakeModel())
    return DraftModel(loaded, NUM_BLOCKS, WorkerConfig(block_size=BLOCK_SIZE, **config), max_drafts)


def tokens_of(outputs: list[RowOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


PROMPT = [(7 * i + 3) % 400 for i in range(37)]


def plain(count: int, prompt: list[int] = PROMPT, **row: Any) -> list[int]:
    return tokens_of(Allowing(fake_runner()).decode(1, prompt, count - 1, **row))


def test_a_draft_model_that_is_the_model_is_always_right() -> None:
    """The fake model's logits are a hash of its whole cache, so one wrong cell would make a draft wrong."""
    outputs = Allowing(speculating(draft_model())).decode(1, PROMPT, 12)
    assert [output.num_drafted for output in outputs[1:5]] == [2, 4, 8, 8]
    assert all(len(output.token_ids) == 1 + output.num_drafted for output in outputs)
    assert tokens_of(outputs) == plain(len(tokens_of(outputs)))


@pytest.mark.parametrize(
    ("max_tokens_per_step", "passes"),
    [(100, [37, 11, 16, 15, 1]), (16, [16, 16, 5, 11, 16, 15, 1]), (6, [6] * 6 + [1, 6, 5, 6, 6, 4, 6, 6, 3, 1])],
)
def test_rows_without_drafts_are_followed_by_the_block(max_tokens_per_step: int, passes: list[int]) -> None:
    """The prompt, the rest of the third block, the fourth; then a step drafts again and catches up on the rest."""
    model = FakeModel()
    driver = Allowing(speculating(draft_model(model, max_tokens_per_step=max_tokens_per_step)))
    outputs = driver.decode(1, PROMPT, 41, allow=False)
    known = len(PROMPT) + len(tokens_of(outputs))
    output = driver.run([Chunk(1, known - 1, 1, True, 2)])[1]
    assert (output.num_drafted, len(output.token_ids)) == (2, 3)
    assert [batch.num_tokens for batch in model.batches] == passes


def test_a_prefix_hit_holds_for_the_draft_model_too() -> None:
    """Whatever the first row did, its full blocks are complete in both caches."""
    driver = Allowing(speculating(draft_model()))
    first = driver.decode(1, PROMPT, 20, allow=False)
    text = PROMPT + tokens_of(first)
    blocks = [0, 1, 2, *range(30, 40)]
    second = driver.decode(2, text, 3, num_computed=48, blocks=blocks, num_prompt_tokens=len(text))
    assert all(len(output.token_ids) == 1 + output.num_drafted for output in second)
    assert second[-1].num_drafted == 8


def test_a_forked_row_has_right_drafts_at_once() -> None:
    driver = Allowing(speculating(draft_model()))
    driver.decode(1, PROMPT, 0)
    fork = new_row(2, PROMPT, [0, 1, 2, 20], num_computed=len(PROMPT) - 1, choice=1)
    plan = {"new_rows": [fork], "replace_blocks": [ReplaceBlock(2, 2, 21)], "block_copies": [(2, 21)]}
    outputs = [driver.run([Chunk(2, len(PROMPT) - 1, 1, True)], **plan)[2]]
    outputs.append(driver.run([Chunk(2, len(PROMPT), 1, True, outputs[-1].num_drafts)])[2])
    assert [len(output.token_ids) for output in outputs] == [1, 3]


def test_rows_have_drafts_of_different_lengths_in_one_step() -> None:
    driver = Allowing(speculating(draft_model()))
    prompts = {1: PROMPT, 2: PROMPT[5:], 3: PROMPT[:9]}
    rows = [new_row(i, prompt, list(range(10 * i, 10 * i + 8))) for i, prompt in prompts.items()]
    outputs = driver.run([Chunk(i, 0, len(prompt), True) for i, prompt in prompts.items()], new_rows=rows)
    texts = {i: list(output.token_ids) for i, output in outputs.items()}
    for drafts in ({1: 2, 2: 0, 3: 1}, {1: 0, 2: 2, 3: 2}, {1: 3, 2: 1, 3: 0}):
        chunks = [Chunk(i, len(prompts[i]) + len(texts[i]) - 1, 1, True, drafts[i]) for i in prompts]
        outputs = driver.run(chunks)
        assert {i: output.num_drafted for i, output in outputs.items()} == drafts
        assert {i: len(output.token_ids) - 1 for i, output in outputs.items()} == drafts
        for i, output in outputs.items():
            texts[i] += output.token_ids
    assert texts == {i: plain(len(texts[i]), prompt) for i, prompt in prompts.items()}


@pytest.mark.parametrize(
    ("drafter", "params"),
    [
        (lambda: SuffixLookup(8), {"temperature": 0.0, "allowed_token_ids": (7,)}),
        (draft_model, {"temperature": 0.0}),
        (draft_model, {"temperature": 0.9}),
    ],
)
def test_on_a_device_every_step_is_finished_before_drafts_are_made(
    drafter: Callable[[], Drafter], params: dict[str, Any]
) -> None:
    """Drafters read tokens on the host, so no token stays on the device; results and hints are those of a CPU."""
    row: dict[str, Any] = {"params": SamplingParams(**params)}
    expected = Allowing(speculating(drafter())).decode(1, PROMPT, 15, **row)
    accelerator = FakeAccelerator()
    driver = Allowing(speculating(drafter(), accelerator=accelerator))
    assert driver.decode(1, PROMPT, 15, **row) == expected
    assert accelerator.fetches == []
    assert sum(output.num_drafted for output in expected) > 0


def test_on_a_device_a_drafter_has_learnt_the_last_step_before_the_next_is_launched() -> None:
    drafter = Stubborn({})
    runner = speculating(drafter, accelerator=FakeAccelerator())
    new = new_row(1, PROMPT[:5], [0])
    one = runner.launch(StepPlan(step=1, new_rows=[new], chunks=[Chunk(1, 0, 5, True)]))
    assert (one.done, drafter.learnt) == (True, [])
    two = runner.launch(StepPlan(step=2, chunks=[Chunk(1, 5, 1, True)]))
    assert drafter.learnt == [(1, 0, 0)]
    assert tokens_of([runner.collect(step).outputs[0] for step in (one, two)]) == plain(2, PROMPT[:5])


class Stubborn:
    """Drafts the tokens it was given."""

    caches = ()
    reads_all = True

    def __init__(self, guesses: dict[int, list[int]]) -> None:
        self.guesses = guesses
        self.learnt: list[tuple[int, int, int]] = []

    def draft(self, work: Any) -> dict[int, np.ndarray]:
        return {
            row.row_id: np.array(self.guesses[row.row_id][: chunk.num_drafts])
            for row, chunk in work
            if chunk.num_drafts
        }

    def learn(self, row: Row, num_drafted: int, num_accepted: int) -> int:
        self.learnt.append((row.row_id, num_drafted, num_accepted))
        return 5


@pytest.mark.parametrize("right", range(5))
def test_drafts_hold_up_to_the_first_that_is_wrong(right: int) -> None:
    expected = plain(8)
    guesses = expected[1:5]
    if right < 4:
        guesses[right] = (guesses[right] + 1) % 400
    drafter = Stubborn({1: guesses})
    outputs = Allowing(speculating(drafter)).decode(1, PROMPT, 1)
    assert tokens_of(outputs) == expected[: 2 + right]
    assert drafter.learnt == [(1, 0, 0), (1, 4, right)]
    assert (outputs[1].num_drafted, outputs[1].num_drafts) == (4, 5)


def test_a_fault_behind_drafts_is_left_for_the_step_that_gets_there() -> None:
    """bad_words leave no token after the second; the engine core may have ended the row before that."""
    one = {"allowed_token_ids": (7,), "bad_words_token_ids": ((7, 7, 7),), "temperature": 0.0}
    params = SamplingParams(**one)  # type: ignore[arg-type]
    runner = speculating(Stubborn({1: [7, 7, 7]}))
    driver = Allowing(runner)
    outputs = driver.decode(1, [1, 2, 3], 0, params=params)
    outputs.append(driver.run([Chunk(1, 3, 1, True, 3)])[1])
    assert [output.token_ids for output in outputs] == [[7], [7]]
    result = runner.execute(StepPlan(step=3, chunks=[Chunk(1, 4, 1, True, 3)]))
    assert [(error.row_id, error.code) for error in result.errors] == [(1, ErrorCode.INVALID_ARGUMENT)]


def test_logits_that_are_no_numbers_behind_a_draft_end_nothing() -> None:
    expected = plain(4)
    drafter = Stubborn({1: [expected[1], POISON, 3]})
    assert tokens_of(Allowing(speculating(drafter)).decode(1, PROMPT, 1)) == expected[:3]


def test_a_repeating_text_is_continued() -> None:
    """One token is allowed, so the output repeats at once."""
    runner = speculating(SuffixLookup(8))
    params = SamplingParams(temperature=1.0, allowed_token_ids=(7,))
    outputs = Allowing(runner).decode(1, [1, 2, 3], 8, params=params)
    assert set(tokens_of(outputs)) == {7}
    assert outputs[-1].num_drafted == 8
    assert len(outputs[-1].token_ids) == 9


def test_a_text_without_repetition_has_no_drafts() -> None:
    outputs = Allowing(speculating(SuffixLookup(8))).decode(1, [1, 2, 3], 60)
    assert sum(output.num_drafted for output in outputs) == 0


@pytest.mark.parametrize("searches", [False, True])
def test_a_beam_is_another_row_in_the_next_step_and_not_indexed(searches: bool) -> None:
    params, tokens = SamplingParams(temperature=0.0, use_beam_search=searches), np.full(20, 7)
    new = NewRow(
        row_id=1,
        token_ids=[],
        num_prompt_tokens=20,
        num_computed=19,
        block_ids=[],
        params=params,
        seed=0,
    )
    row, drafter = Row.of(new, tokens, np.arange(2)), SuffixLookup(8)
    assert drafter.draft([(row, Chunk(1, 19, 1, True))]) == {}
    assert bool(drafter.learn(row, 0, 0)) is not searches
    assert (row.drafts is None) is searches


def test_a_long_prompt_from_the_cache_is_indexed_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_worker.speculation.suffixes.INDEXED_PER_STEP", 20)
    monkeypatch.setattr("pagoda_worker.speculation.suffixes.INDEXED_PER_SAMPLE", 16)
    params = SamplingParams(temperature=0.0, allowed_token_ids=(7,))
    rng = random.Random(1)
    prompt = [rng.randrange(400) for _ in range(90)] + [7] * 6
    driver = Allowing(speculating(SuffixLookup(8)))
    outputs = driver.decode(1, prompt, 8, params=params, num_computed=95)
    assert [output.num_drafts > 0 for output in outputs] == [False] * 2 + [True] * 7


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"speculation": "medusa"}, "speculation must be empty or one of suffix, draft-model, got 'medusa'"),
        ({"speculation": "draft-model"}, "draft_model and speculation=draft-model must be given together"),
        ({"draft_model": "/m"}, "draft_model and speculation=draft-model must be given together"),
        (
            {"speculation": "suffix", "draft_model": "/m"},
            "draft_model and speculation=draft-model must be given together",
        ),
        ({"speculation": "suffix", "max_drafts": -1}, "max_drafts must be between 0 and 1024, got -1"),
        ({"max_drafts": 4}, "max_drafts is given, but speculation is off"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        WorkerConfig(**options)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(*NATIVE["llama"]), tmp_path_factory.mktemp("llama"), torch.bfloat16)


def config_of(path: Path, draft: Path | None, **options: Any) -> WorkerConfig:
    speculation = "draft-model" if draft else ""
    options = {"kernels": "torch", "num_blocks": 80, "block_size": 16} | options
    return WorkerConfig(model=str(path), speculation=speculation, draft_model=str(draft or ""), **options)


def changed(path: Path, target: Path, **changes: Any) -> Path:
    model_type, fields = NATIVE["llama"]
    return save(make_model(model_type, fields | changes), target, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vocab_size": 300}, "its vocabulary has 300 tokens, but the model's has 256"),
        ({"max_position_embeddings": 512}, "max_model_len=1024 exceeds the model's own limit of 512"),
    ],
)
def test_a_draft_model_must_go_with_the_model(path: Path, tmp_path: Path, changes: Any, complaint: str) -> None:
    config = config_of(path, changed(path, tmp_path / "draft", **changes))
    with pytest.raises(ValueError, match=f"^draft_model .*{complaint}"):
        load_draft_model(config, load_model(config))


def test_a_draft_model_considers_no_more_tokens_than_there_are(path: Path) -> None:
    target = load_model(config_of(path, path))
    draft = load_draft_model(config_of(path, path, draft_vocab_size=256), target)
    assert draft is not None
    assert draft.vocab_size == 256
    with pytest.raises(ValueError, match=r"^draft_vocab_size=257 exceeds the model's vocabulary of 256 tokens"):
        load_draft_model(config_of(path, path, draft_vocab_size=257), target)


def test_a_draft_model_through_transformers_considers_all_tokens(path: Path, tmp_path: Path) -> None:
    fallback = save(make_model(*FALLBACK["phi"]), tmp_path / "draft", torch.bfloat16)
    target = load_model(config_of(path, fallback))
    assert load_draft_model(config_of(path, fallback), target) is not None
    with pytest.raises(ValueError, match=r"^draft_model .*: draft_vocab_size=100: models that run through"):
        load_draft_model(config_of(path, fallback, draft_vocab_size=100), target)


def test_a_block_is_paid_for_in_both_caches(path: Path, tmp_path: Path) -> None:
    small = changed(path, tmp_path / "draft", num_hidden_layers=1)
    config = config_of(path, small, num_blocks=0, kv_cache_gib=0.05)
    target = load_model(config)
    draft = load_draft_model(config, target)
    assert draft is not None
    alone, together = num_kv_blocks(config, target), num_kv_blocks(config, target, draft)
    assert together == pytest.approx(alone * 3 / 4, abs=1)
    assert len(make_drafter(config, target, draft, together).caches) == 1  # the draft model's own


def test_speculation_is_no_part_of_the_numerics(path: Path) -> None:
    facts = [
        load_runner(config, lambda done, total: None).facts for config in (config_of(path, None), config_of(path, path))
    ]
    assert facts[0] == facts[1]


def test_kernels_whose_results_depend_on_the_batch_are_refused(path: Path) -> None:
    config = config_of(path, path, kernels="reference")
    with pytest.raises(ValueError, match="speculation is not possible with these kernels"):
        load_runner(config, lambda done, total: None)
    with pytest.raises(ValueError, match="speculation is not possible with these kernels"):
        check_invariant(load_model(config))


def test_products_on_a_gpu_are_chosen_by_the_batch(path: Path) -> None:
    check_invariant(load_model(config_of(path, path)))
    assert not AtenOps(torch.device("cuda:0")).batch_invariant


def test_drafts_end_with_the_context() -> None:
    """The last token that fits is sampled at the last position."""
    driver = Allowing(speculating(draft_model()))
    prompt = [5] * (MAX_MODEL_LEN - 4)
    outputs = driver.decode(1, prompt, 0)
    bad = driver.runner.execute(StepPlan(step=9, chunks=[Chunk(1, len(prompt), 1, True, 4)]))
    assert "4 drafts after 253 tokens do not fit" in bad.errors[0].message
    assert outputs[0].token_ids[0] < VOCAB


def test_append_blocks_come_before_drafts() -> None:
    driver = Allowing(speculating(draft_model()))
    outputs = driver.decode(1, [3] * 15, 0, blocks=[0])
    output = driver.run([Chunk(1, 15, 1, True, outputs[0].num_drafts)], append_blocks=[AppendBlocks(1, [1])])[1]
    assert len(output.token_ids) == 3
