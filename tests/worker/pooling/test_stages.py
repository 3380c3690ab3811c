from __future__ import annotations

import numpy as np
import pytest
import torch

from pagoda_worker.pooling.stages import ACTIVATIONS, WAYS, Dense, LayerNorm, normalized

STATES = np.array([[1.0, -2.0], [3.0, 4.0], [5.0, 0.0], [7.0, 6.0]], dtype=np.float32)


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("cls", [1, -2]),
        ("last", [7, 6]),
        ("mean", [4, 2]),
        ("mean_sqrt_len", [8, 4]),
        ("weighted_mean", [(1 + 6 + 15 + 28) / 10, (-2 + 8 + 0 + 24) / 10]),
        ("max", [7, 6]),
    ],
)
def test_states_become_one_vector(way: str, expected: list[float]) -> None:
    found = WAYS[way](STATES)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_torchs(name: str) -> None:
    x = torch.linspace(-4, 4, 12).view(3, 4)
    theirs = {
        "identity": x, "tanh": x.tanh(), "relu": x.relu(), "gelu": torch.nn.functional.gelu(x),
        "gelu_tanh": torch.nn.functional.gelu(x, approximate="tanh"), "silu": torch.nn.functional.silu(x),
        "sigmoid": x.sigmoid(), "softmax": x.softmax(-1),
    }  # fmt: skip
    torch.testing.assert_close(torch.from_numpy(ACTIVATIONS[name](x.numpy())), theirs[name])


def test_layers_are_torchs_and_a_vectors_bits_are_its_own() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((5, 33), (17, 33), (17,)))
    dense = Dense(weight.numpy(), bias.numpy(), "tanh")
    found = dense(x.numpy())
    expected = torch.tanh(torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)
    assert all(np.array_equal(dense(x.numpy()[i : i + 1])[0], found[i]) for i in range(5))
    norm = LayerNorm(weight[0].numpy(), None, 1e-5)
    expected = torch.nn.functional.layer_norm(x, (33,), weight[0], None, 1e-5)
    torch.testing.assert_close(torch.from_numpy(norm(x.numpy())), expected, rtol=1e-5, atol=1e-5)


def test_normalised_vectors_have_length_one_and_zeros_stay() -> None:
    found = normalized(np.array([[3.0, 4.0], [0.0, 0.0]], dtype=np.float32))
    np.testing.assert_allclose(found, [[0.6, 0.8], [0, 0]], rtol=1e-6)
