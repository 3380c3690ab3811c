"""ALiBi in an encoder with a gated MLP, as in JinaBERT: hidden states follow the formulas, written out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.worker.encoders.test_oracle import BLOCK, CPU, EXACT, batch_of, check_own, encoder, states
from tests.worker.kernels.levels import levels

from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.encoders.encoder import alibi_slopes
from pagoda_worker.encoders.families import encoder_spec
from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.ops import Needs, Ops
from pagoda_worker.kernels.reference import ReferenceOps

VOCAB, HIDDEN, WIDTH, HEADS, LAYERS, LONGEST = 120, 96, 80, 6, 2, 300
SLOPES = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]  # the slopes of four heads, and two of those of eight
CONFIG: dict[str, Any] = {
    "architectures": ["JinaBertForMaskedLM"], "model_type": "bert", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": WIDTH, "hidden_act": "gelu",
    "max_position_embeddings": LONGEST, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
    "position_embedding_type": "alibi", "feed_forward_type": "geglu", "emb_pooler": "mean",
    "attn_implementation": "torch",
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def weights() -> Tensors:
    torch.manual_seed(5)
    tensors = {
        "embeddings.word_embeddings.weight": torch.randn(VOCAB, HIDDEN),
        "embeddings.token_type_embeddings.weight": torch.randn(2, HIDDEN) * 0.2,
    }
    shapes = {f"attention.self.{name}": (HIDDEN, HIDDEN) for name in ("query", "key", "value")}
    shapes |= {"attention.output.dense": (HIDDEN, HIDDEN), "mlp.gated_layers": (2 * WIDTH, HIDDEN)}
    shapes |= {"mlp.wo": (HIDDEN, WIDTH)}
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        for name, shape in shapes.items():
            tensors[f"{at}{name}.weight"] = torch.randn(shape) * shape[1] ** -0.5
            if name != "mlp.gated_layers":
                tensors[f"{at}{name}.bias"] = torch.randn(shape[0]) * 0.1
        norms += [f"{at}attention.output.LayerNorm", f"{at}mlp.layernorm"]
    for norm in norms:
        tensors |= {f"{norm}.weight": 1 + torch.randn(HIDDEN) * 0.1, f"{norm}.bias": torch.randn(HIDDEN) * 0.1}
    return tensors


def by_hand(tensors: Tensors, ids: list[int], second: int | None = None) -> torch.Tensor:
    """`second`: where the second text of a pair starts."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (HIDDEN,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    count = len(ids)
    kinds = tensors["embeddings.token_type_embeddings.weight"]
    typed = kinds[(torch.arange(count) >= (count if second is None else second)).long()]
    x = norm("embeddings.LayerNorm", tensors["embeddings.word_embeddings.weight"][ids] + typed)
    apart = (torch.arange(count)[:, None] - torch.arange(count)).abs()
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        query, key, value = (
            linear(f"{at}attention.self.{name}", x).view(count, HEADS, -1).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        scores = query @ key.transpose(1, 2) / (HIDDEN / HEADS) ** 0.5
        scores = scores - torch.tensor(SLOPES)[:, None, None] * apart
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, HIDDEN)
        x = norm(f"{at}attention.output.LayerNorm", linear(f"{at}attention.output.dense", mixed) + x)
        gate, up = linear(f"{at}mlp.gated_layers", x).chunk(2, -1)
        x = norm(f"{at}mlp.layernorm", linear(f"{at}mlp.wo", F.gelu(gate) * up) + x)
    return x


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    path, tensors = tmp_path_factory.mktemp("jina"), weights()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path, tensors


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (size,), generator=generator).tolist() for size in (1, 7, 33, 64, 290)]


@pytest.mark.parametrize("make", [ReferenceOps, AtenOps])
def test_states_are_those_of_the_formulas(make: type, saved: tuple[Path, Tensors]) -> None:
    path, tensors = saved
    ops = make(CPU)
    model = encoder(path, ops)
    for found, ids in zip(states(model, rows(), ops, model.scratch), rows(), strict=True):
        torch.testing.assert_close(found, by_hand(tensors, ids), rtol=EXACT, atol=EXACT)


def paired(path: Path, ops: Ops, dtype: torch.dtype, ids: list[int], second: int) -> torch.Tensor:
    """The states of a pair whose second text starts at `second`."""
    model, batch = encoder(path, ops, dtype, pairs=True), batch_of([ids])
    assert model.second_place == LONGEST
    batch.positions[second:] += model.second_place
    with torch.inference_mode():
        return model.forward(batch, (ops.new_kv_cache(model.scratch, -(-len(ids) // BLOCK), BLOCK),))


@pytest.mark.parametrize("make", [ReferenceOps, AtenOps])
def test_the_second_text_of_a_pair_is_told_apart(make: type, saved: tuple[Path, Tensors]) -> None:
    path, tensors = saved
    found = paired(path, make(CPU), torch.float32, rows()[3], 20)
    torch.testing.assert_close(found, by_hand(tensors, rows()[3], 20), rtol=EXACT, atol=EXACT)


def test_native_kernels_come_close_and_keep_every_bit(saved: tuple[Path, Tensors]) -> None:
    path, tensors = saved
    if not levels():
        pytest.skip("no C++ compiler here; the torch back end serves")
    needs = Needs(dtype=torch.bfloat16, hidden_size=HIDDEN, head_dims=(16,), num_threads=2)
    ops = load_ops(CPU, "native", needs)[0]
    model = encoder(path, ops, torch.bfloat16)
    for found, ids in zip(states(model, rows(), ops, model.scratch), rows(), strict=True):
        assert F.cosine_similarity(found.float(), by_hand(tensors, ids), dim=-1).min() > 0.999
    pair = paired(path, ops, torch.bfloat16, rows()[3], 20)
    assert F.cosine_similarity(pair.float(), by_hand(tensors, rows()[3], 20), dim=-1).min() > 0.999
    check_own(model, ops, model.scratch)


@pytest.mark.parametrize(("heads", "slopes"), [(1, [2.0**-8]), (2, [2.0**-4, 2.0**-8]), (HEADS, SLOPES)])
def test_slopes_are_the_papers(heads: int, slopes: list[float]) -> None:
    assert alibi_slopes(heads) == slopes


@pytest.mark.parametrize(
    ("field", "value"), [("feed_forward_type", "original"), ("position_embedding_type", "absolute"), ("alibi_x", 1)]
)
def test_what_is_not_known_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedConfig, match=field):
        encoder_spec("JinaBertForMaskedLM", CONFIG | {field: value})
