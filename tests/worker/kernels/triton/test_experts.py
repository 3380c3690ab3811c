"""Experts: how tokens are assigned to them, their products, and that a token's bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from tests.worker.kernels.closeness import assert_close
from tests.worker.kernels.triton.support import DEVICE, DTYPES, assert_continues, reference
from triton.runtime.interpreter import InterpreterBuilder

from pagoda_worker.kernels.ops import CLAMPED, Expert
from pagoda_worker.kernels.quantized import FORMATS, dequantize, quantize
from pagoda_worker.kernels.routing import Beside, Routing, choose
from pagoda_worker.kernels.routing import combine as combined
from pagoda_worker.kernels.triton.experts import BUSY, MANY, combine, lines_for, place
from pagoda_worker.kernels.triton.ops import TritonOps
from pagoda_worker.kernels.triton.plan import Tiles
from pagoda_worker.loading.model import native_spec

EXPERTS, CHOSEN, HIDDEN, WIDTH = 5, 2, 104, 72  # no multiples of what a program takes at a time
FEW, ENOUGH = 7, -(-BUSY * EXPERTS // CHOSEN) + 1  # numbers of tokens for low tiles, and for high ones
ROUTING = Routing(experts=EXPERTS, chosen=CHOSEN, renormalised=True)
low, high = (TritonOps(DEVICE, Tiles(low=lines, high=lines, fill=0)) for lines in (16, 64))
both = TritonOps(DEVICE, Tiles(low=16, high=128, fill=0))


class Case(NamedTuple):
    x: torch.Tensor
    logits: torch.Tensor
    experts: list[Expert]
    beside: Beside | None


def case(dtype: torch.dtype, tokens: int, biased: bool = False, shared: bool = False) -> Case:
    generator = torch.Generator().manual_seed(7)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    def expert() -> Expert:
        weights = numbers(2 * WIDTH, HIDDEN) / 8, numbers(HIDDEN, WIDTH) / 8
        return Expert(*weights, *((numbers(2 * WIDTH), numbers(HIDDEN)) if biased else ()))

    experts = [expert() for _ in range(EXPERTS)]
    logits = numbers(tokens, EXPERTS).float() * 2
    beside = Beside(numbers(tokens, HIDDEN), numbers(tokens, 1).float()) if shared else None
    return Case(numbers(tokens, HIDDEN), logits, experts, beside)


def there(value: Any) -> Any:
    """The value on the device, or None."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    return value if value is None else type(value)(*map(there, value))


def packed_by(ops: TritonOps, made: Case) -> Any:
    return ops.pack_experts(map(there, made.experts), len(made.experts))


def moe(ops: TritonOps, made: Case, packed: Any, activation: str = "silu", rows: Any = slice(None)) -> torch.Tensor:
    beside = made.beside and Beside(made.beside.product[rows], made.beside.gate[rows])  # type: ignore[index]
    x, logits = there(made.x[rows]), there(made.logits[rows])
    return ops.moe(x, logits, packed, ROUTING, activation, there(beside)).cpu()


def expected_of(made: Case, activation: str = "silu") -> torch.Tensor:
    wide = [Expert(*(one if one is None else one.double() for one in expert)) for expert in made.experts]  # type: ignore[arg-type, union-attr]
    beside = made.beside and Beside(made.beside.product.double(), made.beside.gate)
    packed = reference.pack_experts(iter(wide), len(wide))
    return reference.moe(made.x.double(), made.logits, packed, ROUTING, activation, beside)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, FEW, ENOUGH])
@pytest.mark.parametrize(
    ("activation", "biased", "shared"),
    [("silu", False, False), ("gelu_tanh", False, True), ("gelu", True, False), (CLAMPED, True, True)],
)
def test_it_is_near_the_reference(activation: str, biased: bool, shared: bool, tokens: int, dtype: torch.dtype) -> None:
    made = case(dtype, tokens, biased, shared)
    assert_close(moe(both, made, packed_by(both, made), activation), expected_of(made, activation))


