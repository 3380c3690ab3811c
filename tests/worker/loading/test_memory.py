"""How many KV blocks a worker allocates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from pagoda_worker.config import WorkerConfig
from pagoda_worker.device.available import GIB
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.loading import memory
from pagoda_worker.loading.memory import (
    DeviceUse,
    NotEnoughMemory,
    num_kv_blocks,
    num_swap_blocks,
    usable_bytes,
)
from pagoda_worker.loading.retention import KEEP_ALL, Retention

SHAPE = KVShape(num_layers=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)  # 2 KiB per token
BLOCK_BYTES = 32 * 2048
USE = DeviceUse(total=80 * GIB, in_use=16 * GIB, step=3 * GIB, graphs=GIB)

config_of = partial(WorkerConfig, block_size=32)


@dataclass
class Needs:
    kv_groups: tuple[KVShape, ...] = (SHAPE,)
    max_model_len: int = 1024
    retentions: tuple[Retention, ...] = KEEP_ALL


def test_bytes_of_a_token() -> None:
    assert SHAPE.bytes_per_token == 2 * 2 * 64 * 4 * 2
    assert SHAPE.bytes_per_block(32) == 32 * 2048


def test_a_quantised_cache_counts_its_scales() -> None:
    rounded = replace(SHAPE, quantized=True)
    assert rounded.bytes_per_token == 2 * 2 * (64 + 4) * 4
    assert num_kv_blocks(config_of(kv_cache_gib=0.5), Needs((rounded,))) == GIB // 2 // (32 * 1088)


def test_values_that_are_keys_take_nothing() -> None:
    """Latents of DeepSeek's models are stored once, except where a back end reads values separately."""
    both = KVShape(num_layers=1, num_kv_heads=1, head_dim=512 + 64, dtype=torch.bfloat16)
    once = replace(both, planes=1)
    assert (once.bytes_per_token, both.bytes_per_token) == (1152, 2304)
    assert replace(once, quantized=True).bytes_per_token == 576 + 4
    assert num_kv_blocks(config_of(kv_cache_gib=0.5), Needs((once,))) == GIB // 2 // (32 * 1152)


def test_blocks_as_configured() -> None:
    assert num_kv_blocks(config_of(num_blocks=40, kv_cache_gib=1), Needs()) == 40


def test_blocks_from_gib() -> None:
    assert num_kv_blocks(config_of(kv_cache_gib=0.5), Needs()) == GIB // 2 // (32 * 2048)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            config_of(num_blocks=31),
            r"992 tokens \(num_blocks=31, one of 1024 takes 0.002 GiB\), but max_model_len is 1024",
        ),
        (
            config_of(kv_cache_gib=0.001),
            "kv_cache_gib=0.001.*lower max_model_len, or raise kv_cache_gib or num_blocks",
        ),
    ],
)
def test_too_little_names_the_options(config: WorkerConfig, message: str) -> None:
    with pytest.raises(NotEnoughMemory, match=message):
        num_kv_blocks(config, Needs())


def test_automatic_takes_no_more_than_rows_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda root: 64 * GIB)
    assert num_kv_blocks(config_of(max_rows=4), Needs()) == 4 * 1024 // 32


def test_automatic_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda root: GIB)
    assert num_kv_blocks(config_of(max_rows=10**6), Needs()) == int(GIB * 0.6) // (32 * 2048)


@pytest.mark.parametrize(("available", "count"), [(8, 2), (23, 4), (23, 8), (64, 2)])
def test_workers_that_share_a_machine_take_its_share_together(
    monkeypatch: pytest.MonkeyPatch, available: int, count: int
) -> None:
    """All see the same memory, even the last one: memory that others have not yet written to counts as available."""
    monkeypatch.setattr(memory, "host_available_bytes", lambda root: available * GIB)
    each = num_kv_blocks(config_of(max_rows=10**6, workers_here=count), Needs()) * BLOCK_BYTES
    assert 0.25 * available * GIB < count * (each + BLOCK_BYTES)
    assert count * each <= 0.6 * available * GIB
    alone = num_swap_blocks(config_of(), [SHAPE], on_cpu=False)[0]
    assert count * num_swap_blocks(config_of(workers_here=count), [SHAPE], on_cpu=False)[0] <= max(
        alone, available * GIB // 4 // BLOCK_BYTES
    )


