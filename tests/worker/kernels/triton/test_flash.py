"""flash-attention over Triton's cache, against a fake of the library: what it computes, when it is chosen."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.worker.fakes_accelerator import FakeAccelerator
from tests.worker.fakes_model import new_row
from tests.worker.kernels import fakes_flash
from tests.worker.kernels.triton.support import CPU, DEVICE, batch_of, reference, shape_of, walking
from tests.worker.kernels.triton.test_attention import compare
from tests.worker.models.checkpoints import NATIVE, make_model, prompts, save
from tests.worker.models.harness import Harness
from triton.runtime.errors import OutOfResources

from pagoda_proto.steps import Chunk
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels import choose, flash, trial
from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.flash import FlashOps, load_flash
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import AttentionShape, BackendError, Needs, Ops
from pagoda_worker.kernels.triton import load
from pagoda_worker.kernels.triton.ops import TritonKVCache, TritonOps
from pagoda_worker.kernels.triton.selfcheck import Verdict
from pagoda_worker.loading.model import LoadedModel, load_model
from pagoda_worker.rows.rows import Row
from pagoda_worker.step.lines import Lines

pytestmark = pytest.mark.skipif(DEVICE != CPU, reason="the fake stands in for the library on a CPU")

BLOCKS = {2: 256, 3: 16}  # block sizes by version
SHAPE = shape_of(4, 2, 64)
NEEDS = Needs(dtype=torch.bfloat16, head_dims=(64,), attention=(SHAPE, replace(SHAPE, window=40)), block_size=256)
# New tokens and context: length 1, ends of blocks and one beyond, a whole prompt, chunks with a cached prefix.
RAGGED = [(1, 1), (1, 16), (5, 17), (40, 40), (1, 256), (1, 257), (3, 258), (20, 530)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """The back end over one version, before its check."""

    def open_version(version: int) -> FlashOps:
        fakes_flash.install(monkeypatch, version)
        package = {2: "flash_attn", 3: "flash_attn_interface"}[version]
        return FlashOps(walking, flash.PACKAGES[package](sys.modules[package]))

    return open_version


# --- what it computes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("version", BLOCKS)
def test_ragged_rows(version: int, dtype: torch.dtype, opened: Callable[[int], Any]) -> None:
    compare(opened(version), RAGGED, SHAPE, dtype, block_size=BLOCKS[version])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("version", BLOCKS)
def test_heads(version: int, group: int, head_dim: int, opened: Callable[[int], Any]) -> None:
    rows, shape = [(1, 300), (2, 257), (1, 3)], shape_of(2 * group, 2, head_dim)
    compare(opened(version), rows, shape, torch.float16, block_size=BLOCKS[version])


@pytest.mark.parametrize("variant", [{"window": 1}, {"window": 20}, {"window": 300}, {"softcap": 5.0, "window": 65}])
@pytest.mark.parametrize("version", BLOCKS)
def test_windows_and_caps(version: int, variant: dict[str, float], opened: Callable[[int], Any]) -> None:
    rows = [(1, 1), (9, 70), (1, 520), (30, 30)]
    compare(opened(version), rows, shape_of(6, 2, 64, **variant), torch.float16, block_size=BLOCKS[version])


@pytest.mark.parametrize("version", BLOCKS)
def test_decodes_alone(version: int, opened: Callable[[int], Any]) -> None:
    compare(opened(version), [(1, 1), (1, 257), (1, 90)], SHAPE, torch.bfloat16, block_size=BLOCKS[version])
    compare(opened(version), [(1, 90)], SHAPE, torch.bfloat16, block_size=BLOCKS[version])


@pytest.mark.parametrize("version", BLOCKS)
def test_one_plan_serves_all_steps_of_a_recording(version: int, opened: Callable[[int], Any]) -> None:
    ops, size, layers = opened(version), BLOCKS[version], 2
    shape = KVShape(num_layers=layers, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    scratch = 1536 // size
    kv, theirs = ops.new_kv_cache(shape, scratch + 1, size), reference.new_kv_cache(shape, scratch + 1, size)
    places = torch.arange((scratch + 1) * size)
    for layer in range(layers):
        key, value = torch.randn(2, len(places), 2, 64).to(torch.float16)
        ops.write_kv(key, value, kv, layer, places)
        reference.write_kv(key, value, theirs, layer, places)
    lines = Lines(max_rows=4, max_len=600, block_size=size, scratch_blocks=[scratch], device=CPU)
    recorded = lines.batch(4)
    plan = ops.plan(recorded, kv)
    blocks = torch.randperm(scratch).tolist()
    half = scratch // 2
    for lengths in ([3, 512], [257], [1, 400], [513, 2]):
        tables = [blocks[:half], blocks[half:]]
        batch = batch_of([(1, n, table) for n, table in zip(lengths, tables, strict=False)], size)
        lines.write([decoding(i, n, tables[i]) for i, n in enumerate(lengths)], 4, (), FakeAccelerator())
        lines.lay_out(4)
        query = torch.randn(4, 4, 64).to(torch.float16)
        for layer in range(layers):
            got = ops.attend(query, kv, layer, plan, SHAPE)[: len(lengths)]
            expected = reference.attend(query[: len(lengths)], theirs, layer, batch, SHAPE)
            assert torch.allclose(got, expected, rtol=2e-3, atol=2e-3), (lengths, layer)


def decoding(row_id: int, length: int, blocks: list[int]) -> tuple[Row, Chunk]:
    """A decode of the token at this length."""
    row = Row.of(new_row(row_id, [0], blocks), np.zeros(length, np.int64), np.array(blocks, np.int64))
    return row, Chunk(row_id, length - 1, 1, True)


def loaded(path: Path, kernels: str, **changes: Any) -> LoadedModel:
    return load_model(WorkerConfig(model=str(path), kernels=kernels, dtype="float16", max_model_len=512, **changes))


@pytest.mark.parametrize(
    ("kernels", "version", "family"),
    [
        ("triton,attention=flash", 2, "qwen3"),
        ("triton,attention=flash", 3, "gemma2"),
        ("triton,attention=torch", 3, "gemma2"),
    ],
)
def test_a_small_model_continues_as_by_the_reference(
    kernels: str, version: int, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes_flash.install(monkeypatch, version)
    monkeypatch.setattr(load, "verdict", lambda *_: Verdict())
    monkeypatch.setattr(trial, "problem", lambda *_: "")
    path, size = save(make_model(*NATIVE[family]), tmp_path, torch.float16), BLOCKS[version]
    asked = [prompt for prompt in prompts() if len(prompt) in (1, 33, 90)]
    mine = loaded(path, kernels, block_size=size)
    assert f"attention {kernels.rpartition('=')[2]}" in mine.ops.name
    got = Harness(mine, num_blocks=32, block_size=size).greedy(asked, 5, chunk=40)
    assert got == Harness(loaded(path, "reference", block_size=size), 32, size).greedy(asked, 5)
    assert len({token for row in got for token in row}) > 4


# --- its check -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "needs"), [(2, NEEDS), (3, replace(NEEDS, block_size=32, attention=()))])
def test_the_check_passes(version: int, needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes_flash.install(monkeypatch, version)
    ops = load_flash(walking, needs)
    assert (ops.name, ops.capturable, ops.batch_invariant) == ("flash", True, True)
    assert ops.numerics.startswith({2: "flash_attn of", 3: "flash_attn_3 of"}[version])


def test_latents_are_tried_and_measured_as_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "ROWS", 2)
    monkeypatch.setattr(trial, "PROMPT", 256)
    kept: list[int] = []

    class Noting(TritonOps):
        def new_kv_cache(self, shape: KVShape, num_blocks: int, block_size: int) -> TritonKVCache:
            kept.append(shape.planes)
            return super().new_kv_cache(shape, num_blocks, block_size)

    ops = Noting(walking.device, walking.tiles)
    for latents, planes in (((), 2), ((SHAPE,), 1)):
        needs = replace(NEEDS, attention=(SHAPE,), latent_attention=latents)
        assert not trial.problem(ops, walking, needs)
        trial.measure([ops], needs, lambda run: 1.0)
        assert kept == [planes, planes]
        kept.clear()


@pytest.mark.parametrize("version", BLOCKS)
def test_kernels_that_split_keys_by_the_batch_are_found_out(version: int, opened: Callable[[int], Any]) -> None:
    library = opened(version).library
    if version == 2:
        library = replace(library, least_queries=1)
    else:

        def free(query: torch.Tensor, keys: Any, values: Any, plan: flash.Plan, shape: AttentionShape) -> torch.Tensor:
            return fakes_flash.flash_attn_with_kvcache(
                query, keys, values, cache_seqlens=plan.lengths, page_table=plan.tables, cu_seqlens_q=plan.starts,
                max_seqlen_q=plan.most_queries, **flash._masks(shape),
            )  # fmt: skip

        library = replace(library, call=free)
    found = trial.problem(cast("Ops", FlashOps(walking, library)), walking, NEEDS)
    assert "depend on the batch" in found


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            lambda *args, **options: 1.1 * fakes_flash.flash_attn_varlen_func(*args, **options),
            "differ from those of triton",
        ),
        (lambda q, k, v, *old, window_size, causal, softmax_scale: q, "failed: .*unexpected keyword argument"),
    ],
)
def test_faults_are_named(fault: Callable[..., torch.Tensor], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes_flash.install(monkeypatch, 2, flash_attn_varlen_func=fault)
    with pytest.raises(BackendError, match=words):
        load_flash(walking, NEEDS)


def test_a_device_that_it_was_not_built_for_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with ..")

    fakes_flash.install(monkeypatch, 2, 3, flash_attn_with_kvcache=no_kernel)
    assert load_flash(walking, NEEDS).numerics.startswith("flash_attn of"), "version 2 serves instead"
    fakes_flash.install(monkeypatch, 3, flash_attn_with_kvcache=no_kernel)
    with pytest.raises(BackendError, match=r"flash_attn_interface failed: .* no kernel image is available$"):
        load_flash(walking, NEEDS)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_without_a_package_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes_flash.install(monkeypatch)
    monkeypatch.setattr(load, "verdict", lambda *_: Verdict())
    assert not flash.installed()
    with pytest.raises(BackendError, match="needs the package flash_attn"):
        load_ops(CPU, "triton,attention=flash", NEEDS)


def test_a_package_that_is_there_but_does_not_load_is_not_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flash_attn.py").write_text("import flash_attn_2_cuda_of_another_torch")
    fakes_flash.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match="No module named 'flash_attn_2_cuda_of_another_torch'"):
        load_flash(walking, NEEDS)
    assert flash.installed()
    fakes_flash.install(monkeypatch, 2)
    del sys.modules["flash_attn"].flash_attn_varlen_func  # what version 4 alone leaves there
    with pytest.raises(BackendError, match="no attribute 'flash_attn_varlen_func'"):
        load_flash(walking, NEEDS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 32}, "multiple of 256, not 32: set --block-size 256"),
        ({"dtype": torch.float32}, "not in torch.float32: see --dtype"),
        ({"head_dims": (512,)}, "up to 256, this model's are 512"),
        ({"head_dims": (60,)}, "multiples of 8"),
    ],
)
def test_what_it_cannot_serve_is_said(changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes_flash.install(monkeypatch, 2)
    with pytest.raises(BackendError, match=words):
        load_flash(walking, replace(NEEDS, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "does not support attention sinks, which this model has"),
        (
            {"swiglu_limit": 5.0},
            "not support attention sinks: choose attention=triton",
        ),  # transformers, also with sinks
    ],
)
def test_sinks_are_refused_where_they_are_met(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes_flash.install(monkeypatch, 3)
    monkeypatch.setattr(load, "verdict", lambda *_: Verdict())
    monkeypatch.setattr(trial, "problem", lambda *_: "")
    model_type, own = NATIVE["gpt_oss"]
    path = save(make_model(model_type, own | changes), tmp_path, torch.bfloat16)
    with pytest.raises(BackendError, match=words):
        load_model(WorkerConfig(model=str(path), kernels="triton,attention=flash", dtype="bfloat16"))


# --- automatic choice ------------------------------------------------------------------------------------------------


class FakeClock:
    """Times of triton's prompt and decode step, then of flash's, in milliseconds, for one shape after another."""

    def __init__(self, *milliseconds: float) -> None:
        self.left = list(milliseconds)

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        return self.left.pop(0) / 1000


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with Triton; trials use a few tokens."""
    monkeypatch.setitem(choose.LOADERS, "triton", lambda *_: (walking, {}))
    monkeypatch.setattr(trial, "problem", lambda *_: "")
    monkeypatch.setattr(trial, "ROWS", 2)
    monkeypatch.setattr(trial, "PROMPT", 6)
    monkeypatch.setattr(trial, "OUTPUT", 20)  # a request is then a prompt and ten decode steps


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ((5.0, 1.0, 5.0, 0.8), "flash"),  # 15 ms against 13
        ((5.0, 1.0, 5.0, 0.9), "triton"),  # 15 ms against 14, which is too close
        ((5.0, 1.0, 4.0, 1.1), "triton"),  # prompts are faster, but decodes are slower
        ((5.0, 1.0, 1.0, 1.1), "flash"),
    ],
)
def test_auto_takes_what_is_clearly_faster(
    times: tuple[float, ...], winner: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fakes_flash.install(monkeypatch, 2)
    clock, needs = FakeClock(*times), replace(NEEDS, attention=(SHAPE,) * 3)
    with caplog.at_level(logging.INFO):
        ops, remarks = load_ops(torch.device("cuda:0"), "auto", needs, clock)
    expected = "triton" if winner == "triton" else "linear triton, pointwise triton, attention flash, sampling triton"
    assert (ops.name, remarks, clock.left) == (expected, [], [])
    assert ("flash_attn of unknown version" in ops.numerics) == (winner == "flash")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"attention by {winner}: flash_attn of unknown version takes")
    assert f"{3 * (times[2] + 10 * times[3]):.2f} ms" in line
    assert f"triton {3 * (times[0] + 10 * times[1]):.2f} ms" in line


