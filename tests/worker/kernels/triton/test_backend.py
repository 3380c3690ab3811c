"""The back end as a whole: when it is chosen, what its self-check finds, and a model computed by it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.worker import fakes_spec
from tests.worker.kernels.triton.support import CPU, DEVICE, assert_continues, reference, shape_of, walking
from triton.runtime.errors import OutOfResources

from pagoda_worker.checkpoints.names import LLAMA
from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import Added, BackendError, Needs
from pagoda_worker.kernels.triton import load as backend
from pagoda_worker.kernels.triton import selfcheck
from pagoda_worker.kernels.triton.device_sampler import TritonSampler
from pagoda_worker.kernels.triton.load import HEIGHTS, load_triton
from pagoda_worker.kernels.triton.ops import TritonOps
from pagoda_worker.kernels.triton.selfcheck import Verdict
from pagoda_worker.models.families.gemma import NAMES as GEMMA_NAMES
from pagoda_worker.models.families.olmo import NAMES as OLMO_NAMES
from pagoda_worker.rows.rows import Row
from pagoda_worker.sampling.device_sampler import Chosen, GreedySampler
from pagoda_worker.step.moving import SwapSpace

NEEDS = Needs(dtype=torch.float16, head_dims=(32,))
FEW_HEADS = replace(NEEDS, attention=(shape_of(3, 1, 32),))  # fewer than the check uses if no model is given


def test_it_serves_when_named_and_its_bits_have_a_name() -> None:
    ops, remarks = load_ops(DEVICE, "triton", replace(NEEDS, adapters=True, experts=True))
    assert isinstance(ops, TritonOps)
    assert not remarks
    assert (ops.tiles.low, ops.tiles.high) == HEIGHTS[0]
    assert ops.numerics != TritonOps(DEVICE, replace(ops.tiles, low=64)).numerics
    assert ops.record(lambda *_: torch.empty(0), None, 1) is None
    assert WorkerConfig(kernels="triton").kernels == "triton"


class Wrong(TritonOps):
    """Kernels with one fault."""

    fault = ""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().rms_norm(x, weight, eps) * (2 if self.fault == "norm" else 1)

    def linear(self, x: torch.Tensor, packed: Any, added: Added | None = None) -> torch.Tensor:
        y = super().linear(x, packed, added)
        if added is not None and (self.fault == "adapters" or (self.fault == "company" and len(x) > 1)):
            y[0] *= 1.5 if self.fault == "adapters" else 1.001
        return y

    def gated_linear(self, x: torch.Tensor, packed: Any, activation: str) -> torch.Tensor:
        return super().gated_linear(x, packed, activation) + (1 if self.fault == "activation" else 0)

    def moe(self, x: torch.Tensor, *operands: Any) -> torch.Tensor:
        out = super().moe(x, *operands)
        few = len(x) < selfcheck.TOKENS
        if self.fault == "experts" or (few and self.fault == "few tokens"):
            out[-1] += 1
        if few and self.fault == "company":
            out[0, 0] *= 1.002
        return out

    def attend(self, query: torch.Tensor, *operands: Any) -> torch.Tensor:
        out = super().attend(query, *operands)
        if self.fault == "attention" or (self.fault == "latents" and operands[0].shape.planes == 1):
            out[-1] = 0
        in_chunks = query.shape[0] < selfcheck.LENGTH
        if in_chunks and self.fault == "chunks":
            out[-1] = 0
        if in_chunks and (self.fault == "cut" or (self.fault == "low tiles" and self.tiles.low == 16)):
            out[0, 0] *= 1.002
        return out


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", None),
        ("norm", "norms are wrong"),
        ("activation", "gated layers are wrong"),
        ("attention", "attention is wrong"),
        ("chunks", "attention in chunks is wrong"),
        ("adapters", "the contribution of adapters is wrong"),
        ("company", "the contribution of an adapter depends on other rows"),
        ("experts", "experts are wrong"),
        ("few tokens", "experts of few tokens are wrong"),
    ],
)
def test_a_fault_is_found_and_named(fault: str, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "fault", fault)
    found = selfcheck.verdict(Wrong(DEVICE, walking.tiles), replace(FEW_HEADS, adapters=True, experts=True))
    assert found.varies is None
    assert (found.wrong is None) if words is None else words in (found.wrong or "")


def test_latents_are_tried_as_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "fault", "latents")
    ops = Wrong(DEVICE, walking.tiles)
    assert selfcheck.verdict(ops, FEW_HEADS) == Verdict()
    found = selfcheck.verdict(ops, replace(FEW_HEADS, latent_attention=FEW_HEADS.attention))
    assert "attention is wrong" in (found.wrong or "")
    monkeypatch.setattr(Wrong, "fault", "")
    assert selfcheck.verdict(ops, replace(FEW_HEADS, latent_attention=FEW_HEADS.attention)) == Verdict()


@pytest.mark.parametrize(
    ("fault", "words"), [("cut", "depends on how a prompt is cut"), ("company", "depend on the number of tokens")]
)
def test_other_bits_are_no_fault(fault: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "fault", fault)
    found = selfcheck.verdict(Wrong(DEVICE, walking.tiles), replace(FEW_HEADS, experts=True))
    assert found.wrong is None
    assert words in (found.varies or "")


def test_kernels_whose_bits_depend_on_cuts_serve_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "TritonOps", Wrong)
    monkeypatch.setattr(backend, "HEIGHTS", HEIGHTS[:1])
    monkeypatch.setattr(Wrong, "fault", "cut")
    ops = load_triton(DEVICE, FEW_HEADS)
    assert (ops.tiles.low, ops.tiles.high) == HEIGHTS[0]
    assert not ops.batch_invariant
    assert ops.numerics != ops.with_tiles(ops.tiles).numerics
    assert "attention depends on how a prompt is cut" in caplog.text


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("rms_norm", OutOfResources(1, 0, "shared memory")),
        ("rms_norm", RuntimeError("ptxas")),
        ("rms_norm", FileNotFoundError("cc")),
        ("attend", OutOfResources(1, 0, "shared memory")),
    ],
)
def test_whatever_a_kernel_raises_another_back_end_serves(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(TritonOps, name, broken)
    monkeypatch.setattr(backend, "HEIGHTS", (HEIGHTS[0], HEIGHTS[-1]))
    with pytest.raises(BackendError, match=f"triton failed: {type(error).__name__}"):
        load_ops(DEVICE, "triton", FEW_HEADS)
    monkeypatch.setattr(backend, "_tiles", lambda device: [walking.tiles])
    ops, (remark,) = load_ops(torch.device("cuda:0"), "auto", NEEDS)
    assert ops.name == "torch"
    assert remark.startswith("torch serves: kernels: triton failed")


def test_it_rounds_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = replace(NEEDS, quantized_cache=True)
    with pytest.raises(BackendError, match="cannot serve attention: triton does not support an int8 KV cache"):
        load_ops(DEVICE, "triton", rounded)
    monkeypatch.setattr(backend, "verdict", lambda ops, needs: Verdict())
    monkeypatch.setattr(selfcheck, "sampling_problem", lambda ops, needs: None)
    monkeypatch.setattr(backend, "_tiles", lambda device: [walking.tiles])
    ops, (remark,) = load_ops(torch.device("cuda:0"), "auto", rounded)
    assert ops.name == "linear triton, pointwise triton, attention torch, sampling triton"
    assert remark.startswith("attention by torch, not by triton: triton does not support an int8 KV cache")


@pytest.mark.parametrize("error", [RuntimeError("no Python headers"), ImportError("libcuda"), OSError("no compiler")])
def test_whatever_is_raised_while_loading_another_back_end_serves(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(backend, "load_triton", broken)
    with pytest.raises(BackendError, match=f"triton failed: {type(error).__name__}: {error}"):
        load_ops(DEVICE, "triton", NEEDS)
    ops, (remark,) = load_ops(torch.device("cuda:0"), "auto", NEEDS)
    assert ops.name == "torch"
    assert str(error) in remark


def test_only_tiles_that_fit_the_device_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """High tiles need too much memory here, so the lowest are used."""

    class Small(TritonOps):
        def attend(self, query: torch.Tensor, *operands: Any) -> torch.Tensor:
            if self.tiles.high > 16:
                raise OutOfResources(1, 0, "shared memory")
            return super().attend(query, *operands)

    monkeypatch.setattr(backend, "TritonOps", Small)
    monkeypatch.setattr(backend, "HEIGHTS", (HEIGHTS[0], HEIGHTS[-1]))
    assert load_triton(DEVICE, FEW_HEADS).tiles.high == 16


def _off_by_one(self: TritonSampler, logits: torch.Tensor, rows: Sequence[Row]) -> Chosen:
    chosen = choose(self, logits, rows)
    chosen.ids[2] += 1
    return chosen


def _without_likely_tokens(self: TritonSampler, logits: torch.Tensor, rows: Sequence[Row]) -> Chosen:
    chosen = choose(self, logits, rows)
    assert chosen.logprobs is not None
    chosen.logprobs[:, -1] -= 1
    return chosen


def _too_large(self: TritonSampler, logits: torch.Tensor, rows: Sequence[Row]) -> Chosen:
    raise OutOfResources(1, 0, "shared memory")


choose = TritonSampler.sample


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (choose, None),
        (_off_by_one, "sampling is wrong"),
        (_without_likely_tokens, "sampling is wrong"),
        (_too_large, "kernels: sampling failed: .*shared memory"),
    ],
)
def test_the_sampler_is_checked(sample: Any, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonSampler, "sample", sample)
    found = selfcheck.sampling_problem(walking, NEEDS)
    assert found is None if words is None else re.match(words, found or "")


def test_a_sampler_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "verdict", lambda ops, needs: Verdict())
    monkeypatch.setattr(selfcheck, "sampling_problem", lambda ops, needs: "it says 7 to everything")
    with pytest.raises(BackendError, match="cannot serve sampling: failed its self-check: it says 7"):
        load_ops(DEVICE, "triton", NEEDS)
    monkeypatch.setattr(backend, "_tiles", lambda device: [walking.tiles])
    ops, (remark,) = load_ops(torch.device("cuda:0"), "auto", NEEDS)
    assert ops.name == "linear triton, pointwise triton, attention triton, sampling torch"
    assert ops.capturable is TritonOps.capturable
    assert isinstance(ops.device_sampler(4, 100, torch.clone), GreedySampler)
    assert remark == "sampling by torch, not by triton: failed its self-check: it says 7 to everything"


def test_tiles_whose_bits_differ_are_not_used_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "TritonOps", Wrong)
    monkeypatch.setattr(Wrong, "fault", "low tiles")
    tiles = load_triton(DEVICE, FEW_HEADS).tiles
    assert (tiles.low, tiles.high) == HEIGHTS[1]


def test_kernels_that_fail_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "verdict", lambda ops, needs: Verdict("all is wrong"))
    with pytest.raises(BackendError, match="all is wrong"):
        load_ops(DEVICE, "triton", NEEDS)
    monkeypatch.setattr(backend, "_tiles", lambda device: [walking.tiles])
    ops, (remark,) = load_ops(torch.device("cuda:0"), "auto", NEEDS)
    assert ops.name == "torch"
    assert remark.startswith("torch serves: kernels: triton failed its self-check")


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(BackendError, match="float64"):
        load_ops(DEVICE, "triton", replace(NEEDS, dtype=torch.float64))


@dataclass(frozen=True)
class OneCache:
    """The parts of a loaded model that moving blocks needs."""

    ops: TritonOps = walking
    device: torch.device = DEVICE


def test_blocks_outlast_the_cache_in_swap_blocks() -> None:
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    kv = walking.new_kv_cache(shape, 6, 16)
    kv.storage.copy_(torch.randn(kv.storage.shape))
    before = kv.storage.clone()
    loaded: Any = OneCache()
    space = SwapSpace(loaded, shape, kv, 16, 4, None)
    space.swap_out([(5, 0), (2, 3), (0, 1)])
    kv.storage.zero_()
    space.swap_in([(3, 4), (1, 2), (0, 3)])
    assert torch.equal(kv.storage[:, :, [4, 2, 3]], before[:, :, [2, 0, 5]])
    assert not kv.storage[:, :, [0, 1, 5]].any()


def test_blocks_move_in_and_out() -> None:
    shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, dtype=torch.float32)
    theirs, mine = reference.new_kv_cache(shape, 4, 16), walking.new_kv_cache(shape, 4, 16)
    places = torch.arange(64)
    for layer in range(2):
        key, value = torch.randn(2, 64, 2, 32)
        reference.write_kv(key, value, theirs, layer, places)
        walking.write_kv(key.to(DEVICE), value.to(DEVICE), mine, layer, places.to(DEVICE))
    exported = walking.export_blocks(mine, [3, 1])
    assert torch.equal(exported.cells.cpu(), reference.export_blocks(theirs, [3, 1]).cells)
    walking.import_blocks(mine, [0, 2], exported)
    assert torch.equal(walking.export_blocks(mine, [0, 2]).cells, exported.cells)
    walking.copy_blocks(mine, [(3, 1), (1, 0)])
    assert torch.equal(walking.export_blocks(mine, [1, 0]).cells, exported.cells)
    with pytest.raises(ValueError, match="do not fit"):
        walking.import_blocks(mine, [0], exported)
    with pytest.raises(BackendError, match="int8"):
        walking.new_kv_cache(replace(shape, quantized=True), 4, 16)


def test_without_an_interpreter_it_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    with pytest.raises(BackendError, match="CUDA device, not cpu"):
        load_ops(CPU, "triton", NEEDS)


def test_without_triton_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pagoda_worker.kernels.triton.load", None)
    with pytest.raises(BackendError, match="triton cannot be imported"):
        load_ops(DEVICE, "triton", NEEDS)
    ops, (remark,) = load_ops(torch.device("cuda:0"), "auto", NEEDS)
    assert ops.name == "torch"
    assert "triton cannot be imported" in remark


# --- a model ---------------------------------------------------------------------------------------------------------


def spec_of(**changes: Any) -> DecoderSpec:
    values: dict[str, Any] = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "norm_eps": 1e-6,
        "max_positions": 512,
        "ropes": (RopeShape(theta=10_000.0, head_dim=16),),
        "rope_of_layer": (0, 0),
        "windows": (None, 20),
        "attention_scale": 0.25,
    }
    return fakes_spec.spec_of(**{**values, **changes})


FAMILIES: dict[str, dict[str, Any]] = {
    "plain": {"qkv_bias": True},
    "head norms": {"head_norms": True, "tied": True},
    "chunks": {"chunked": True, "windows": (16, None)},
    "whole norms": {"width_norms": True, "names": OLMO_NAMES},
    "layer norms": {
        "norm_kind": "layer",
        "norm_bias": True,
        "parallel": True,
        "gated": False,
        "activation": "gelu",
        "names": replace(LLAMA, up=("mlp.up_proj",)),
        "learned_positions": True,
        "rope_of_layer": (0, None),
    },
    "branch norms": {
        "names": GEMMA_NAMES,
        "norm_offset": 1.0,
        "embed_scale": 48**0.5,
        "attention_softcap": 5.0,
        "final_softcap": 30.0,
        "activation": "gelu_tanh",
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_model_continues_as_by_the_reference(family: str) -> None:
    assert_continues(spec_of(**FAMILIES[family]), walking)