def test_a_later_life_takes_what_the_first_one_took_if_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the other workers' caches are full."""
    for count in (1, 2, 4, 8):
        config = config_of(max_rows=10**6, workers_here=count)
        monkeypatch.setattr(memory, "host_available_bytes", lambda root: 23 * GIB)
        first = num_kv_blocks(config, Needs())
        assert num_kv_blocks(config, Needs(), at_first=23 * GIB) == first
        left = 23 * GIB - (count - 1) * first * BLOCK_BYTES
        monkeypatch.setattr(memory, "host_available_bytes", lambda root, left=left: left)
        assert num_kv_blocks(config, Needs(), at_first=23 * GIB) == first
        monkeypatch.setattr(memory, "host_available_bytes", lambda root: GIB)
        assert num_kv_blocks(config, Needs(), at_first=23 * GIB) == int(GIB * 0.6) // BLOCK_BYTES


def test_what_adapters_may_take_is_kept_unless_the_cache_s_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda root: 5 * GIB)
    config = config_of(max_rows=10**6)
    assert num_kv_blocks(config, Needs(), adapters_bytes=3 * GIB) == int(2 * GIB * 0.6) // BLOCK_BYTES
    assert num_kv_blocks(config, Needs(), use=lambda: USE, adapters_bytes=3 * GIB) == (52 - 3) * GIB // BLOCK_BYTES
    assert num_kv_blocks(config_of(num_blocks=40), Needs(), adapters_bytes=9 * GIB) == 40
    with pytest.raises(NotEnoughMemory, match=r"9.00 GiB kept for adapters \(max_loras, max_lora_gib\)"):
        num_kv_blocks(config, Needs(), adapters_bytes=9 * GIB)


@pytest.mark.parametrize(("available", "usable"), [(2, 1.2), (8, 4), (16, 4), (64, 16)])
def test_share_of_a_cpu_machine(available: float, usable: float) -> None:
    assert usable_bytes(int(available * GIB)) == int(usable * GIB)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def test_a_gpu_s_cache_takes_what_the_rest_leaves() -> None:
    config = config_of(max_rows=10**6)
    assert num_kv_blocks(config, Needs(), use=lambda: USE) == (72 - 16 - 3 - 1) * GIB // BLOCK_BYTES
    assert num_kv_blocks(config, Needs(), use=lambda: USE, spare=1) == 52 * GIB // BLOCK_BYTES - 1


def test_a_draft_model_on_a_gpu_pays_for_its_blocks() -> None:
    config = config_of(max_rows=10**6)
    half = Needs((replace(SHAPE, num_layers=2),))
    assert num_kv_blocks(config, Needs(), half, use=lambda: USE, spare=1) == 52 * GIB // (BLOCK_BYTES * 3 // 2) - 1


def test_a_gpu_s_share_is_an_option() -> None:
    config = config_of(max_rows=10**6, gpu_memory_utilization=0.5)
    assert num_kv_blocks(config, Needs(), use=lambda: USE) == 20 * GIB // BLOCK_BYTES


def test_a_gpu_s_cache_is_no_larger_than_rows_can_use() -> None:
    assert num_kv_blocks(config_of(max_rows=4), Needs(), use=lambda: USE) == 4 * 1024 // 32


