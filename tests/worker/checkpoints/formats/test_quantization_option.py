"""The option `quantization`: which matrices of a plain checkpoint it quantises, to what, and what it logs."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.worker.checkpoints.formats.packers import is_linear, plain
from tests.worker.checkpoints.formats.sources import WeightSource
from tests.worker.models.checkpoints import FALLBACK, NATIVE, make_model, prompts, save
from tests.worker.models.harness import logits_of

from pagoda_worker.checkpoints.checkpoint import read_json
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.checkpoints.formats.layout import Layout
from pagoda_worker.checkpoints.formats.source import choose_formats
from pagoda_worker.checkpoints.source import Weight, joined
from pagoda_worker.config import QUANTIZATIONS, WorkerConfig
from pagoda_worker.kernels import quantized
from pagoda_worker.kernels.quantized import FORMATS, QuantizedWeight, dequantize, quantize
from pagoda_worker.loading.model import LoadedModel, load_model, native_spec
from pagoda_worker.models.decoder import Decoder

IDS = prompts()[-1]
OPTIONS = ("int8", "int4", "int4a16")
# Inputs of down_proj: 96 is no multiple of the group of 64, 128 is.
WIDTHS = {"llama3": 96, "qwen3": 128}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, width in WIDTHS.items():
        model_type, changes = NATIVE[name]
        model = make_model(model_type, {**changes, "intermediate_size": width})
        made[name] = save(model, tmp_path_factory.mktemp(name))
    return made


def config_of(path: Path, **changes: Any) -> WorkerConfig:
    return replace(WorkerConfig(model=str(path), dtype="float32", kernels="reference", fallback=False), **changes)


def loaded(path: Path, **changes: Any) -> LoadedModel:
    return load_model(config_of(path, **changes))


def by_hand(path: Path, option: str, model: LoadedModel, *, widened: bool = False) -> LoadedModel:
    """What the option means, matrix by matrix. `widened`: with dequantised weights."""
    fields = read_json(path / "config.json")
    spec = native_spec(fields["architectures"][0], fields)
    tensors = load_file(path / "model.safetensors")
    form = FORMATS[option]
    weights: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        if is_linear(name) and not name.startswith("lm_head"):
            whole = not form.group or tensor.shape[1] % form.group == 0
            weights[name.removesuffix(".weight")] = quantize(tensor, form) if whole else tensor
    head = tensors["model.embed_tokens.weight" if spec.tied else "lm_head.weight"]
    weights["lm_head"] = quantize(head, FORMATS["int8"])
    if widened:
        weights = {name: dequantize(w) if isinstance(w, QuantizedWeight) else w for name, w in weights.items()}
    decoder = Decoder(spec, model.ops, WeightSource(tensors, weights), model.dtype, 1024)
    return replace(model, model=decoder)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", WIDTHS)
def test_the_model_is_that_of_the_rounded_matrices(name: str, option: str, paths: dict[str, Path]) -> None:
    model = loaded(paths[name], quantization=option)
    got = logits_of(model, IDS, [len(IDS)])
    assert torch.equal(got, logits_of(by_hand(paths[name], option, model), IDS, [len(IDS)]))
    assert not torch.equal(got, logits_of(loaded(paths[name]), IDS, [len(IDS)]))


def test_more_bits_are_closer(paths: dict[str, Path]) -> None:
    exact = logits_of(loaded(paths["qwen3"]), IDS, [len(IDS)])
    models = [loaded(paths["qwen3"], quantization=option) for option in OPTIONS]
    errors = [float((logits_of(model, IDS, [len(IDS)]) - exact).square().mean()) for model in models]
    assert errors[0] < errors[1] / 10
    assert errors[0] < errors[2] / 10
    assert errors[1] < exact.var()


def test_torch_kernels_widen_the_rounded_matrices(paths: dict[str, Path]) -> None:
    model = loaded(paths["qwen3"], quantization="int4", kernels="torch")
    widened = by_hand(paths["qwen3"], "int4", model, widened=True)
    assert torch.equal(logits_of(model, IDS, [len(IDS)]), logits_of(widened, IDS, [len(IDS)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrices_are_rounded_as_they_are_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    """Independent of the run's dtype."""
    path = save(make_model(*NATIVE["llama3"]), tmp_path / "half", dtype)
    model = loaded(path, quantization="int8", dtype="float32")
    tensors = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    twin = tmp_path / "twin"
    twin.mkdir()
    (twin / "config.json").write_text((path / "config.json").read_text())
    save_file(tensors, twin / "model.safetensors")
    other = loaded(twin, quantization="int8")
    assert torch.equal(logits_of(model, IDS, [len(IDS)]), logits_of(other, IDS, [len(IDS)]))


