"""Embedding and scoring models, from a directory to the bytes of a result, against transformers on the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.worker.checkpoints.formats.packers import Recipe, awq, awq_config, gptq, gptq_config, write
from tests.worker.encoders.checkpoints import VOCAB, save, texts

from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams
from pagoda_proto.pooling.params import CLASSIFY, EMBED, PoolingParams
from pagoda_proto.steps import Chunk, NewRow, StepPlan, StepResult
from pagoda_worker.checkpoints.checkpoint import CheckpointError
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.readers import load_any_model
from pagoda_worker.process.startup import load_runner
from pagoda_worker.step.runner import ModelRunner

EXACT = 2e-4
QWEN = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 320,
}  # fmt: skip


def runner_of(path: Path, **options: Any) -> ModelRunner:
    given = {"dtype": "float32", "kernels": "torch", "max_tokens_per_step": 512, "num_blocks": 64, "block_size": 16}
    return load_runner(WorkerConfig(model=str(path), engine="ipc:///x", **given | options), lambda done, of: None)


class Reads:
    """Runs prompts through a runner: several together, or one in chunks."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.row = self.plan = 0

    def together(self, prompts: list[list[int]], params: PoolingParams) -> list[bytes]:
        rows = [self.new(prompt, params) for prompt in prompts]
        chunks = [Chunk(row.row_id, 0, len(row.token_ids), True) for row in rows]
        result = self.run(new_rows=rows, chunks=chunks)
        assert not result.errors, result.errors
        found = {output.row_id: output.pooled for output in result.outputs}
        self.run(finished_rows=[row.row_id for row in rows])
        return [found[row.row_id] for row in rows]

    def in_chunks(self, prompt: list[int], sizes: list[int], params: PoolingParams) -> bytes:
        row, start = self.new(prompt, params), 0
        for size in sizes:
            new = [row] if not start else []
            last = start + size == len(prompt)
            result = self.run(new_rows=new, chunks=[Chunk(row.row_id, start, size, last)])
            assert not result.errors, result.errors
            start += size
        self.run(finished_rows=[row.row_id])
        return result.outputs[0].pooled

    def run(self, **fields: Any) -> StepResult:
        self.plan += 1
        return self.runner.execute(StepPlan(step=self.plan, **fields))

    def new(self, prompt: list[int], params: PoolingParams | None) -> NewRow:
        self.row += 1
        facts = self.runner.facts
        first = 20 * (self.row % 3) if facts.num_blocks else 0
        blocks = list(range(first, first - -len(prompt) // facts.block_size)) if facts.num_blocks else []
        return NewRow(
            row_id=self.row, token_ids=prompt, num_prompt_tokens=len(prompt), num_computed=0, block_ids=blocks,
            params=SamplingParams(), seed=0, pooling=params,
        )  # fmt: skip


def numbers(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, "<f4").copy())


def write_modules(path: Path, mode: str, *more: str) -> None:
    kinds = ["Transformer", "Pooling", *more]
    places = ["", "1_Pooling", *more]
    listed = [
        {"idx": i, "type": f"st.{kind}", "path": place}
        for i, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text(json.dumps({mode: True}))


def test_a_mean_of_states_of_length_one(tmp_path: Path) -> None:
    model = save(tmp_path, "bert")
    write_modules(tmp_path, "pooling_mode_mean_tokens", "Normalize")
    reads = Reads(runner_of(tmp_path))
    assert (reads.runner.facts.pools[0], reads.runner.facts.pooled_width, reads.runner.facts.num_blocks) == (
        EMBED,
        64,
        0,
    )
    prompts = texts(200)
    found = reads.together(prompts, PoolingParams())
    with torch.inference_mode():
        for prompt, data in zip(prompts, found, strict=True):
            states = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
            expected = torch.nn.functional.normalize(states.mean(0), dim=0)
            torch.testing.assert_close(numbers(data), expected, rtol=EXACT, atol=EXACT)
    for prompt, data in zip(prompts, found, strict=True):
        assert reads.together([prompts[3], prompt], PoolingParams())[1] == data
    assert reads.together(prompts[::-1], PoolingParams()) == found[::-1]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        *((family, {}) for family in ("bert", "roberta", "distilbert", "mpnet", "modernbert", "gte")),
        *(("modernbert", {"classifier_activation": name}) for name in ("silu", "relu", "gelu_pytorch_tanh")),
    ],
)
def test_heads_give_the_scores_of_transformers(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    model = save(tmp_path, family, "ForSequenceClassification", num_labels=3, **more)
    reads = Reads(runner_of(tmp_path))
    prompts = texts(100)[1:4]
    found = reads.together(prompts, PoolingParams(output=CLASSIFY, activate=False))
    shares = reads.together(prompts, PoolingParams(output=CLASSIFY))
    with torch.inference_mode():
        for prompt, data, share in zip(prompts, found, shares, strict=True):
            expected = model(input_ids=torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(numbers(data), expected, rtol=EXACT, atol=EXACT)
            torch.testing.assert_close(numbers(share), expected.softmax(-1), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(
    ("family", "field", "odd"),
    [
        ("modernbert", "classifier_activation", "quick_gelu"),
        ("modernbert", "norm_eps", None),
        ("modernbert", "classifier_pooling", "max"),
        ("modernbert", "classifier_pooling", ["cls"]),
        ("bert", "classifier_activation", "relu"),
    ],
)
def test_what_a_head_cannot_be_is_refused_by_its_field(family: str, field: str, odd: Any, tmp_path: Path) -> None:
    save(tmp_path, family, "ForSequenceClassification", num_labels=3)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {field: odd}))
    with pytest.raises(UnsupportedConfig, match=field):
        runner_of(tmp_path)


def test_a_head_with_other_scores_than_labels_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "bert", "ForSequenceClassification", num_labels=3)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"id2label": {"0": "yes"}}))
    with pytest.raises(CheckpointError, match="3 scores"):
        runner_of(tmp_path)


