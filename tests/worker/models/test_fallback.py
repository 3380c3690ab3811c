"""Models without a native implementation: transformers' code over our cache, or a refusal that says why."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.models.checkpoints import FALLBACK, NATIVE, make_model, prompts, save
from tests.worker.models.conftest import Loaded, Saved
from tests.worker.models.harness import Harness, logits_of
from tests.worker.models.test_oracle import choices_of
from transformers import AttentionInterface, AutoModelForCausalLM

from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.loading.model import load_model
from pagoda_worker.models import fallback
from pagoda_worker.models.fallback import TransformersModel
from pagoda_worker.process.startup import load_runner
from pagoda_worker.rows.batch import Batch

CLEAR = 0.25  # for logits rounded to bfloat16 at magnitudes of about 8
DENSE = ["gpt2_scaled", "phi", "olmo"]


@pytest.mark.parametrize("name", FALLBACK)
def test_greedy_tokens_are_those_of_transformers(name: str, saved: Saved, loaded: Loaded) -> None:
    model, together = loaded(name), prompts()
    assert isinstance(model.model, TransformersModel)
    answers = Harness(model, num_blocks=128).greedy(together, 8, chunk=40)
    for prompt, answer in zip(together, answers, strict=True):
        assert choices_of(saved(name)[0], prompt, answer) == answer


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in DENSE), *((name, "bfloat16") for name in FALLBACK)]
)
def test_bits_do_not_depend_on_chunks(name: str, dtype: str, loaded: Loaded) -> None:
    model, ids = loaded(name, dtype), prompts()[-1]
    whole = logits_of(model, ids, [len(ids)])
    for chunks in ([16], [80, 1]):
        assert torch.equal(logits_of(model, ids, chunks), whole)


@pytest.mark.parametrize("name", ["flex_olmo", "olmo"])
def test_what_is_not_batch_invariant_claims_nobodys_numerics(name: str, saved: Saved, loaded: Loaded) -> None:
    """Experts use a library that is batch invariant on some machines only; the loader measures this and reports it."""
    config = WorkerConfig(model=str(saved(name)[1]), dtype="float32", kernels="torch")
    again, before = load_model(config), loaded(name)
    assert again.batch_invariant == again.repeatable == before.batch_invariant
    assert again.batch_invariant or name == "flex_olmo"
    one, other = (load_runner(config, lambda done, of: None).facts for _ in range(2))
    assert (one.numerics_id == other.numerics_id) == again.batch_invariant


@pytest.mark.parametrize("name", ["olmo", "llama"])
def test_a_model_without_a_native_implementation_says_so_once_and_what_that_costs(
    name: str, saved: Saved, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransformersModel, "_measured", lambda self: 0.0125)
    caplog.set_level(logging.INFO)
    load_runner(WorkerConfig(model=str(saved(name)[1]), dtype="float32", kernels="torch"), lambda done, of: None)
    told = [record for record in caplog.records if "through transformers" in record.getMessage()]
    assert all(record.levelno == logging.WARNING for record in told)
    assert [record.getMessage() for record in told] == ([] if name in NATIVE else [
        "OlmoForCausalLM runs through transformers' code, not natively: "
        "config.json: architecture 'OlmoForCausalLM' has no native implementation",
        "a step of one token takes about 12.5 ms through transformers, so a request gets at most about 80 tokens a "
        "second here",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "fastest", "taken"),
    [
        ([0.3, 0.2] + [0.02] * 4 + [0.005] * 100, 0.005, fallback.MOST_TIMED_STEPS),  # another worker was still loading
        ([9.0, 8.0, 7.0, 1.0], 7.0, fallback.LEAST_TIMED_STEPS),  # a large model
    ],
)
def test_the_cost_is_that_of_the_fastest_step_within_a_time(
    steps: list[float], fastest: float, taken: int, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded("olmo").model
    assert isinstance(model, TransformersModel)
    ends = itertools.accumulate(steps, initial=0.0)
    readings = itertools.chain.from_iterable(itertools.pairwise(ends))
    seen: list[float] = []
    monkeypatch.setattr(fallback, "perf_counter", lambda: seen.append(next(readings)) or seen[-1])
    with torch.inference_mode():
        assert model._measured() == pytest.approx(fastest)
    assert len(seen) == 2 * taken


def test_progress_ends_at_the_whole(saved: Saved) -> None:
    seen: list[tuple[int, int]] = []
    load_model(WorkerConfig(model=str(saved("olmo")[1]), kernels="torch"), lambda *counts: seen.append(counts))
    assert seen[-1][0] == seen[-1][1] > 0


def edited(saved: Saved, name: str, target: Path, **changes: Any) -> WorkerConfig:
    """A checkpoint with a changed config.json."""
    source = saved(name)[1]
    fields = json.loads((source / "config.json").read_text()) | changes
    target.mkdir()
    (target / "config.json").write_text(json.dumps(fields))
    (target / "model.safetensors").symlink_to(source / "model.safetensors")
    return WorkerConfig(model=str(target), dtype="float32", kernels="torch")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("olmo", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        ("olmo", {"model_type": "unheard", "auto_map": {"AutoConfig": "x.Y"}}, "does not know this model"),
        ("olmo", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("olmo", {"quantization_config": {"quant_method": "awq"}}, "awq"),
        ("olmo", {"num_hidden_layers": 4}, "the checkpoint lacks"),
        ("cohere2", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    ],
)
def test_refusals(saved: Saved, tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfig, match=message):
        load_model(edited(saved, name, tmp_path / "edited", **changes))


def small_llama(path: Path, **changes: Any) -> Path:
    """A 16-bit model that runs through transformers, since the native reader does not know the extra field."""
    made = save(make_model(*NATIVE["llama"]), path, torch.bfloat16)
    fields = json.loads((made / "config.json").read_text()) | {"unheard_of": 1} | changes
    (made / "config.json").write_text(json.dumps(fields))
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_to_16_bits_is_no_fault(dtype: str, tmp_path: Path) -> None:
    config = WorkerConfig(model=str(small_llama(tmp_path)), dtype=dtype, kernels="torch")
    assert isinstance(load_model(config).model, TransformersModel)


def test_tokens_of_experts_in_bfloat16_are_those_of_transformers(tmp_path: Path) -> None:
    """Compared only where the likeliest token leads by more than 16-bit rounding can change."""
    path = save(make_model(*FALLBACK["flex_olmo"]), tmp_path, torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    answers = Harness(load_model(WorkerConfig(model=str(path), kernels="torch")), num_blocks=128).greedy(prompts(), 8)
    clear = 0
    for prompt, answer in zip(prompts(), answers, strict=True):
        with torch.no_grad():
            logits = theirs(input_ids=torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :].float()
        best = logits.topk(2)
        for token, two, (first, second) in zip(answer, best.indices.tolist(), best.values.tolist(), strict=True):
            assert token == two[0] or first - second < CLEAR
            clear += first - second >= CLEAR
    assert clear > 32


def _restarted(ids: torch.Tensor, start: int) -> Batch:
    """Gives every chunk the positions of the first."""
    batch = BATCH(ids, start)
    return dataclasses.replace(batch, positions=batch.positions - start)


BATCH, ATTEND = fallback._batch, fallback._attend


def _unscaled(*arguments: Any, scaling: float | None = None, **rest: Any) -> Any:
    return ATTEND(*arguments, scaling=1.0, **rest)


def _sees_what_comes(self: Any, query: torch.Tensor, kv: Any, layer: int, plan: Any, *rest: Any) -> torch.Tensor:
    """Every token of a chunk attends to the whole chunk, as if there were no causal mask."""
    last = query.flip(0)
    return REFERENCE(self, last, kv, layer, plan, *rest).flip(0)


REFERENCE = ReferenceOps.attend


@pytest.fixture
def registered_anew() -> Iterator[None]:
    """Restore our attention: transformers uses the one registered last, also in models created before."""
    yield
    AttentionInterface.register(fallback.ATTENTION, ATTEND)


@pytest.mark.usefixtures("registered_anew")
@pytest.mark.parametrize("name", ["llama", "flex_olmo"])
@pytest.mark.parametrize("fault", ["positions", "mask", "scale"])
def test_wrong_wiring_is_refused_in_16_bits(
    name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_llama(tmp_path) if name == "llama" else save(make_model(*FALLBACK[name]), tmp_path, torch.bfloat16)
    if fault == "positions":
        monkeypatch.setattr(fallback, "_batch", _restarted)
    elif fault == "mask":
        monkeypatch.setattr(ReferenceOps, "attend", _sees_what_comes)
    else:
        monkeypatch.setattr(fallback, "_attend", _unscaled)
    with pytest.raises(UnsupportedConfig, match="logits on the paged cache differ"):
        load_model(WorkerConfig(model=str(path), dtype="bfloat16", kernels="torch"))


def test_a_wrongly_packed_layer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = AtenOps.pack_linear
    monkeypatch.setattr(AtenOps, "pack_linear", lambda self, weight, bias=None: pack(self, weight.flip(0), bias))
    with pytest.raises(UnsupportedConfig, match=r"a packed layer of .* computes a different result"):
        load_model(WorkerConfig(model=str(small_llama(tmp_path)), dtype="bfloat16", kernels="torch"))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("mamba", "layers of type linear_attention are not supported|0 of 3 layers use plain attention"),
        ("bloom", "0 of 3 layers use plain attention"),
    ],
)
def test_layers_that_are_not_plain_attention(model_type: str, message: str, tmp_path: Path) -> None:
    """Only newer versions of transformers give mamba's config a kind of layer."""
    path = save(make_model(model_type, {}), tmp_path / model_type)
    with pytest.raises(UnsupportedConfig, match=message):
        load_model(WorkerConfig(model=str(path), dtype="float32", kernels="torch"))


