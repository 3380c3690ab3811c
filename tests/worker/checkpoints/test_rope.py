"""Rotary embedding: the angles of every scaling against transformers' functions, and which dimensions are paired."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagoda_worker.checkpoints.config_reader import ConfigReader
from pagoda_worker.checkpoints.rope import SLICE, RopeShape, RotaryTable, head_order, inverse_frequencies
from pagoda_worker.checkpoints.rope_fields import RopeDefaults, read_rope

CPU = torch.device("cpu")
HEADS, DIM, LONGEST, TRAINED = 4, 32, 4096, 512
FACTORS = {"short_factor": [1.0 + i / 8 for i in range(12)], "long_factor": [1.0 + i for i in range(12)]}
ORIGINAL = {"original_max_position_embeddings": TRAINED}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "yarn": {"factor": 8.0, **ORIGINAL},
    "longrope": {**FACTORS, **ORIGINAL},
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in SCALINGS),
    ("yarn", {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}),
    ("yarn", {"mscale": 0.7, "mscale_all_dim": 1.2}),
    ("yarn", {"mscale": 0, "mscale_all_dim": 1.2}),
    ("yarn", {"mscale": 0.7, "mscale_all_dim": 0.0}),
    ("yarn", {"mscale": 0.0, "mscale_all_dim": 0.0}),
    ("yarn", {"attention_factor": 1.3}),
    ("longrope", {"factor": 2.0}),
    ("longrope", {"attention_factor": 1.1}),
]


def both(kind: str, changes: dict[str, Any], length: int) -> tuple[RopeShape, torch.Tensor, float]:
    """What config.json is parsed into; transformers' angles for rows of `length` tokens, and its scale for them."""
    partial = 0.75
    scaling = {"rope_type": kind, "rope_theta": 1e4, **SCALINGS[kind], **changes}
    fields = {
        "hidden_size": HEADS * DIM, "num_attention_heads": HEADS, "max_position_embeddings": LONGEST,
        "rope_parameters": {**scaling, "partial_rotary_factor": partial},
    }  # fmt: skip
    config = AutoConfig.for_model("llama", **fields)
    theirs, magnitude = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)
    return read_rope(ConfigReader(fields), DIM, RopeDefaults(partial=1.0)), theirs, magnitude


