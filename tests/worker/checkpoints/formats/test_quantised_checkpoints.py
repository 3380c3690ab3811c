"""Whole checkpoints in every format: each gives the model of its dequantised weights, or an error that says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.worker.checkpoints.formats.packers import (
    TOKEN_SCHEME,
    Recipe,
    Written,
    awq,
    awq_config,
    compressed_config,
    gptq,
    gptq_config,
    int_quantized,
    pack_quantized,
    weights_scheme,
    write,
)
from tests.worker.checkpoints.formats.sources import WeightSource
from tests.worker.models.checkpoints import NATIVE, make_model, prompts
from tests.worker.models.harness import logits_of

from pagoda_worker.checkpoints.checkpoint import CheckpointError
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.checkpoints.formats import read_layout
from pagoda_worker.checkpoints.formats.layout import Layout
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.quantized import QuantizedWeight
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.loading.model import LoadedModel, load_model, native_spec
from pagoda_worker.models.decoder import Decoder


def packed(bits: int, group: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    return compressed_config("pack-quantized", weights_scheme(bits, group, symmetric), None, **more)


def some(linear: str) -> bool:
    """Quantises only some parts of a merged matrix, and also the head."""
    return not linear.endswith(("k_proj", "up_proj", "layers.1.mlp.down_proj"))


def older_gptq(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """GPTQ without g_idx, and with a bias of zeros where there is none."""
    tensors = gptq(weight)
    del tensors["g_idx"]
    return tensors | {"bias": torch.zeros(len(weight.levels))}


INT8 = compressed_config("int-quantized", weights_scheme(8, 0, True), TOKEN_SCHEME)
INT8_UNEVEN = compressed_config("int-quantized", weights_scheme(8, 0, False), TOKEN_SCHEME)
IGNORED = ["re:.*k_proj$", "re:.*up_proj$", "model.layers.1.mlp.down_proj"]
RECIPES = {
    "int-quantized": ("llama3", Recipe(INT8, int_quantized, 8, 0, activation_bits=8)),
    "int-quantized asymmetric": ("qwen3", Recipe(INT8_UNEVEN, int_quantized, 8, 0, False, activation_bits=8)),
    "pack-quantized": ("llama3", Recipe(packed(4, 32, True), pack_quantized)),
    "pack-quantized asymmetric": ("qwen3", Recipe(packed(4, 16, False), pack_quantized, 4, 16, False)),
    "pack-quantized 8 bits": ("qwen2", Recipe(packed(8, 0, True), pack_quantized, 8, 0)),
    "pack-quantized in parts": ("llama3", Recipe(packed(4, 32, True, ignore=IGNORED), pack_quantized, covers=some)),
    "gptq": ("qwen2", Recipe(gptq_config(sym=False), gptq, symmetric=False)),
    "gptq symmetric": ("llama3", Recipe(gptq_config(), gptq)),
    "gptq without g_idx": ("qwen3", Recipe(gptq_config(), older_gptq)),
    "gptq version 2": (
        "qwen3",
        Recipe(gptq_config(checkpoint_format="gptq_v2", desc_act=True), lambda w: gptq(w, 2), symmetric=False),
    ),
    "gptq 8 bits and head": (
        "llama3",
        Recipe(gptq_config(8, -1, lm_head=True), gptq, 8, 0, covers=lambda linear: True),
    ),
    "gptq in parts": (
        "llama3",
        Recipe(
            gptq_config(modules_in_block_to_quantize=[["self_attn.q_proj", "self_attn.v_proj"], ["mlp.down_proj"]]),
            gptq,
            covers=lambda linear: linear.endswith(("q_proj", "v_proj", "down_proj")),
        ),
    ),
    "awq": ("llama3", Recipe(awq_config(), awq, symmetric=False)),
    "awq in parts": (
        "qwen2",
        Recipe(
            awq_config(modules_to_not_convert=["k_proj", "layers.2."], version="GEMM"),
            awq,
            symmetric=False,
            covers=lambda linear: not ("k_proj" in linear or "layers.2." in linear or linear == "lm_head"),
        ),
    ),
}
RECIPES |= {
    "pack-quantized experts": ("olmoe", Recipe(packed(4, 32, True), pack_quantized)),
    "gptq of experts": ("qwen3_moe", Recipe(gptq_config(), gptq)),
    "awq of experts": ("qwen2_moe", Recipe(awq_config(), awq, symmetric=False)),
}
Make = Callable[[str], Written]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(name: str) -> Written:
        model, recipe = RECIPES[name]
        return write(make_model(*NATIVE[model]), recipe, tmp_path_factory.mktemp("quantised"))

    return make


def config_of(path: Path, **changes: Any) -> WorkerConfig:
    return replace(WorkerConfig(model=str(path), dtype="float32", kernels="reference", fallback=False), **changes)


def loaded(path: Path, **changes: Any) -> LoadedModel:
    return load_model(config_of(path, **changes))


def by_hand(made: Written, model: LoadedModel, **changes: Any) -> LoadedModel:
    """The same model, made from the weights in memory instead of their files."""
    fields = json.loads((made.plain_path / "config.json").read_text())
    spec = native_spec(fields["architectures"][0], fields)
    plain = {name.removesuffix(".weight"): tensor for name, tensor in made.tensors.items()}
    weights = plain | {name: replace(weight, **changes) for name, weight in made.weights.items()}
    decoder = Decoder(spec, ReferenceOps(model.device), WeightSource(made.tensors, weights), model.dtype, 1024)
    return replace(model, model=decoder)


IDS = prompts()[-1]


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_is_that_of_the_numbers(name: str, written: Make) -> None:
    """Bit for bit; with 16-bit activations also the model of the plain checkpoint."""
    made = written(name)
    model = loaded(made.path)
    got = logits_of(model, IDS, [len(IDS)])
    assert torch.equal(got, logits_of(by_hand(made, model), IDS, [len(IDS)]))
    widened = logits_of(loaded(made.plain_path), IDS, [len(IDS)])
    if RECIPES[name][1].activation_bits == 16:
        assert torch.equal(got, widened)
    else:
        assert not torch.equal(got, widened)
        assert (got - widened).abs().mean() < 0.05 * widened.std()


@pytest.mark.parametrize("name", ["int-quantized", "awq", "gptq in parts"])
def test_other_kernels_widen_the_weights(name: str, written: Make) -> None:
    """The weights are dequantised, so the model is that of the plain checkpoint, bit for bit."""
    made = written(name)
    got = logits_of(loaded(made.path, kernels="torch"), IDS, [len(IDS)])
    assert torch.equal(got, logits_of(loaded(made.plain_path, kernels="torch"), IDS, [len(IDS)]))


@pytest.mark.parametrize("name", ["gptq", "gptq without g_idx", "pack-quantized", "int-quantized"])
def test_every_byte_counts_as_progress_once(name: str, written: Make) -> None:
    made, seen = written(name), list[tuple[int, int]]()
    load_model(config_of(made.path), lambda done, of: seen.append((done, of)))
    total = sum(tensor.nbytes for tensor in load_file(made.path / "model.safetensors").values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (total, total)


def test_the_run_dtype_is_not_that_of_the_words(written: Make, tmp_path: Path) -> None:
    made = written("awq")
    assert loaded(copy_of(made, tmp_path / "unnamed", dtype=None), dtype="auto").dtype == torch.float32


def test_int4_rounds_the_activations_of_a_4_bit_checkpoint(written: Make) -> None:
    made = written("awq")
    plain, rounded = loaded(made.path), loaded(made.path, quantization="int4")
    got = logits_of(rounded, IDS, [len(IDS)])
    assert torch.equal(got, logits_of(by_hand(made, rounded, activation_bits=8), IDS, [len(IDS)]))
    assert not torch.equal(got, logits_of(plain, IDS, [len(IDS)]))
    assert rounded.fingerprint == plain.fingerprint
    assert rounded.numerics_id != plain.numerics_id
    assert plain.numerics_id != loaded(made.plain_path).numerics_id


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("awq", "int8"), ("awq", "int4a16"), ("int-quantized", "int8"), ("int-quantized", "int4"),
     ("pack-quantized 8 bits", "int4")],
)  # fmt: skip
def test_a_quantised_checkpoint_is_not_quantised_again(name: str, quantization: str, written: Make) -> None:
    with pytest.raises(UnsupportedConfig, match=rf"quantization='{quantization}': the checkpoint is quantised already"):
        loaded(written(name).path, quantization=quantization)


def copy_of(made: Written, target: Path, **changes: Any) -> Path:
    """The checkpoint with changed fields in config.json."""
    fields = json.loads((made.path / "config.json").read_text()) | changes
    target.mkdir()
    (target / "config.json").write_text(json.dumps(fields))
    (target / "model.safetensors").symlink_to(made.path / "model.safetensors")
    return target


def group_0(form: str = "pack-quantized", inputs: Any = None, **weights: Any) -> dict[str, Any]:
    return compressed_config(form, weights_scheme(4, 32, True) | weights, inputs)


def changed(config: dict[str, Any], **group: Any) -> dict[str, Any]:
    return config | {"config_groups": {"group_0": config["config_groups"]["group_0"] | group}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method='hqq' is not one of awq, compressed-tensors, fp8, gptq, mxfp4"),
        ({"bits": 4}, "quant_method=None"),
        (["gptq"], "quant_method=None"),
        (gptq_config(3), "bits=3"),
        (gptq_config(bits=None), "'bits' is missing"),
        (gptq_config(group=0), "group_size=0"),
        (gptq_config(group=64), "down_proj: group_size=64 does not divide the 96 inputs"),
        (gptq_config(group=None), "'group_size' is missing"),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format='marlin'"),
        (gptq_config(checkpoint_format="gptq", format="gptq_v2"), "contradict"),
        (gptq_config(is_marlin_format=True), "is_marlin_format"),
        (gptq_config(dynamic={"-:.*": {}}), "dynamic="),
        (gptq_config(pack_dtype="int64"), "pack_dtype"),
        (gptq_config(modules_in_block_to_quantize=[[1]]), "modules_in_block_to_quantize"),
        (gptq_config(rotation="hadamard"), "rotation"),
        (gptq_config(desc_act="yes"), "desc_act"),
        (awq_config(version="gemv"), "version='gemv'"),
        (awq_config(bits=8), "bits=8"),
        (awq_config(zero_point=False), "zero_point=False"),
        (awq_config(modules_to_not_convert="lm_head"), "modules_to_not_convert"),
        (awq_config(modules_to_not_convert=[None]), "modules_to_not_convert"),
        (awq_config(group=40), "group_size=40 does not divide"),
        (awq_config(fancy=1), "fancy"),
        (group_0("float-quantized"), "format='float-quantized'"),
        (group_0("nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'"),
        (group_0("marlin-24"), "format='marlin-24'"),
        (group_0("mixed-precision"), "group_0: 'format' is missing"),
        (group_0(type="float"), "group_0.weights: type='float'"),
        (group_0(num_bits=3), "group_0.weights: num_bits=3"),
        (group_0(strategy="tensor"), "group_0.weights: strategy='tensor'"),
        (group_0(strategy="channel"), "group_0.weights: group_size=32 cannot be combined with"),
        (group_0(group_size=None), "group_0.weights: group_size=None"),
        (group_0(group_size=64), "group_size=64 does not divide the 96 inputs"),
        (group_0(actorder="group"), "group_0.weights: actorder='group'"),
        (group_0(dynamic=True), "group_0.weights: dynamic=True"),
        (group_0(block_structure=[16, 1]), "block_structure"),
        (group_0(secret=1), "group_0.weights: not supported natively: secret"),
        (group_0(inputs=TOKEN_SCHEME), "'input_activations' are not supported"),
        (group_0() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (group_0() | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (group_0() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (group_0() | {"quantization_status": "initialized"}, "quantization_status"),
        (group_0() | {"config_groups": {}}, "'config_groups' is empty"),
        (group_0() | {"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16 must be an object"),
        (group_0() | {"ignore": ["re:("]}, "'ignore': a pattern is not a regular expression"),
        (group_0() | {"ignore": [3]}, "'ignore' must be a list of names"),
        (group_0() | {"ignore": ["re:" + "a" * 1000]}, "'ignore': patterns may have up to 512 characters"),
        (group_0() | {"ignore": [r"re:(\w*\.?)*!"]}, "'ignore': patterns may have .* without nesting"),
        (group_0() | {"ignore": ["re:" + ".*a" * 9]}, "'ignore': patterns may have .* few repetitions"),
        (changed(INT8, output_activations={"num_bits": 8}), "output_activations"),
        (changed(INT8, input_activations=None), "'input_activations' is missing"),
        (changed(INT8, input_activations=TOKEN_SCHEME | {"dynamic": False}), "input_activations: dynamic=False"),
        (changed(INT8, input_activations=TOKEN_SCHEME | {"strategy": "tensor"}), "strategy must be 'token'"),
        (changed(INT8, input_activations=TOKEN_SCHEME | {"num_bits": 4}), "input_activations: num_bits=4"),
        (changed(INT8, input_activations=TOKEN_SCHEME | {"symmetric": False}), "input_activations: symmetric=False"),
        (changed(INT8, weights=weights_scheme(8, 32, True)), "strategy='group'"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(config: Any, message: str, written: Make, tmp_path: Path) -> None:
    where = copy_of(written("gptq"), tmp_path / "refused", quantization_config=config)
    with pytest.raises((UnsupportedConfig, CheckpointError), match=rf"^config\.json: quantization_config.*{message}"):
        loaded(where)


def test_only_native_models(written: Make, tmp_path: Path) -> None:
    where = copy_of(written("gptq"), tmp_path / "other", architectures=["OtherForCausalLM"])
    with pytest.raises(UnsupportedConfig, match=r"quantization_config \(gptq\): only models with a native.*Other"):
        loaded(where, fallback=True)


def edit(made: Written, target: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """The checkpoint with changed tensors."""
    tensors = load_file(made.path / "model.safetensors")
    change(tensors)
    target.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text((made.path / "config.json").read_text())
    return target


LAYER = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", lambda t: t.pop(f"{LAYER}.qzeros"), "missing tensors: {}.qzeros"),
        ("gptq", lambda t: t.update({f"{LAYER}.weight": torch.zeros(4)}), "unexpected tensors: {}.weight"),
        ("gptq", lambda t: t.update({f"{LAYER}.scales": torch.ones(1, 64)}), r"{}.scales has shape \[1, 64\]"),
        ("gptq", lambda t: t.update({f"{LAYER}.qweight": torch.ones(8, 64)}), "{}.qweight is F32, expected I32"),
        ("gptq", lambda t: t.update({f"{LAYER}.g_idx": torch.zeros(64)}), "{}.g_idx is F32"),
        ("gptq version 2", lambda t: t.pop(f"{LAYER}.g_idx"), "missing tensors: {}.g_idx"),
        ("gptq without g_idx", lambda t: t[f"{LAYER}.bias"].add_(1), "{}.bias is not zero"),
        ("awq", lambda t: t.update({f"{LAYER}.qweight": torch.ones(64, 64).int()}), r"{}.qweight has shape \[64, 64\]"),
        ("pack-quantized", lambda t: t[f"{LAYER}.weight_shape"].neg_(), r"{}.weight_shape is \[-64, -64\]"),
        ("pack-quantized", lambda t: t.update({f"{LAYER}.weight_g_idx": torch.zeros(64)}), "{}.weight_g_idx"),
        (
            "int-quantized",
            lambda t: t.update({f"{LAYER}.weight": torch.zeros(64, 64)}),
            "{}.weight is F32, expected I8",
        ),
        ("int-quantized", lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(64)}), r"scale has shape \[64\]"),
    ],
)
def test_tensors_that_do_not_fit(name: str, change: Any, message: str, written: Make, tmp_path: Path) -> None:
    where = edit(written(name), tmp_path / "edited", change)
    with pytest.raises(CheckpointError, match=message.format(LAYER.replace(".", r"\."))):
        loaded(where)


def test_reordered_inputs_are_refused(written: Make, tmp_path: Path) -> None:
    where = edit(written("gptq"), tmp_path / "edited", lambda t: t.update({f"{LAYER}.g_idx": torch.ones(64).int()}))
    with pytest.raises(UnsupportedConfig, match=rf"'desc_act': g_idx reorders the inputs of {LAYER}"):
        loaded(where)


def test_a_name_counts_more_than_an_expression_and_that_more_than_the_class() -> None:
    def group(target: str, size: int) -> dict[str, Any]:
        return {"targets": [target], "weights": weights_scheme(4, size, True)}

    groups = {"a": group("Linear", 16), "b": group("re:.*down_proj", 32), "c": group("x.down_proj", 64)}
    layout = read_layout({"quantization_config": group_0() | {"config_groups": groups}})
    assert layout is not None
    sizes = {name: layout.packing_of(name) for name in ("x.up_proj", "y.down_proj", "x.down_proj", "lm_head")}
    assert [packing and packing.form.group for packing in sizes.values()] == [16, 32, 64, None]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["Linear", "int", "gptq", "group", "re:["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["weights", "targets", "x"]), inner),
    max_leaves=6,
)
CONFIGS = [gptq_config(), awq_config(), INT8, group_0()]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_configuration_is_read_or_refused(data: st.DataObject) -> None:
    config = data.draw(st.sampled_from(CONFIGS))
    name = data.draw(st.sampled_from(sorted(config)))
    inner = json.loads(json.dumps(config))
    place = inner
    if name == "config_groups" and data.draw(st.booleans()):
        place = inner["config_groups"]["group_0"]
        name = data.draw(st.sampled_from(sorted(place)))
        if isinstance(place[name], dict) and data.draw(st.booleans()):
            place = place[name]
            name = data.draw(st.sampled_from(sorted(place)))
    place[name] = data.draw(VALUES)
    layout = layout_or_refusal(inner)
    if isinstance(layout, str):
        assert layout.startswith("config.json: quantization_config")
        return
    for linear in ("model.layers.0.mlp.up_proj", "lm_head"):
        packing = layout.packing_of(linear)
        if packing is not None:
            with suppress(UnsupportedConfig, CheckpointError):
                assert packing.tensors(linear, (64, 96))


def layout_or_refusal(config: Any) -> Layout | str:
    try:
        layout = read_layout({"quantization_config": config})
    except (UnsupportedConfig, CheckpointError) as error:
        return str(error)
    assert layout is not None
    return layout