@pytest.mark.usefixtures("quick")
def test_layers_weigh_what_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash is far slower in the one layer without a window, but a little faster in the ten others."""
    fakes_flash.install(monkeypatch, 2)
    windowed = replace(SHAPE, window=3)
    for others, winner in ((10, "flash"), (1, "triton")):
        clock = FakeClock(1.0, 1.0, 4.0, 4.0, 1.0, 1.0, 0.5, 0.5)
        needs = replace(NEEDS, attention=(SHAPE, *[windowed] * others))
        ops, _ = load_ops(torch.device("cuda:0"), "auto", needs, clock)
        assert ("flash" in ops.name) == (winner == "flash")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("choice", "versions", "changes", "line"),
    [
        ("auto", (), {}, None),
        ("auto", (2,), {"block_size": 32}, "--block-size 256"),
        ("auto", (2,), {"attention": ()}, None),
        ("auto,attention=triton", (2, 3), {}, None),
        ("triton", (2, 3), {}, None),
    ],
)
def test_nothing_is_measured_where_there_is_no_choice(
    choice: str,
    versions: tuple[int, ...],
    changes: dict[str, Any],
    line: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fakes_flash.install(monkeypatch, *versions)
    with caplog.at_level(logging.INFO):
        ops, remarks = load_ops(torch.device("cuda:0"), choice, replace(NEEDS, **changes), FakeClock())
    assert ops is walking
    assert not remarks
    assert [line in record.getMessage() for record in caplog.records if line] == [True] * (line is not None)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), OutOfResources(1, 0, "shared memory")])
def test_a_measurement_that_fails_leaves_triton(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(run: Callable[[], object]) -> float:
        raise error

    fakes_flash.install(monkeypatch, 2)
    with caplog.at_level(logging.INFO):
        ops, _ = load_ops(torch.device("cuda:0"), "auto", NEEDS, full)
    assert ops is walking
    assert f"attention by triton: kernels: flash failed: {type(error).__name__}: {error}" in caplog.text