@pytest.mark.parametrize("length", [TRAINED // 2, 2 * LONGEST])
@pytest.mark.parametrize(("kind", "changes"), VARIANTS)
def test_angles_are_those_of_transformers(kind: str, changes: dict[str, Any], length: int) -> None:
    shape, theirs, magnitude = both(kind, changes, length)
    torch.testing.assert_close(inverse_frequencies(shape, length), theirs, rtol=1e-6, atol=0)
    assert shape.magnitude == pytest.approx(magnitude)
    assert shape.dims == 24


def test_what_depends_on_the_length_of_a_row_is_named() -> None:
    for kind in SCALINGS:
        shape, _, _ = both(kind, {}, TRAINED // 2)
        longer = inverse_frequencies(shape, 2 * LONGEST)
        assert (shape.fixed_at(2 * LONGEST) != "") is (kind in ("dynamic", "longrope"))
        assert torch.equal(longer, inverse_frequencies(shape, TRAINED // 2)) is (shape.fixed_at(2 * LONGEST) == "")
        assert shape.fixed_at(TRAINED // 2) == ""
    dynamic = both("dynamic", {}, LONGEST)[0]
    assert dynamic.fixed_at(LONGEST + 1) != dynamic.fixed_at(LONGEST + 2)
    assert dynamic.reach == 3 * LONGEST


def at_once(shape: RopeShape, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tables, each computed at once by its formula."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(shape, length)
    still = (0, (shape.head_dim - shape.dims) // 2)
    cos, sin = angles.cos() * shape.magnitude, angles.sin() * shape.magnitude
    return torch.nn.functional.pad(cos, still, value=1.0), torch.nn.functional.pad(sin, still)


@pytest.mark.parametrize("length", [1, 37, SLICE, 2 * SLICE + 77])
@pytest.mark.parametrize(("kind", "changes"), [("default", {}), *VARIANTS])
def test_a_table_made_in_slices_has_the_bits_of_one_made_at_once(
    kind: str, changes: dict[str, Any], length: int
) -> None:
    plain = RopeShape(theta=1e4, head_dim=DIM, turning=20)
    for shape in (plain, replace(plain, turning=0)) if kind == "default" else (both(kind, changes, length)[0],):
        table = RotaryTable(shape, length, CPU).at(torch.arange(length))
        for ours, theirs in zip((table.cos_table, table.sin_table), at_once(shape, length), strict=True):
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


class Largest(TorchDispatchMode):
    """Records the size of every storage that operations allocate; views do not count again."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        for one in made if isinstance(made, list | tuple) else [made]:
            place = one.untyped_storage().data_ptr()
            self.bytes[place] = max(self.bytes.get(place, 0), one.untyped_storage().nbytes())
        return made


def test_nothing_as_large_as_a_table_is_made_beside_them() -> None:
    shape, length = RopeShape(theta=1e4, head_dim=128, magnitude=1.5), 8 * SLICE
    with Largest() as largest:
        table = RotaryTable(shape, length, CPU)
    found = table.at(torch.zeros(1, dtype=torch.int64))
    kept = {one.untyped_storage().data_ptr() for one in (found.cos_table, found.sin_table)}
    assert sum(largest.bytes[one] for one in kept) == length * shape.bytes_per_position
    beside = [size for place, size in largest.bytes.items() if place not in kept]
    assert max(beside) <= length * shape.bytes_per_position // 16


def test_llama3_blends_between_the_two_wavelengths() -> None:
    plain = inverse_frequencies(RopeShape(theta=1e4, head_dim=64))
    shape = RopeShape(theta=1e4, head_dim=64, kind="llama3", factor=8.0, original_max_position=512)
    ratio = inverse_frequencies(shape) / plain
    wavelength = 2 * torch.pi / plain
    assert torch.equal(ratio[wavelength < 128], torch.ones_like(ratio[wavelength < 128]))
    assert torch.allclose(ratio[wavelength > 512], torch.tensor(1 / 8))
    middle = ratio[(wavelength > 128) & (wavelength < 512)]
    assert ((middle > 1 / 8) & (middle < 1)).all()


def turned(x: torch.Tensor, shape: RopeShape, position: int) -> torch.Tensor:
    """Rotate x [D] as a kernel does, then restore the order of the checkpoint."""
    order = head_order(shape) or list(range(shape.head_dim))
    rotation = RotaryTable(shape, position + 1, CPU).at(torch.tensor([position]))
    ours = x[order]
    result = torch.empty_like(x)
    result[order] = (ours * rotation.cos + ours.roll(shape.head_dim // 2) * rotation.sin)[0, 0]
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turning", [0, 4, 10])
def test_pairs_are_those_that_the_checkpoint_means(turning: int, interleaved: bool) -> None:
    shape = RopeShape(theta=10.0, head_dim=16, turning=turning, interleaved=interleaved, magnitude=1.5)
    x, dims = torch.randn(16), shape.dims
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + dims // 2) for i in range(dims // 2)]
    expected = x.clone()
    for angle, (one, other) in zip(7 * inverse_frequencies(shape), pairs, strict=True):
        cos, sin = 1.5 * angle.cos(), 1.5 * angle.sin()
        expected[one], expected[other] = x[one] * cos - x[other] * sin, x[other] * cos + x[one] * sin
    torch.testing.assert_close(turned(x, shape, 7), expected)


def test_heads_stay_as_they_are_stored_where_that_is_right() -> None:
    assert head_order(RopeShape(theta=1e4, head_dim=16)) is None
    assert head_order(RopeShape(theta=1e4, head_dim=8, interleaved=True)) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert head_order(RopeShape(theta=1e4, head_dim=8, turning=4)) == [0, 1, 4, 5, 2, 3, 6, 7]