@pytest.mark.parametrize("buckets", [2, 3, 512])
def test_distances_in_fewer_or_more_buckets_than_can_be_are_refused(buckets: int, tmp_path: Path) -> None:
    save(tmp_path, "mpnet", relative_attention_num_buckets=buckets)
    with pytest.raises(UnsupportedConfig, match="relative_attention_num_buckets"):
        runner_of(tmp_path)


@pytest.mark.parametrize("family", ["bert", "nomic", "gte"])
def test_the_second_text_of_a_pair_is_of_another_kind(family: str, tmp_path: Path) -> None:
    model = save(tmp_path, family, "ForSequenceClassification", num_labels=1, type_vocab_size=2)
    reads = Reads(runner_of(tmp_path))
    prompt, second = texts(100)[4], 20
    found = reads.together([prompt], PoolingParams(output=CLASSIFY, second_start=second))[0]
    kinds = torch.tensor([[0] * second + [1] * (len(prompt) - second)])
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt]), token_type_ids=kinds).logits[0].sigmoid()
    torch.testing.assert_close(numbers(found), expected, rtol=EXACT, atol=EXACT)
    assert found != reads.together([prompt], PoolingParams(output=CLASSIFY))[0]


def save_qwen(path: Path, kind: str = "Qwen3ForCausalLM", **more: Any) -> Any:
    torch.manual_seed(5)
    model = getattr(transformers, kind)._from_config(transformers.Qwen3Config(**QWEN, **more))
    model.eval().save_pretrained(path)
    return model


