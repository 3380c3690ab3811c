"""Models with differing layers: each layer's cache is in the matching group, and parts of merged matrices are found."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.worker.checkpoints.formats.sources import PlainSource
from tests.worker.fakes_spec import spec_of
from tests.worker.models.checkpoints import prompts
from tests.worker.models.harness import make_batch

from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.spec import DecoderSpec, expected_tensors
from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.kv_cache import KVLayer, KVShape, grouped
from pagoda_worker.kernels.ops import Ops
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.models.linear import Packer

CPU = torch.device("cpu")
WIDE = KVShape(num_layers=1, num_kv_heads=2, head_dim=16, dtype=torch.float32)


def unlike_spec() -> DecoderSpec:
    """Wide, sliding, narrow and wide layers, each with a different MLP width."""
    spec = spec_of(
        vocab_size=256, hidden_size=48, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=16, norm_eps=1e-6,
        max_positions=512, ropes=(RopeShape(theta=1e4, head_dim=16),), rope_of_layer=(0,) * 4,
        windows=(None, 20, None, None), attention_scale=0.25,
    )  # fmt: skip
    layers = [replace(layer, mlp=replace(layer.mlp, width=64 + 32 * i)) for i, layer in enumerate(spec.layers)]
    narrow = replace(layers[2].attention, num_heads=6, num_kv_heads=3, head_dim=8)
    layers[2] = replace(layers[2], attention=narrow, rope=RopeShape(theta=1e3, head_dim=8))
    return replace(spec, layers=tuple(layers))


def weights_of(spec: DecoderSpec) -> PlainSource:
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.2 if len(shape) == 2 else torch.ones(shape)
        for name, shape in expected_tensors(spec).items()
    }
    return PlainSource(weights.__getitem__)


def logits(ops: Ops, sizes: list[int]) -> torch.Tensor:
    """Logits after each token of one row, computed in chunks of these sizes."""
    spec = unlike_spec()
    model = Decoder(spec, ops, weights_of(spec), torch.float32, spec.max_positions)
    kv = [ops.new_kv_cache(group, 8, 16) for group in model.kv_groups]
    tokens, found, start = prompts()[-1], [], 0
    for size in sizes:
        batch = make_batch([(tokens[start : start + size], start, [5, 2, 7, 0, 4, 1])], 16)
        found.append(model.logits(model.forward(batch, kv)))
        start += size
    return torch.cat(found)


def test_layers_of_a_kind_are_a_group() -> None:
    sliding, narrow = replace(WIDE, window=20), replace(WIDE, num_kv_heads=3, head_dim=8)
    groups, layers = grouped([WIDE, sliding, narrow, WIDE])
    assert groups == (replace(WIDE, num_layers=2), sliding, narrow)
    assert layers == [KVLayer(0, 0), KVLayer(1, 0), KVLayer(2, 0), KVLayer(0, 1)]


def test_a_model_of_unlike_layers_has_a_cache_for_each_kind() -> None:
    spec = unlike_spec()
    model = Decoder(spec, ReferenceOps(CPU), weights_of(spec), torch.float32, spec.max_positions)
    assert [(g.num_layers, g.num_kv_heads, g.head_dim, g.window) for g in model.kv_groups] == [
        (2, 2, 16, None),
        (1, 2, 16, 20),
        (1, 3, 8, None),
    ]


def test_unlike_layers_compute_what_the_reference_does_however_a_prompt_is_cut() -> None:
    expected = logits(ReferenceOps(CPU), [90])
    torch.testing.assert_close(logits(ReferenceOps(CPU), [40, 49, 1]), expected, rtol=1e-4, atol=1e-4)
    whole = logits(AtenOps(CPU), [90])
    torch.testing.assert_close(whole, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(logits(AtenOps(CPU), [40, 49, 1]), whole)


def test_the_columns_of_a_merged_matrix_are_those_of_its_parts() -> None:
    spec, ops = unlike_spec(), ReferenceOps(CPU)
    source, names = weights_of(spec), spec.names
    prefix = names.in_layer(2, "")
    packer = Packer(ops, source, torch.float32)
    x = torch.randn(5, spec.hidden_size)
    for parts in (names.qkv, names.up):
        merged = packer.pack(prefix, parts, biased=False)
        y = merged.linear(x, ops)
        assert sum(columns.stop - columns.start for columns in merged.columns.values()) == y.shape[1]
        for part in parts:
            alone = packer.pack(prefix, [part], biased=False).linear(x, ops)
            torch.testing.assert_close(y[:, merged.columns[part]], alone)
