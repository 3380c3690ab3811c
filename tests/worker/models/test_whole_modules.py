"""Adapters that replace norms, embedding and head, or adapt these ends: as merged weights, other rows unaffected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.worker.adapters.files import (
    RANKS,
    Tensors,
    adapter_of,
    embedding_factors,
    factors,
    merged,
    scale_of,
    spelt,
    untied,
    whole_of,
    write,
)
from tests.worker.models.checkpoints import prompts
from tests.worker.models.conftest import Saved
from tests.worker.models.harness import Harness, Row, logits_of
from tests.worker.models.test_adapters import EXACT, KERNELS, cached, load, needs_native

from pagoda_worker.checkpoints.spec import matrices_of_all
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.cpu.low_rank import Slots
from pagoda_worker.loading.model import LoadedModel, load_model
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.models.recorded import Recorded
from pagoda_worker.rows.slots import NO_ADAPTER, slots_of

FAMILIES = ["llama3", "qwen3", "gemma2", "cohere", "granite", "olmo2", "gpt_neox"]
EVERYTHING, PLAIN, LINES, OWN = range(4)  # slots of `Family`


def everything(path: Path, out: Path) -> tuple[Path, Tensors]:
    """All that an adapter can do to a model at once: it replaces both embedding and head, and adds to them."""
    spec = spelt(path)
    head, embed, shape = spec.names.head, spec.names.top(spec.names.embed), (spec.vocab_size, spec.hidden_size)
    ends = factors({head: shape}, seed=3) | embedding_factors(embed, shape, 8)
    whole = {name.replace(f"{embed}.", f"{embed}.base_layer."): one for name, one in whole_of(path, "").items()}
    tensors = adapter_of(path, out)[1] | ends | whole
    targets = sorted({name.rpartition(".")[2] for name in (*matrices_of_all(spec), embed, head)})
    return write(out, tensors, target_modules=targets, rank_pattern=RANKS, modules_to_save=["norm"]), tensors


@pytest.mark.parametrize("name", FAMILIES)
def test_what_comes_whole_and_what_is_added_compute_what_merged_weights_compute(
    name: str, saved: Saved, tmp_path: Path
) -> None:
    _, path = saved(name)
    adapter, tensors = everything(path, tmp_path / "adapter")
    beside = load(path, [adapter], dtype="float32", kernels="torch")
    whole = merged(path, tensors, tmp_path / "merged", scale_of)
    alone = load_model(WorkerConfig(model=str(whole), dtype="float32", kernels="torch"))
    tokens = prompts()[-1]
    expected = logits_of(alone, tokens, [10**6])
    assert (logits_of(beside, tokens, [10**6], slot=0) - expected).abs().max() < EXACT
    assert (logits_of(beside, tokens, [10**6]) - expected).abs().max() > 100 * EXACT, "it changes nothing"


class Family:
    """A checkpoint, an adapter for each of the slots above, and the checkpoint with the last one merged in."""

    def __init__(self, path: Path, out: Path) -> None:
        spec = spelt(path)
        embed, shape = spec.names.top(spec.names.embed), (spec.vocab_size, spec.hidden_size)
        lines = embedding_factors(embed, shape, 3) | {
            f"base_model.model.{embed}.base_layer.weight": untied(path)[f"{embed}.weight"]
        }
        own = whole_of(path, "")
        self.path = path
        self.adapters = [
            everything(path, out / "everything")[0],
            adapter_of(path, out / "plain", seed=2)[0],
            write(out / "lines", lines, target_modules=[embed], r=3),
            write(out / "own", own, target_modules=["of_no_model"]),
        ]
        self.merged = merged(path, own, out / "merged", scale_of)


@pytest.fixture(scope="module", params=["qwen3", "gemma2"])
def family(request: pytest.FixtureRequest, saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(saved(request.param)[1], tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=KERNELS)
def beside(request: pytest.FixtureRequest, family: Family) -> LoadedModel:
    return cached(family.path, tuple(family.adapters), request.param)


def test_tensors_in_place_of_the_models_have_the_bits_of_a_model_of_them(family: Family, beside: LoadedModel) -> None:
    alone = load_model(WorkerConfig(model=str(family.merged), dtype="bfloat16", kernels=beside.ops.name))
    tokens = prompts()[-1]
    assert torch.equal(logits_of(beside, tokens, [10**6], OWN), logits_of(alone, tokens, [10**6]))


def test_rows_of_all_kinds_do_not_notice_each_other(family: Family, beside: LoadedModel) -> None:
    """Bit for bit, alone or together, in any chunks; rows without an adapter as on a model without adapters."""
    slots = [NO_ADAPTER, EVERYTHING, PLAIN, LINES, NO_ADAPTER, EVERYTHING, OWN, PLAIN]
    harness, rows = Harness(beside), [Row(tokens, slot=slot) for tokens, slot in zip(prompts(), slots, strict=True)]
    harness.prefill(rows, 16)
    plain = load_model(WorkerConfig(model=str(family.path), kernels=beside.ops.name, dtype="bfloat16"))
    for row in rows:
        together = torch.stack(row.logits)
        assert torch.equal(together, logits_of(beside, row.tokens, [7, 1, 1, 30, 200], row.slot))
        if row.slot == NO_ADAPTER:
            assert torch.equal(together, logits_of(plain, row.tokens, [10**6]))


def decoder_of(loaded: LoadedModel) -> Decoder:
    model = loaded.model._decoder if isinstance(loaded.model, Recorded) else loaded.model
    assert isinstance(model, Decoder)
    return model


def test_only_steps_that_replace_something_leave_the_recorded_way(beside: LoadedModel) -> None:
    decoder = decoder_of(beside)
    replacing = [decoder.replaced(slots_of(slot, 2, beside.device)) is not None for slot in range(4)]
    assert replacing == [True, False, True, True]
    assert decoder._embed.instead.keys() == {EVERYTHING, LINES, OWN}, "the table that came along is the model's own"


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_an_output_matrix_that_came_along_and_is_the_models_own_is_not_kept(
    name: str, saved: Saved, tmp_path: Path
) -> None:
    _, path = saved(name)
    head, own = spelt(path).names.head, untied(path)
    tensors = factors({head: tuple(own[f"{head}.weight"].shape)})  # type: ignore[dict-item]
    copied = tensors | {f"base_model.model.{head}.base_layer.weight": own[f"{head}.weight"]}
    adapters = [write(tmp_path / str(len(one)), one, target_modules=[head]) for one in (tensors, copied)]
    loaded = load(path, adapters, dtype="bfloat16", kernels="torch")
    assert decoder_of(loaded).replaced(slots_of(1, 2, loaded.device)) is None
    tokens = prompts()[1]
    one, other, plain = (logits_of(loaded, tokens, [10**6], slot) for slot in (0, 1, NO_ADAPTER))
    assert torch.equal(one, other)
    assert not torch.equal(one, plain)


def test_a_slot_that_is_given_away_replaces_nothing_any_more(family: Family) -> None:
    loaded = load(family.path, family.adapters[:2], kernels="torch", dtype="bfloat16", max_loras=1)
    tokens, plain = prompts()[-2], cached(family.path, tuple(family.adapters), "torch")
    assert torch.equal(logits_of(loaded, tokens, [10**6], 0), logits_of(plain, tokens, [10**6], PLAIN))


@needs_native
def test_what_adapters_take_is_what_was_counted(family: Family) -> None:
    loaded = cached(family.path, tuple(family.adapters), "native")
    decoder = decoder_of(loaded)
    tables = [linear.slots for linear, _ in {id(one[0]): one for one in decoder.adapted.values()}.values()]
    assert all(isinstance(table, Slots) for table in tables)
    added = sum(tensor.nbytes for table in tables for tensor in table.kept[PLAIN])
    spec = decoder.spec
    ranks = {name: RANKS.get(name.rpartition(".")[2], 8) for name in matrices_of_all(spec)}
    counted = decoder.adapter_bytes(ranks, ())
    assert 0.5 * added < counted < 2 * added
    room = loaded.adapters.room
    assert room.most == 4
    assert room.each_bytes > counted
    assert 0 < room.left_bytes == 4 * room.each_bytes - room.taken_bytes


def test_memory_is_kept_for_what_may_come(family: Family, tmp_path: Path) -> None:
    options = {"model": str(family.path), "dtype": "bfloat16", "kernels": "torch", "lora_dir": str(tmp_path)}
    room = load_model(WorkerConfig(**options, max_loras=3, max_lora_rank=20)).adapters.room
    higher = load_model(WorkerConfig(**options, max_loras=3, max_lora_rank=40)).adapters.room
    fixed = load_model(WorkerConfig(**options, max_loras=3, max_lora_gib=0.25)).adapters.room
    assert (room.most, room.taken_bytes) == (3, 0)
    assert room.each_bytes < higher.each_bytes < 2.5 * room.each_bytes
    assert fixed.left_bytes == 3 * 2**28
    write(tmp_path / "plain", adapter_of(family.path, tmp_path / "plain")[1], rank_pattern=RANKS)
    for tiny in (1e-5, 1e-12):
        with pytest.raises(ValueError, match="max_lora_gib"):
            load(family.path, family.adapters, dtype="bfloat16", kernels="torch", max_lora_gib=tiny)