@pytest.mark.parametrize("kind", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_a_decoder_embeds_by_its_last_token_however_it_is_cut(kind: str, tmp_path: Path) -> None:
    model = save_qwen(tmp_path, kind, tie_word_embeddings=True)
    write_modules(tmp_path, "pooling_mode_lasttoken", "Normalize")
    reads = Reads(runner_of(tmp_path))
    assert reads.runner.facts.num_blocks == 64
    prompt = texts(150)[-1]
    found = reads.together([prompt], PoolingParams())[0]
    base = getattr(model, "model", model)
    with torch.inference_mode():
        expected = torch.nn.functional.normalize(base(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1], dim=0)
    torch.testing.assert_close(numbers(found), expected, rtol=EXACT, atol=EXACT)
    for sizes in ([64, 64, 22], [149, 1]):
        assert reads.in_chunks(prompt, sizes, PoolingParams()) == found


@pytest.mark.parametrize(
    "recipe", [Recipe(gptq_config(), gptq), Recipe(awq_config(), awq, symmetric=False)], ids=["gptq", "awq"]
)
def test_a_quantised_decoder_embeds_as_its_numbers_do(recipe: Recipe, tmp_path: Path) -> None:
    made = write(save_qwen(tmp_path / "model", tie_word_embeddings=True), recipe, tmp_path)
    found = []
    for path in (made.path, made.plain_path):
        write_modules(path, "pooling_mode_lasttoken", "Normalize")
        found.append(Reads(runner_of(path, kernels="reference")).together(texts(40), PoolingParams()))
    assert found[0] == found[1]


def test_a_decoder_with_a_head_scores_its_last_token(tmp_path: Path) -> None:
    model = save_qwen(tmp_path, "Qwen3ForSequenceClassification", num_labels=2, pad_token_id=0)
    prompt = texts(60)[3]
    found = Reads(runner_of(tmp_path)).together([prompt], PoolingParams(output=CLASSIFY, activate=False))[0]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(numbers(found), expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_that_answers_is_asked_how_likely_yes_is(tied: bool, tmp_path: Path) -> None:
    path = tmp_path / "Qwen3-Reranker-0.1B"
    model = save_qwen(path, tie_word_embeddings=tied)
    vocabulary = {"model": {"type": "BPE", "vocab": {"yes": 9, "no": 7}}}
    (path / "tokenizer.json").write_text(json.dumps(vocabulary))
    prompt = texts(60)[3]
    found = Reads(runner_of(path)).together([prompt], PoolingParams(output=CLASSIFY))[0]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    expected = torch.stack((logits[7], logits[9])).softmax(0)[1:]
    torch.testing.assert_close(numbers(found), expected, rtol=EXACT, atol=EXACT)


def write_reranker(path: Path, recipe: Recipe) -> list[Path]:
    """A quantised reranker, and a plain one with the dequantised weights."""
    made = write(save_qwen(path / "model"), recipe, path)
    found = [one.rename(path / f"Qwen3-Reranker-{one.name}") for one in (made.path, made.plain_path)]
    for one in found:
        (one / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {"yes": 9, "no": 7}}}))
    return found


def test_a_quantised_reranker_answers_as_its_numbers_do(tmp_path: Path) -> None:
    quantised, plain = (
        Reads(runner_of(path, kernels="reference")).together(texts(40), PoolingParams(output=CLASSIFY))
        for path in write_reranker(tmp_path, Recipe(gptq_config(), gptq))
    )
    assert quantised == plain


def test_a_reranker_answers_by_no_other_matrix_than_its_own(tmp_path: Path) -> None:
    recipe = Recipe(gptq_config(lm_head=True), gptq, covers=lambda linear: True)
    with pytest.raises(UnsupportedConfig, match=r"must have an unquantised lm_head\.weight"):
        runner_of(write_reranker(tmp_path, recipe)[0])


def test_a_decoder_without_a_head_gives_no_scores(tmp_path: Path) -> None:
    save_qwen(tmp_path)
    with pytest.raises(UnsupportedConfig, match=r"score\.weight"):
        load_any_model(WorkerConfig(model=str(tmp_path), engine="ipc:///x", task=CLASSIFY, dtype="float32"))


def test_claims_about_rows_that_do_not_hold_end_those_rows(tmp_path: Path) -> None:
    save(tmp_path, "bert")
    reads = Reads(runner_of(tmp_path))
    whole, part, generating = (reads.new([5, 6, 7, 8], one) for one in (PoolingParams(), PoolingParams(), None))
    chunks = [Chunk(whole.row_id, 0, 4, True), Chunk(part.row_id, 0, 2, False), Chunk(generating.row_id, 0, 4, True)]
    result = reads.run(new_rows=[whole, part, generating], chunks=chunks)
    assert [output.row_id for output in result.outputs] == [whole.row_id]
    errors = {error.row_id: error for error in result.errors}
    assert errors.keys() == {part.row_id, generating.row_id}
    assert "not a whole prompt" in errors[part.row_id].message
    assert errors[generating.row_id].code == ErrorCode.INVALID_ARGUMENT


