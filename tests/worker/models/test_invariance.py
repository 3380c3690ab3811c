"""The bits of a row's logits depend on the row alone: not on the batch, chunking, or where its KV came from."""

from __future__ import annotations

import pytest
import torch
from tests.worker.models.checkpoints import NATIVE, VOCAB
from tests.worker.models.conftest import Loaded
from tests.worker.models.harness import BLOCK_SIZE, Harness, Row, logits_of

NAMES = [
    "llama", "gemma2", "gemma3", "cohere2", "qwen2_moe", "granite4", "granite4_moe", "gpt_oss", "deepseek_v3", "llama4",
]  # fmt: skip
DTYPES = ["bfloat16", "float32"]
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 150]


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(got, expected), (
        f"differs at tokens {(got != expected).any(-1).nonzero().flatten().tolist()[:10]}"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_decode_give_the_bits_of_one_prefill(name: str, dtype: str, loaded: Loaded) -> None:
    model, ids = loaded(name, dtype), tokens(150)
    whole = logits_of(model, ids, [len(ids)])
    for chunks in ([16], [64], [7, 50, 1, 1, 3, 60], [125, 1]):
        assert_same_bits(logits_of(model, ids, chunks), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_not_changed_by_fifteen_others(name: str, dtype: str, loaded: Loaded) -> None:
    model = loaded(name, dtype)
    alone = [logits_of(model, tokens(length, seed), [length]) for seed, length in enumerate(LENGTHS)]
    harness = Harness(model)
    rows = [Row(tokens(length, seed)) for seed, length in enumerate(LENGTHS)]
    harness.prefill(rows, 33)  # decodes of short rows run beside chunks of long ones
    for row, expected in zip(rows, alone, strict=True):
        assert_same_bits(torch.stack(row.logits), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4"])
def test_long_contexts(name: str, dtype: str, loaded: Loaded) -> None:
    """Contexts beyond one attention tile and one query slice; windows that begin in a later tile."""
    model, ids = loaded(name, dtype), tokens(700)
    whole = logits_of(model, ids, [len(ids)])
    assert_same_bits(logits_of(model, ids, [500, 1, 1, 7, 1, 1, 1, 1, 1, 64, 121, 1]), whole)
    assert_same_bits(logits_of(model, ids, [90]), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hit", [1, 2, 5])
def test_a_prefix_hit_changes_no_bits(dtype: str, hit: int, loaded: Loaded) -> None:
    model, ids = loaded("qwen3", dtype), tokens(100)
    harness, first = Harness(model), Row(ids)
    harness.prefill([first], 40)
    second = Row(ids, blocks=first.blocks[:hit], computed=hit * BLOCK_SIZE)
    harness.prefill([second, Row(tokens(30, 9))], 1000)
    assert_same_bits(torch.stack(second.logits), torch.stack(first.logits)[hit * BLOCK_SIZE :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_recompute_after_preemption_changes_no_bits(name: str, dtype: str, loaded: Loaded) -> None:
    model, ids = loaded(name, dtype), tokens(90)
    harness, row = Harness(model), Row(ids[:70])
    harness.prefill([row], 1000)
    for token in ids[70:]:
        row.tokens.append(token)
        harness.step([(row, 1)])
    before = torch.stack(row.logits)
    harness.release(row)
    again = Row(ids)
    harness.prefill([Row(tokens(50, 4)), again], 48)
    assert_same_bits(torch.stack(again.logits), before)


def test_copied_blocks_hold_the_same_row(loaded: Loaded) -> None:
    model, ids = loaded("llama", "bfloat16"), tokens(60)
    harness, row = Harness(model), Row(ids[:40])
    harness.prefill([row], 1000)
    copies = [harness.free.pop() for _ in row.blocks]
    with torch.inference_mode():
        model.ops.copy_blocks(harness.kv[0], list(zip(row.blocks, copies, strict=True)))
    fork = Row(ids, blocks=copies, computed=40)
    row.tokens = ids
    harness.prefill([row], 1000)
    harness.prefill([fork], 7)
    assert_same_bits(torch.stack(fork.logits), torch.stack(row.logits)[40:])


def test_blocks_of_a_row_that_computed_nan_are_clean_for_the_next(loaded: Loaded) -> None:
    model, ids = loaded("llama", "float32"), tokens(20)
    expected = logits_of(model, ids, [len(ids)])
    harness, bad = Harness(model, num_blocks=2), Row(tokens(17, 1))
    harness.prefill([bad], 1000)
    (kv,) = harness.kv
    for layer in kv.layers:
        layer[bad.blocks] = torch.nan
    bad.tokens += tokens(15, 2)
    harness.step([(bad, 15)])  # writes NaN into the second block, in layers after the first
    assert bad.logits[-1].isnan().all()
    assert kv.quarantined == {bad.blocks[1]}
    for layer in kv.layers:  # undo what the test itself broke
        layer[bad.blocks[0]] = 0.0
    harness.free = [bad.blocks[0], bad.blocks[1]]
    row = Row(ids)
    harness.prefill([row], 1000)
    assert row.blocks == [bad.blocks[1], bad.blocks[0]]
    assert_same_bits(torch.stack(row.logits), expected)
    assert not kv.quarantined


def test_every_native_family_is_listed() -> None:
    assert set(NAMES) <= set(NATIVE)