@pytest.mark.parametrize(
    ("config", "blocks"),
    [(config_of(num_blocks=50), 50), (config_of(kv_cache_gib=0.5), GIB // 2 // BLOCK_BYTES)],
)
def test_what_was_configured_holds_on_a_gpu(config: WorkerConfig, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory its host has."""
    monkeypatch.setattr(memory, "host_available_bytes", lambda _: 0)
    assert num_kv_blocks(config, Needs(), use=lambda: USE) == blocks


def test_more_than_a_cpu_has_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda _: 2 * GIB)
    assert num_kv_blocks(config_of(kv_cache_gib=2), Needs()) == 2 * GIB // BLOCK_BYTES
    with pytest.raises(NotEnoughMemory, match=r"kv_cache_gib=2.5 is more than the 2.0 GiB of memory"):
        num_kv_blocks(config_of(kv_cache_gib=2.5), Needs())
    most = 2 * GIB // BLOCK_BYTES
    assert num_kv_blocks(config_of(num_blocks=most), Needs()) == most
    with pytest.raises(NotEnoughMemory, match=rf"num_blocks={2 * most} \(4.0 GiB\) is more than the 2.0 GiB of memory"):
        num_kv_blocks(config_of(num_blocks=2 * most), Needs())


def test_workers_of_one_machine_must_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda _: 6 * GIB)
    assert num_kv_blocks(config_of(kv_cache_gib=2, workers_here=3), Needs()) == 2 * GIB // BLOCK_BYTES
    with pytest.raises(NotEnoughMemory, match=r"kv_cache_gib=2 for each of 4 workers is more than the 6.0 GiB"):
        num_kv_blocks(config_of(kv_cache_gib=2, workers_here=4), Needs())
    with pytest.raises(NotEnoughMemory, match=r"num_blocks=\d+ \(2.0 GiB\) for each of 4 workers"):
        num_kv_blocks(config_of(num_blocks=2 * GIB // BLOCK_BYTES, workers_here=4), Needs())


def test_a_later_life_is_not_refused_for_what_other_workers_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda _: GIB)
    config = config_of(kv_cache_gib=2, workers_here=3)
    assert num_kv_blocks(config, Needs(), at_first=6 * GIB) == 2 * GIB // BLOCK_BYTES


def test_a_model_length_that_no_request_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len must be 0 or between 2 and 2147483647, got 1"):
        WorkerConfig(max_model_len=1)


def test_a_gpu_with_too_little_left_says_where_the_rest_went() -> None:
    full = USE._replace(in_use=70 * GIB)
    message = r"0.00 GiB, which is 0.9 of the GPU's 80.00 GiB less 70.00 in use, 3.00 for a step, 1.00 for graphs"
    with pytest.raises(NotEnoughMemory, match=message + ".*raise gpu_memory_utilization, kv_cache_gib or num_blocks"):
        num_kv_blocks(config_of(), Needs(), use=lambda: full)


# --- swap space -------------------------------------------------------------------------------------------------------


def test_a_cpu_swaps_to_nowhere_unless_told_to() -> None:
    assert num_swap_blocks(config_of(), [SHAPE], on_cpu=True) == [0]
    assert num_swap_blocks(config_of(swap_space_gib=0.5), [SHAPE], on_cpu=True) == [GIB // 2 // BLOCK_BYTES]


@pytest.mark.parametrize(("available", "swapped"), [(64, 4), (16, 4), (8, 2)])
def test_a_gpu_swaps_to_4_gib_or_a_quarter_of_the_host(
    monkeypatch: pytest.MonkeyPatch, available: int, swapped: int
) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda root: available * GIB)
    assert num_swap_blocks(config_of(), [SHAPE], on_cpu=False) == [swapped * GIB // BLOCK_BYTES]
    assert num_swap_blocks(config_of(swap_space_gib=0), [SHAPE], on_cpu=False) == [0]
    assert num_swap_blocks(config_of(swap_space_gib=9), [SHAPE], on_cpu=False) == [9 * GIB // BLOCK_BYTES]


def test_a_draft_model_s_blocks_are_swapped_beside_the_model_s() -> None:
    config = config_of(swap_space_gib=1)
    assert num_swap_blocks(config, [SHAPE, replace(SHAPE, num_layers=8)], on_cpu=True) == [GIB // (3 * BLOCK_BYTES)]


@pytest.mark.parametrize("gib", [-0.5, -2.0])
def test_swap_space_is_not_negative(gib: float) -> None:
    with pytest.raises(ValueError, match=r"swap_space_gib must be -1 or between 0 and 1000000"):
        config_of(swap_space_gib=gib)
