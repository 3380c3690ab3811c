"""Latents stored once, as key and value, give the same bits as stored twice, wherever their blocks have been."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.worker.models.checkpoints import NATIVE, make_model, prompts
from tests.worker.models.conftest import Loaded
from tests.worker.models.harness import BLOCK_SIZE, Harness, Row, logits_of

from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.loading.model import LoadedModel, decoder_needs, native_spec
from pagoda_worker.loading.numerics import numerics_id
from pagoda_worker.step.moving import SwapSpace

NAMES = ["deepseek_v2", "deepseek_v3"]
BUILT = LIBRARY.exists()
ONCE = [(name, dtype) for name in ("torch", "reference") for dtype in ("bfloat16", "float32")]
ONCE += [("native", "bfloat16")] if BUILT else []
LINE = 3 * (32 + 16) * 2  # bytes of a token's latents in three layers
CHUNKS = [[10**6], [37, 1, 1, 5, 200]]


def twice(model: LoadedModel) -> LoadedModel:
    """The same model over a cache that stores values separately from keys."""
    return replace(model, kv_groups=tuple(replace(group, planes=2) for group in model.kv_groups))


def rounded(model: LoadedModel) -> LoadedModel:
    """The same model over a cache in int8."""
    return replace(model, kv_groups=tuple(replace(group, quantized=True) for group in model.kv_groups))


@pytest.mark.parametrize(
    ("kernels", "planes"),
    [
        ("reference", 1),
        ("torch", 1),
        *([(one, 1) for one in ("native", "native,attention=torch", "torch,attention=native")] if BUILT else []),
    ],
)
def test_a_token_takes_what_its_back_end_keeps(kernels: str, planes: int, loaded: Loaded) -> None:
    model = loaded("deepseek_v3", "bfloat16", kernels)
    assert [group.planes for group in model.kv_groups] == [planes]
    assert sum(group.bytes_per_token for group in model.kv_groups) == planes * LINE


def test_how_often_they_are_kept_is_part_of_the_numerics(loaded: Loaded) -> None:
    """In int8 the bits differ from those of two planes, since a separate value has its own scale."""
    model = loaded("deepseek_v3", "bfloat16")
    (once,) = model.kv_groups
    assert numerics_id(model.ops, once, "native") != numerics_id(model.ops, replace(once, planes=2), "native")
    ids = prompts()[-1]
    assert not torch.equal(logits_of(rounded(model), ids, [99]), logits_of(rounded(twice(model)), ids, [99]))


def test_a_back_end_is_told_which_layers_have_latents() -> None:
    config = WorkerConfig(model="deepseek", device="cpu")
    for name, latent in (("deepseek_v3", True), ("llama", False)):
        model = make_model(*NATIVE[name])
        spec = native_spec(type(model).__name__, model.config.to_dict())
        needs = decoder_needs(config, torch.bfloat16, spec)
        assert needs.latent_attention == (needs.attention if latent else ())


def test_other_models_keep_values_beside_keys(loaded: Loaded) -> None:
    assert [group.planes for group in loaded("llama").kv_groups] == [2]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(("kernels", "dtype"), ONCE)
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_values_beside_keys(
    name: str, kernels: str, dtype: str, chunks: list[int], loaded: Loaded
) -> None:
    model, tokens = loaded(name, dtype, kernels), prompts(longest=280)[-1]
    expected = logits_of(twice(model), tokens, chunks)
    assert expected.isfinite().all()
    assert torch.equal(logits_of(model, tokens, chunks), expected)


@pytest.mark.parametrize(("kernels", "dtype"), [one for one in ONCE if one[0] != "reference"])
def test_bits_are_the_same_in_company(kernels: str, dtype: str, loaded: Loaded) -> None:
    model, lists = loaded("deepseek_v3", dtype, kernels), prompts(longest=280)
    results = []
    for one in (model, twice(model)):
        harness, rows = Harness(one), [Row(tokens) for tokens in lists]
        harness.prefill(rows, 23)
        results.append(torch.cat([torch.stack(row.logits) for row in rows]))
    assert torch.equal(*results)


def plain(model: LoadedModel) -> LoadedModel:
    return model


@pytest.mark.parametrize("kept", [plain, rounded])
@pytest.mark.parametrize(("kernels", "dtype"), [one for one in ONCE if one[0] != "reference"])
def test_bits_do_not_depend_on_where_blocks_have_been(
    kernels: str, dtype: str, kept: Callable[[LoadedModel], LoadedModel], loaded: Loaded
) -> None:
    """After a prefix hit, a copy, swapping out and in, and recomputation."""
    model, ids = kept(loaded("deepseek_v3", dtype, kernels)), prompts(longest=100)[-1]
    harness, first = Harness(model), Row(ids)
    harness.prefill([first], 40)
    count = len(first.blocks)
    copies, back = ([harness.free.pop() for _ in range(count)] for _ in range(2))
    (group,), (kv,) = model.kv_groups, harness.kv
    space = SwapSpace(model, group, kv, BLOCK_SIZE, count, None)
    with torch.inference_mode():
        model.ops.copy_blocks(kv, list(zip(first.blocks, copies, strict=True)))
        space.swap_out([(block, count - 1 - place) for place, block in enumerate(copies)])
        space.swap_in([(count - 1 - place, block) for place, block in enumerate(back)])
    rows = [
        Row(ids, blocks=first.blocks[:3], computed=3 * BLOCK_SIZE),
        Row(ids, blocks=copies, computed=70),
        Row(ids, blocks=back, computed=57),
        Row(ids),
    ]
    starts = [row.computed for row in rows]
    harness.prefill(rows, 17)
    for row, start in zip(rows, starts, strict=True):
        assert torch.equal(torch.stack(row.logits), torch.stack(first.logits)[start:])