def test_lengths_are_those_of_the_files_unless_more_is_asked_for(tmp_path: Path) -> None:
    save(tmp_path, "bert")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert runner_of(tmp_path).facts.max_model_len == 128
    assert runner_of(tmp_path, max_model_len=200).facts.max_model_len == 200
    with pytest.raises(ValueError, match="300"):
        runner_of(tmp_path, max_model_len=301)


def test_what_makes_vectors_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    save(tmp_path, "bert")
    first = runner_of(tmp_path).facts
    write_modules(tmp_path, "pooling_mode_mean_tokens")
    second = runner_of(tmp_path).facts
    assert first.model_fingerprint != second.model_fingerprint
    assert first.numerics_id == second.numerics_id


def test_speculation_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "bert")
    with pytest.raises(ValueError, match="does not generate text"):
        runner_of(tmp_path, speculation="suffix")


GEMMA = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1,
    "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 320, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 40,
}  # fmt: skip


def save_gemma(path: Path) -> Any:
    """A model like EmbeddingGemma. transformers halves the window when it reads a file, so the file has it whole."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**GEMMA, use_bidirectional_attention=True)
    model = transformers.Gemma3TextModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    fields = json.loads((path / "config.json").read_text()) | {"sliding_window": GEMMA["sliding_window"]}
    (path / "config.json").write_text(json.dumps(fields))
    return model


@pytest.mark.parametrize(("dtype", "kernels", "near"), [("float32", "torch", EXACT), ("bfloat16", "auto", 0.02)])
def test_a_decoder_that_sees_both_ways_reads_prompts_whole(
    dtype: str, kernels: str, near: float, tmp_path: Path
) -> None:
    model = save_gemma(tmp_path)
    write_modules(tmp_path, "pooling_mode_mean_tokens", "Normalize")
    reads = Reads(runner_of(tmp_path, dtype=dtype, kernels=kernels))
    facts = reads.runner.facts
    assert (facts.pools[0], facts.pooled_width, facts.num_blocks) == (EMBED, 64, 0)
    prompts = texts(200)
    found = reads.together(prompts, PoolingParams())
    with torch.inference_mode():
        for prompt, data in zip(prompts, found, strict=True):
            states = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
            expected = torch.nn.functional.normalize(states.mean(0), dim=0)
            torch.testing.assert_close(numbers(data), expected, rtol=near, atol=near)
            assert reads.together([prompts[3], prompt], PoolingParams())[1] == data


def test_any_decoder_may_say_that_it_sees_both_ways(tmp_path: Path) -> None:
    """As in gte-Qwen2, whose own code respects the flag; transformers' model needs a mask."""
    torch.manual_seed(0)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**QWEN)).eval()
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text()) | {"is_causal": False}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    write_modules(tmp_path, "pooling_mode_lasttoken", "Normalize")
    prompts = texts(200)
    found = Reads(runner_of(tmp_path)).together(prompts, PoolingParams())
    with torch.inference_mode():
        for prompt, data in zip(prompts, found, strict=True):
            seen = torch.ones(1, 1, len(prompt), len(prompt), dtype=torch.bool)
            states = model(input_ids=torch.tensor([prompt]), attention_mask=seen).last_hidden_state[0]
            expected = torch.nn.functional.normalize(states[-1], dim=0)
            torch.testing.assert_close(numbers(data), expected, rtol=EXACT, atol=EXACT)
    with pytest.raises(UnsupportedConfig, match="'is_causal': a model with bidirectional attention cannot generate"):
        runner_of(tmp_path, task="generate")


def test_what_sees_both_ways_neither_continues_nor_judges(tmp_path: Path) -> None:
    save_gemma(tmp_path)
    for task, why in (("generate", "cannot generate text"), ("classify", "heads of decoders with bidirectional")):
        with pytest.raises(ValueError, match=why):
            runner_of(tmp_path, task=task, fallback=False)