def test_identity(paths: dict[str, Path]) -> None:
    """The fingerprint is that of the checkpoint; only workers with the same option give the same bits."""
    models = [loaded(paths["qwen3"], quantization=option) for option in QUANTIZATIONS]
    assert len({model.fingerprint for model in models}) == 1
    assert len({model.numerics_id for model in models}) == len(QUANTIZATIONS)
    assert loaded(paths["qwen3"], quantization="int4").numerics_id == models[QUANTIZATIONS.index("int4")].numerics_id


@pytest.mark.parametrize("name", WIDTHS)
def test_every_byte_counts_as_progress_once(name: str, paths: dict[str, Path]) -> None:
    seen: list[tuple[int, int]] = []
    load_model(config_of(paths[name], quantization="int4"), lambda *counts: seen.append(counts))
    total = sum(tensor.nbytes for tensor in load_file(paths[name] / "model.safetensors").values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (total, total)


def test_what_is_said(paths: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagoda_worker.loading.model")
    loaded(paths["llama3"], quantization="int4", kernels="torch")
    said = [message for message in caplog.messages if not message.startswith("kernels:")]
    assert said == [
        "weights: int4 group 64, activations int8, head int8",
        "torch kernels have no integer arithmetic: quantised weights are widened to torch.float32",
        "weights: 3 matrices stay torch.float32 as inputs fill no whole groups: model.layers.0.mlp.down_proj, ..",
    ]
    caplog.clear()
    loaded(paths["llama3"])
    assert [message for message in caplog.messages if "weights" in message] == []


def test_models_that_transformers_runs_are_not_quantised(tmp_path: Path) -> None:
    path = save(make_model(*FALLBACK["olmo"]), tmp_path / "olmo")
    with pytest.raises(UnsupportedConfig, match=r"quantization='int4': only models with a native.*OlmoFor"):
        loaded(path, quantization="int4", fallback=True)


def test_an_unknown_format() -> None:
    with pytest.raises(ValueError, match="quantization must be empty or one of int8, int4, int4a16, got 'fp8'"):
        WorkerConfig(quantization="fp8")
    assert set(filter(None, QUANTIZATIONS)) == set(FORMATS)


@pytest.mark.parametrize("option", OPTIONS)
def test_rows_are_rounded_by_themselves(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on how many rows are quantised at once."""
    weight = torch.randn(37, 128, generator=torch.Generator().manual_seed(0))
    whole = quantize(weight, FORMATS[option])
    for at_once in (1, 128, 1000, 10**6):
        monkeypatch.setattr(quantized, "AT_ONCE", at_once)
        parts = quantize(weight, FORMATS[option])
        assert torch.equal(parts.levels, whole.levels)
        assert torch.equal(parts.scales, whole.scales)
        assert (parts.zeros, parts.bits, parts.activation_bits) == (None, whole.bits, whole.activation_bits)


def some_weight(n: int, *, zeros: bool, bits: int = 4, group: int = 16, activation_bits: int = 16) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(n)
    levels = torch.randint(0, 1 << bits, (n, 32), generator=generator).to(torch.uint8)
    return QuantizedWeight(
        levels=levels,
        scales=torch.rand(n, 32 // group, generator=generator),
        zeros=levels[:, ::group].contiguous() if zeros else None,
        bits=bits,
        activation_bits=activation_bits,
    )


@pytest.mark.parametrize("zeros", [(False, False), (True, False), (True, True)])
def test_matrices_of_one_format_are_joined_in_it(zeros: tuple[bool, bool]) -> None:
    parts: list[Weight] = [some_weight(3, zeros=zeros[0]), some_weight(5, zeros=zeros[1])]
    whole = joined(parts, torch.float32)
    assert isinstance(whole, QuantizedWeight)
    assert torch.equal(plain(whole), torch.cat([plain(part) for part in parts]))  # type: ignore[arg-type]
    assert (whole.zeros is None) == (zeros == (False, False))
    assert joined(parts[:1], torch.float32) is parts[0]


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(5, 32).bfloat16(),
        some_weight(5, zeros=False, bits=8),
        some_weight(5, zeros=False, group=32),
        some_weight(5, zeros=False, group=32, activation_bits=8),
        replace(some_weight(5, zeros=False), minima=torch.ones(5, 2)),
    ],
    ids=["plain", "bits", "group", "group, activations", "minima"],
)
def test_other_matrices_are_joined_in_the_run_dtype(other: Weight) -> None:
    first = some_weight(3, zeros=True)
    whole = joined([first, other], torch.bfloat16)
    assert isinstance(whole, torch.Tensor)
    second = dequantize(other).bfloat16() if isinstance(other, QuantizedWeight) else other
    assert torch.equal(whole, torch.cat((dequantize(first).bfloat16(), second)))


@pytest.mark.parametrize(("bits", "minima"), [(4, True), (8, True), (8, False)])
def test_matrices_are_joined_in_eight_bits_if_one_rounds_activations(bits: int, minima: bool) -> None:
    first = some_weight(3, zeros=False, activation_bits=16)
    if minima:
        first = replace(first, activation_bits=8, minima=torch.tensor([[-0.5, 1.25]] * 3))
    second = some_weight(5, zeros=True, bits=bits, activation_bits=8)
    whole = joined([first, second], torch.bfloat16)
    assert isinstance(whole, QuantizedWeight)
    assert (whole.bits, whole.group, whole.activation_bits, whole.minima) == (8, 16, 8, None)
    exact = torch.cat([dequantize(first), dequantize(second)])
    half_a_level = exact.view(8, -1, 16).abs().amax(-1, keepdim=True) / 127 / 2 * 1.0001
    assert ((dequantize(whole) - exact).view(8, -1, 16).abs() <= half_a_level).all()
    assert bits == 4 or torch.equal(whole.levels[3:], second.levels)


def test_matrices_with_minima_are_joined_with_them() -> None:
    parts = [replace(some_weight(n, zeros=False, activation_bits=8), minima=torch.randn(n, 2)) for n in (3, 5)]
    whole = joined([*parts], torch.bfloat16)
    assert isinstance(whole, QuantizedWeight)
    assert torch.equal(dequantize(whole), torch.cat([dequantize(part) for part in parts]))


def test_int8_matrices_may_be_among_4_bit_ones_whose_activations_are_to_be_rounded(paths: dict[str, Path]) -> None:
    class Packed:
        def __init__(self, form: quantized.Format) -> None:
            self.form = form

    def layout(down: str, others: str) -> Layout:
        return Layout("some", lambda linear: Packed(FORMATS[down if "down" in linear else others]))  # type: ignore[arg-type, return-value]

    fields = read_json(paths["qwen3"] / "config.json")
    spec = native_spec(fields["architectures"][0], fields)
    assert choose_formats(spec, layout("int8", "int4a16"), "int4").activation_bits == 8
    assert choose_formats(spec, layout("int8", "int4a16"), "").activation_bits is None
    for form in ("int8", "int4"):
        with pytest.raises(UnsupportedConfig, match="it cannot be quantised in another way"):
            choose_formats(spec, layout(form, form), "int4")