@pytest.mark.parametrize("tokens", [FEW, ENOUGH])
def test_experts_that_are_favoured(tokens: int) -> None:
    made = case(torch.float32, tokens)
    routing, favour = replace(ROUTING, sigmoid=True, scale=2.0), torch.tensor([0.0, 0.5, 0.0, -0.5, 0.0])
    packed = both.pack_experts(map(there, made.experts), EXPERTS, there(favour))
    wide = [Expert(one.gate_up.double(), one.down.double()) for one in made.experts]  # type: ignore[union-attr]
    expected = reference.moe(
        made.x.double(), made.logits, reference.pack_experts(iter(wide), EXPERTS, favour), routing, "silu"
    )
    assert_close(both.moe(there(made.x), there(made.logits), packed, routing, "silu"), expected)
    assert not torch.equal(choose(made.logits, routing, favour)[0], choose(made.logits, routing)[0])


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantised_experts_are_those_of_their_values(form: str) -> None:
    inputs = 64  # a 4-bit group divides this
    made = case(torch.float32, FEW)
    made = made._replace(x=made.x[:, :inputs])
    sizes = (2 * WIDTH, inputs), (inputs, WIDTH)
    rounded = [quantize(torch.randn(size), FORMATS[name]) for size, name in zip(sizes, (form, "int8"), strict=True)]
    plain = [dequantize(one) for one in rounded]
    got, expected = (
        moe(both, made, both.pack_experts([Expert(*pair)] * EXPERTS, EXPERTS)) for pair in (rounded, plain)
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_its_own(dtype: torch.dtype) -> None:
    """Alone, in any batch, in any order, in tiles of any height, next to a copy of itself."""
    made = case(dtype, ENOUGH, biased=True, shared=True)
    packed = packed_by(both, made)
    whole = moe(both, made, packed)
    assert lines_for(ENOUGH, CHOSEN, EXPERTS, both.tiles, torch.bfloat16) == 128
    order = torch.randperm(ENOUGH, generator=torch.Generator().manual_seed(1))
    for rows in (slice(5, 6), slice(0, 2), slice(7, 31), slice(30, ENOUGH), order, order[:20], torch.tensor([3] * 40)):
        assert torch.equal(moe(both, made, packed, rows=rows), whole[rows]), rows
    for ops in (low, high):
        assert torch.equal(moe(ops, made, packed), whole)
    others = made._replace(x=made.x.clone(), logits=made.logits.clone())
    others.x[1:], others.logits[1:] = torch.nan, made.logits[0]
    assert torch.equal(moe(both, others, packed)[0], whole[0])


@pytest.mark.parametrize("tokens", [FEW, ENOUGH])
def test_all_tokens_to_one_expert(tokens: int) -> None:
    """The other experts get only second choices."""
    made = case(torch.bfloat16, tokens)
    packed, whole = packed_by(both, made), moe(both, made, packed_by(both, made))
    crowded = made._replace(logits=made.logits.clone())
    crowded.logits[1:, 3] = 90.0
    got = moe(both, crowded, packed)
    assert_close(got, expected_of(crowded))
    assert torch.equal(got[0], whole[0])


def test_experts_with_no_tokens() -> None:
    made = case(torch.bfloat16, FEW)
    made.logits[:, [0, 2, 4]] -= 100.0
    packed = packed_by(both, made)
    got = moe(both, made, packed)
    assert_close(got, expected_of(made))
    for unused in (0, 2, 4):
        packed.gate_up[unused], packed.down[unused] = torch.nan, torch.nan
    assert torch.equal(moe(both, made, packed), got)


def test_weights_of_zero_add_nothing_and_equal_logits_are_equal_shares() -> None:
    made = case(torch.bfloat16, FEW)
    packed, one = packed_by(both, made), Routing(experts=EXPERTS, chosen=1, renormalised=True)
    made.logits[:, 2], made.logits[:, 1] = 300.0, 100.0  # the share of the second is 0 in float32
    x, logits = there(made.x), there(made.logits)
    assert torch.equal(both.moe(x, logits, packed, ROUTING, "silu"), both.moe(x, logits, packed, one, "silu"))
    level = made._replace(logits=torch.zeros(FEW, EXPERTS))
    halves = [both.moe(x, there(torch.eye(EXPERTS)[[i] * FEW]), packed, one, "silu").float() / 2 for i in (0, 1)]
    assert torch.equal(moe(both, level, packed), (halves[0] + halves[1]).bfloat16().cpu())


@pytest.fixture
def places_read(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Record the addresses of every read of interpreted kernels."""
    found, load = [], InterpreterBuilder.create_masked_load

    def recorded(self: Any, places: Any, mask: Any, *others: Any) -> Any:
        found.append(torch.from_numpy(places.data[mask.data].astype("int64")))
        return load(self, places, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", recorded)
    return found


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device does not tell what its kernels read")
def test_of_experts_that_nobody_chose_nothing_is_read(places_read: list[torch.Tensor]) -> None:
    made = case(torch.float32, 3)
    made.logits[:, [0, 2, 4]] -= 100.0
    packed = packed_by(both, made)
    moe(both, made, packed)
    read = torch.cat([places.flatten() for places in places_read])
    for weights in (packed.gate_up, packed.down):
        inside = read[(read >= weights.data_ptr()) & (read < weights.data_ptr() + weights.nbytes)]
        numbers = (inside - weights.data_ptr()) // weights.element_size()
        of_expert = numbers // weights[0].numel()
        assert of_expert.unique().tolist() == [1, 3]
        for expert in (1, 3):
            assert len(numbers[of_expert == expert].unique()) == weights[0].numel()
        assert len(numbers) == 2 * weights[0].numel(), "each number once"


def drawn_ids() -> Iterator[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(3)
    for tokens, chosen, experts in [(1, 1, 1), (1, 8, 128), (3, 2, 5), (40, 4, 9), (700, 3, 4), (300, 1, 257)]:
        scores = torch.rand(tokens, experts, generator=generator)
        scores[tokens // 3 :, : experts // 2] += 1.0  # some experts get most tokens
        yield scores.argsort(-1, descending=True)[:, :chosen], experts
    yield torch.full((200, 1), 6), 9


@pytest.mark.parametrize(("ids", "experts"), list(drawn_ids()))
@pytest.mark.parametrize("lines", [16, 128])
def test_every_choice_is_in_one_tile_of_its_expert(ids: torch.Tensor, experts: int, lines: int) -> None:
    placed, flat = place(there(ids), experts, lines), ids.flatten()
    choices, tiles = placed.choices.cpu().long(), placed.tiles.tolist()
    assert torch.equal(choices, flat.argsort(stable=True))
    covered = []
    for expert, first, end in tiles:
        if expert >= 0:
            of_tile = list(range(first, min(first + lines, end)))
            assert of_tile
            assert (flat[choices[of_tile]] == expert).all()
            covered += of_tile
    assert covered == list(range(len(flat)))
    assert len(tiles) <= len(flat) // lines + min(experts, len(flat))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chosen", [1, 4])
def test_products_are_added_in_the_order_of_ranks(chosen: int, dtype: torch.dtype) -> None:
    tokens, width = 3, 1100
    products, weights = torch.randn(tokens, chosen, width).to(dtype), torch.rand(tokens, chosen)
    beside = torch.randn(tokens, width).to(dtype)
    for share in (None, Beside(beside, None)):
        out = there(torch.empty(tokens, width, dtype=dtype))
        combine(out, there(products.flatten(0, 1)), there(weights), there(share))
        assert torch.equal(out.cpu(), combined(products, weights, share))
    gate = torch.randn(tokens, 1)
    combine(out, there(products.flatten(0, 1)), there(weights), there(Beside(beside, gate)))
    assert_close(out, combined(products.double(), weights, Beside(beside.double(), gate)))


def test_the_height_of_tiles_is_of_the_number_of_tokens_alone() -> None:
    tiles = both.tiles
    assert [lines_for(tokens, 8, 128, tiles, torch.bfloat16) for tokens in (1, MANY - 1, MANY)] == [16, 16, 128]
    assert [lines_for(tokens, 2, 8, tiles, torch.float16) for tokens in (127, 128)] == [16, 128]
    assert lines_for(9999, 2, 8, tiles, torch.float32) == 16


def test_no_tokens() -> None:
    made = case(torch.bfloat16, FEW)
    assert moe(both, made, packed_by(both, made), rows=slice(0, 0)).shape == (0, HIDDEN)


# --- models ----------------------------------------------------------------------------------------------------------

COMMON: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 16,
    },
    "OlmoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": False},
    "Qwen2MoeForCausalLM": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False,
        "shared_expert_intermediate_size": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", MODELS)
def test_a_small_model_continues_as_by_the_reference(architecture: str) -> None:
    assert_continues(native_spec(architecture, COMMON | MODELS[architecture]), both)
