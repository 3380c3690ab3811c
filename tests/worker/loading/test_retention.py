"""Which tokens layers keep, and how many blocks each table has."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagoda_proto.steps import MAX_KV_GROUPS, MAX_STEPS_IN_FLIGHT, KVGroup
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.loading.memory import NotEnoughMemory, num_kv_blocks, num_swap_blocks
from pagoda_worker.loading.retention import KEEP_ALL, bytes_of_row, context_cost, settled

LONG = 32768


def shape(window: int | None, num_layers: int = 1) -> KVShape:
    return KVShape(num_layers=num_layers, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16, window=window)


@dataclass(frozen=True)
class Model:
    kv_groups: tuple[KVShape, ...]
    max_model_len: int = LONG
    retentions: tuple[Any, ...] = KEEP_ALL
    ops: Any = field(default_factory=lambda: SimpleNamespace(lookback=31))


def config_of(**options: Any) -> WorkerConfig:
    return WorkerConfig(**{"block_size": 32} | options)


def settle(*models: Model, **options: Any) -> list[Any]:
    return settled(config_of(**options), *models)  # type: ignore[arg-type]


GEMMA = Model((shape(1024, 52), shape(None, 10)))


@pytest.mark.parametrize("window", [None, LONG, LONG - 1024])
def test_a_model_whose_windows_save_nothing_has_one_table(window: int | None) -> None:
    model = Model((shape(None), shape(window)))
    assert settle(model) == [model]


def test_layers_go_by_the_table_of_what_they_keep() -> None:
    (model,) = settle(Model((shape(128), shape(None), shape(1024), replace(shape(128), head_dim=32))))
    assert [one.kept for one in model.retentions] == [0, 1024 + 31, 128 + 31]
    assert [group.table for group in model.kv_groups] == [2, 0, 1, 2]
    (only,) = settle(Model((shape(4096),)))
    assert ([one.kept for one in only.retentions], only.kv_groups[0].table) == ([4096 + 31], 0)


def test_chunks_keep_what_windows_do_and_are_whole_blocks() -> None:
    model = Model((replace(shape(1024), chunked=True), shape(1024), shape(None)))
    (kept,) = settle(model)
    assert [group.table for group in kept.kv_groups] == [1, 1, 0]
    with pytest.raises(ValueError, match="block_size=48: the model attends within chunks of 1024 tokens"):
        settle(model, block_size=48)


def test_all_is_kept_if_asked_for() -> None:
    assert settle(GEMMA, kv_retention="all") == [GEMMA]


def test_models_that_serve_together_have_the_same_tables() -> None:
    target, draft = settle(GEMMA, Model((shape(512), shape(None)), max_model_len=2 * LONG))
    assert target.retentions == draft.retentions
    assert [one.kept for one in target.retentions] == [0, 1055, 543]
    assert [group.table for group in (*target.kv_groups, *draft.kv_groups)] == [1, 0, 2, 0]


def test_more_windows_than_there_may_be_groups_share_the_next_wider_one() -> None:
    windows = [None, *range(100, 1300, 100)]
    (model,) = settle(Model(tuple(map(shape, windows))))
    assert len(model.retentions) == MAX_KV_GROUPS
    for group, window in zip(model.kv_groups, windows, strict=True):
        kept = model.retentions[group.table].kept
        assert kept == 0 if window is None else kept >= window + 31


@given(first=st.integers(LONG // 32, 10**6), max_rows=st.integers(1, 512), window=st.sampled_from([128, 1024, 4096]))
def test_a_row_of_the_longest_length_fits_and_no_group_has_more_than_rows_use(
    first: int, max_rows: int, window: int
) -> None:
    (model,) = settle(Model((shape(window), shape(None))), max_rows=max_rows)
    blocks = model.retentions[1].num_blocks(first)
    row = -(-(window + 31) // 32) + 2
    assert row + 2 * 512 // 32 <= blocks <= min(first, max_rows * row + 2 * 512 // 32)


@pytest.mark.parametrize("windows", [(1024, None), (1024,)])
@pytest.mark.parametrize("max_tokens_per_step", [1, 31, 2048])
def test_what_is_offered_holds_the_steps_that_an_engine_core_may_have_in_flight(
    windows: tuple[int | None, ...], max_tokens_per_step: int
) -> None:
    """Otherwise an engine core would refuse a worker whose steps are small."""
    (model,) = settle(Model(tuple(map(shape, windows))), max_rows=1, max_tokens_per_step=max_tokens_per_step)
    table = model.kv_groups[0].table
    one = model.retentions[table]
    num_blocks = one.num_blocks(LONG // 32) if table else one.row_blocks
    assert KVGroup(num_blocks, one.kept).room_in_flight(32, LONG) >= MAX_STEPS_IN_FLIGHT


def test_rows_twelve_windows_long_exhaust_all_at_about_the_same_time() -> None:
    (model,) = settle(GEMMA, max_rows=10**4)
    whole, kept = -(-12 * 1055 // 32), 33 + 2
    for rows in (100, 1000):
        assert abs(model.retentions[1].num_blocks(rows * whole) - rows * kept) <= kept + 2 * 512 // 32


@pytest.mark.parametrize(("window", "full", "layers"), [(512, 4, 26), (1024, 5, 34), (1024, 10, 62)])
@pytest.mark.parametrize("contexts", [1, 2, 8, 32])
def test_caches_for_long_contexts_of_gemma_3_take_a_quarter(window: int, full: int, layers: int, contexts: int) -> None:
    """Of what they would take if every layer kept all tokens."""
    (model,) = settle(Model((shape(window), shape(None)), max_model_len=32768), max_rows=256)
    whole = contexts * 32768 // 32
    assert full * whole + (layers - full) * model.retentions[1].num_blocks(whole) <= 0.25 * layers * whole


def test_all_tables_together_take_the_memory_there_is() -> None:
    (model,) = settle(GEMMA)
    config = config_of(kv_cache_gib=4)

    def taken(blocks: int) -> int:
        return sum(
            group.bytes_per_block(32) * model.retentions[group.table].num_blocks(blocks) for group in model.kv_groups
        )

    blocks = num_kv_blocks(config, model)
    assert taken(blocks) <= 4 * 2**30 < taken(blocks + 1)
    assert blocks > 2 * num_kv_blocks(config, GEMMA)
    swapped = num_swap_blocks(config_of(swap_space_gib=1), model.kv_groups, True, model.retentions)
    assert taken(swapped[0]) <= 2**30 < taken(swapped[0] + 1)
    assert swapped[1] == model.retentions[1].num_blocks(swapped[0])
    assert num_kv_blocks(config_of(num_blocks=2000), model) == 2000


def test_a_model_of_windows_needs_room_for_one_and_its_steps() -> None:
    (model,) = settle(Model((shape(1024),)))
    assert num_kv_blocks(config_of(num_blocks=33 + 2 + 32), model) == 67
    with pytest.raises(NotEnoughMemory, match="a request needs 2144"):
        num_kv_blocks(config_of(num_blocks=66), model)


def test_what_a_context_takes() -> None:
    (model,) = settle(GEMMA)
    one = 2 * 2 * 16 * 2  # bytes per token and layer
    assert bytes_of_row(model.kv_groups, model.retentions, LONG, 32) == one * (10 * LONG + 52 * 35 * 32)
    assert bytes_of_row(model.kv_groups, model.retentions, 64, 32) == one * 62 * 64
    said, share = "a context of 32768 tokens takes", "19% of what it would take if every layer kept all tokens"
    least = f"{one * (10 * LONG + 52 * (35 + 32) * 32) / 2**20:.1f} MiB"
    cache = f"a cache for one, with chunks of its prompt, takes {least}"
    assert context_cost(model, 32) == f"{said} 47.1 MiB, {share}; {cache}"
    assert context_cost(GEMMA, 32) == f"{said} 248.0 MiB"  # type: ignore[arg-type]