def test_what_runs_in_no_way_is_told_why_not_in_either(tmp_path: Path) -> None:
    alibi = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    path = save(make_model("falcon", alibi), tmp_path)
    with pytest.raises(UnsupportedConfig, match=r"0 of 3 layers use plain attention; .*not supported natively: alibi"):
        load_model(WorkerConfig(model=str(path), dtype="float32", kernels="torch"))
    config = WorkerConfig(model=str(small_llama(tmp_path / "llama")), kv_cache_dtype="int8", kernels="torch")
    with pytest.raises(UnsupportedConfig, match=r"^kv_cache_dtype=int8: .*not supported natively: unheard_of"):
        load_model(config)


def test_granite_with_layers_of_mamba_is_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "shared_intermediate_size": 80}
    path = save(make_model("granitemoehybrid", kinds), tmp_path)
    with pytest.raises(UnsupportedConfig, match=r"layers of type .*(mamba|linear_attention) are not supported"):
        load_model(WorkerConfig(model=str(path), dtype="float32", kernels="torch"))
    assert "'layer_types' has layers without attention (2 of" in caplog.text


def test_a_window_that_only_a_mask_knows_is_not_overlooked(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    path = save(make_model("phimoe", {**experts, "sliding_window": 40}), tmp_path / "phimoe")
    with pytest.raises(UnsupportedConfig, match="'sliding_window'=40, but no layer is marked as sliding"):
        load_model(WorkerConfig(model=str(path), dtype="float32", kernels="torch"))


def test_a_window_that_layers_say_is_kept_to(saved: Saved, tmp_path: Path) -> None:
    model = load_model(edited(saved, "mistral", tmp_path / "edited", unheard_of=1))
    assert isinstance(model.model, TransformersModel)
    assert [group.window for group in model.kv_groups] == [40]


def test_an_unsupported_field_of_a_native_family_runs_through_transformers(saved: Saved, tmp_path: Path) -> None:
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "factor": 1.0, "partial_rotary_factor": 0.5}
    config = edited(saved, "qwen3", tmp_path / "proportional", rope_parameters=rope)
    model = load_model(config)
    assert isinstance(model.model, TransformersModel)
    assert len(Harness(model).greedy([[5, 6, 7]], 4)[0]) == 4
