"""Hidden states of every family of encoders match transformers', whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.encoders.checkpoints import CONFIGS, save, texts
from tests.worker.kernels.levels import levels

from pagoda_worker.checkpoints.checkpoint import open_checkpoint, read_json
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.checkpoints.rope import RopeShape, inverse_frequencies
from pagoda_worker.encoders.encoder import Encoder
from pagoda_worker.encoders.families import encoder_spec
from pagoda_worker.encoders.source import open_encoder_source
from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.ops import Needs, Ops
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.models.recorded import RecordedReader
from pagoda_worker.rows.batch import Batch

CPU = torch.device("cpu")
BLOCK = 16
EXACT = 2e-4  # for states of magnitude about 1, in float32


def batch_of(rows: list[list[int]]) -> Batch:
    tables, starts, blocks = [], [0], 0
    for row in rows:
        count = -(-len(row) // BLOCK)
        tables.append(list(range(blocks, blocks + count)))
        blocks += count
        starts.append(starts[-1] + len(row))
    width = max(map(len, tables))
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    places = [
        table[i // BLOCK] * BLOCK + i % BLOCK for row, table in zip(rows, tables, strict=True) for i in range(len(row))
    ]
    return Batch(
        token_ids=torch.cat([torch.tensor(row) for row in rows]),
        positions=positions,
        kv_indices=torch.tensor(places),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        query_starts=starts,
        query_lens=[len(row) for row in rows],
        context_lens=[len(row) for row in rows],
        logit_indices=positions[:0],
    )


def encoder(path: Path, ops: Ops, dtype: torch.dtype = torch.float32, *, pairs: bool = False) -> Encoder:
    fields = read_json(path / "config.json")
    spec = encoder_spec(fields["architectures"][0], fields)
    with open_checkpoint(path) as checkpoint:
        source = open_encoder_source(checkpoint, spec, "", dtype, ops)
        return Encoder(spec, ops, source, dtype, spec.max_positions, pairs=pairs)


def states(model: Any, rows: list[list[int]], ops: Ops, scratch: Any) -> list[torch.Tensor]:
    """The hidden states of each row, computed together in one step."""
    with torch.inference_mode():
        kv = (ops.new_kv_cache(scratch, sum(-(-len(row) // BLOCK) for row in rows), BLOCK),)
        found = model.forward(batch_of(rows), kv).clone()
    return list(torch.split(found, [len(row) for row in rows]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[torch.Tensor]]]:
    """Family -> its directory, and transformers' hidden states for `texts`."""
    found = {}
    for family in CONFIGS:
        path = tmp_path_factory.mktemp(family)
        model = save(path, family)
        with torch.inference_mode():
            expected = [model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in texts()]
        found[family] = path, expected
    return found


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("make", [ReferenceOps, AtenOps])
def test_states_are_those_of_transformers(family: str, make: type, saved: Any) -> None:
    path, expected = saved[family]
    ops = make(CPU)
    model = encoder(path, ops)
    for found, wanted in zip(states(model, texts(), ops, model.scratch), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_torch_a_texts_states_are_its_own_bit_by_bit(family: str, dtype: torch.dtype, saved: Any) -> None:
    ops = AtenOps(CPU, dtype)
    model = encoder(saved[family][0], ops, dtype)
    check_own(model, ops, model.scratch)


@pytest.mark.parametrize("family", CONFIGS)
def test_native_kernels_come_close_and_keep_every_bit(family: str, saved: Any) -> None:
    path, expected = saved[family]
    if not levels():
        pytest.skip("no C++ compiler here; the torch back end serves")
    needs = Needs(dtype=torch.bfloat16, hidden_size=64, head_dims=(16,), num_threads=2)
    ops = load_ops(CPU, "native", needs)[0]
    model = encoder(path, ops, torch.bfloat16)
    recorded = RecordedReader(model, 1024)
    plain = states(model, texts(), ops, model.scratch)
    for found, wanted in zip(plain, expected, strict=True):
        assert torch.nn.functional.cosine_similarity(found.float(), wanted, dim=-1).min() > 0.999
    for one, other in zip(states(recorded, texts(), ops, model.scratch), plain, strict=True):
        assert torch.equal(one, other)
    check_own(recorded, ops, model.scratch)


def check_own(model: Any, ops: Ops, scratch: Any) -> None:
    """Alone, among others and in another order: the same bits."""
    rows = texts()
    together = states(model, rows, ops, scratch)
    for row, found in zip(rows, together, strict=True):
        assert torch.equal(states(model, [row], ops, scratch)[0], found)
    for row, found in zip(rows[::-1], together[::-1], strict=True):
        assert torch.equal(states(model, [rows[4], row, rows[1]], ops, scratch)[1], found)


@pytest.mark.parametrize("field", ["is_decoder", "is_causal"])
def test_an_encoder_that_does_not_see_both_ways_is_refused(field: str, tmp_path: Path) -> None:
    save(tmp_path, "bert")
    with pytest.raises(UnsupportedConfig, match=f"{field}=True"):
        encoder_spec("BertModel", read_json(tmp_path / "config.json") | {field: True})


def gte(**scaling: Any) -> RopeShape | None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96}
    scaled = {"rope_theta": 20000.0, "rope_scaling": {"type": "ntk", **scaling}}
    return encoder_spec("NewModel", {"model_type": "new", "vocab_size": 120, **sizes, **scaled}).layers[0].rope


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 8.0])
def test_a_gte_s_own_scaling_follows_its_formula(factor: float) -> None:
    """Fixed NTK scaling, as its authors' code has it; no effect below 1."""
    rope, factor = gte(factor=factor), max(1.0, factor)
    assert rope is not None
    expected = (20000 * factor) ** (-torch.arange(0, 16, 2).double() / 16) / factor ** (2 / 16)
    torch.testing.assert_close(inverse_frequencies(rope).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("scaling", "said"), [({}, "needs factor"), ({"factor": 2.0, "mixed_b": 0.6}, "mixed_b")])
def test_a_gte_s_scaling_that_is_not_known_is_refused(scaling: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedConfig, match=said):
        gte(**scaling)
