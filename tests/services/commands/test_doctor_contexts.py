"""How much memory a context takes according to `pagoda doctor MODEL`, without the model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda.cli import main
from pagoda.commands.doctor import Finding, _contexts
from pagoda.processes.exit_codes import EXIT_CONFIG
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.loading.foresight import contexts_of

GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "dtype": "bfloat16", "vocab_size": 256,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 512, "max_position_embeddings": 32768,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16,
}  # fmt: skip
LINE = 2 * 2 * 16 * 2  # bytes of a token's K and V in a layer
LATENTS = 3 * (32 + 16) * 2  # bytes of a token's latents in three layers
BLOCK = 32


def directory(path: Path, **changes: Any) -> str:
    (path / "config.json").write_text(json.dumps(GEMMA3 | changes))
    return str(path)


def found(model: str, **given: Any) -> list[Finding]:
    return list(_contexts({"model": model, "device": "cpu", "block_size": BLOCK, "kernels": "torch"} | given))


def test_windows_and_what_is_beyond_them_are_told_apart(tmp_path: Path) -> None:
    whole, local = 32768 * LINE, 5 * (512 // BLOCK + 2) * BLOCK * LINE
    share, least = (whole + local) / (6 * whole), whole + local + 5 * 2 * 512 * LINE
    assert [(one.state, one.what) for one in found(directory(tmp_path))] == [
        ("ok", f"model: a context of 32768 tokens takes {(whole + local) / 2**20:.1f} MiB, "
               f"{share:.0%} of what it would take if every layer kept all tokens; "
               f"a cache for one, with chunks of its prompt, takes {least / 2**20:.1f} MiB"),
        ("ok", f"model: 1 layers keep all tokens: {whole / 2**20:.1f} MiB, {LINE / 2**10:.1f} KiB each"),
        ("ok", f"model: 5 layers keep the last 512 tokens of any context: {local / 2**20:.1f} MiB"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "tokens", "bytes_per_token"),
    [
        ({"kv_retention": "all"}, 32768, 6 * LINE),
        ({"kv_retention": "all", "max_model_len": 8192, "dtype": "float32"}, 8192, 12 * LINE),
        ({"kv_retention": "all", "kv_cache_dtype": "int8"}, 32768, 6 * (LINE // 2 + 2 * 2 * 4)),
    ],
)
def test_options_are_those_of_serve(tmp_path: Path, given: dict[str, Any], tokens: int, bytes_per_token: int) -> None:
    first, *others = found(directory(tmp_path), **given)
    assert first.what == f"model: a context of {tokens} tokens takes {tokens * bytes_per_token / 2**20:.1f} MiB"
    assert len(others) == 1


@pytest.mark.parametrize(
    ("name", "kernels", "said"),
    [
        ("llama4", "torch", "of what it would take if every layer kept all"),
        ("deepseek_v3", "torch", f"takes {1024 * LATENTS / 2**20:.1f} MiB"),
        ("deepseek_v3", "native", f"takes {1024 * LATENTS / 2**20:.1f} MiB"),
    ],
)
def test_it_is_what_a_worker_says_at_its_start(tmp_path: Path, name: str, kernels: str, said: str) -> None:
    """For a model whose layers differ or have latents: its files give the same numbers as the loaded model."""
    from tests.worker.models.checkpoints import NATIVE, make_model, save

    from pagoda_worker.loading.model import load_model
    from pagoda_worker.loading.retention import context_cost, settled

    if kernels == "native" and not LIBRARY.exists():
        pytest.skip("no C++ compiler here")
    path = save(make_model(*NATIVE[name]), tmp_path, torch.bfloat16)
    config = WorkerConfig(model=str(path), device="cpu", block_size=16, max_tokens_per_step=32, kernels=kernels)
    (loaded,) = settled(config, load_model(config))
    assert contexts_of(config)[0] == context_cost(loaded, 16)
    assert said in contexts_of(config)[0]


@pytest.mark.parametrize(
    ("changes", "given", "state", "text"),
    [
        ({"architectures": ["UnheardForCausalLM"]}, {}, "warn", "no native implementation"),
        ({"hidden_size": -1}, {}, "FAIL", "'hidden_size' must be from 1"),
        ({}, {"max_model_len": 40000}, "FAIL", "max_model_len=40000 exceeds"),
        ({}, {"block_size": 17}, "FAIL", "block_size must be a multiple of 16"),
    ],
)
def test_what_cannot_be_told_is_a_finding(
    tmp_path: Path, changes: dict[str, Any], given: dict[str, Any], state: str, text: str
) -> None:
    (finding,) = found(directory(tmp_path, **changes), **given)
    assert finding.state == state
    assert text in finding.what


def test_no_such_model(tmp_path: Path) -> None:
    (finding,) = found(str(tmp_path / "none"))
    assert (finding.state, "no such directory" in finding.what) == ("FAIL", True)


def test_options_of_a_model_without_one_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dtype", "float32", "--max-model-len=17"]) == EXIT_CONFIG
    said = capsys.readouterr()
    assert not said.out
    assert "--dtype needs a MODEL" in said.err
    assert "--max-model-len needs a MODEL" in said.err
