"""For every supported architecture, a GGUF file gives the logits of the safetensors checkpoint it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.gguf_files import stored
from tests.worker.models.checkpoints import NATIVE, make_model, save
from tests.worker.models.gguf_models import write_gguf
from tests.worker.models.harness import logits_of

from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.model import LoadedModel, load_model

TOKENS = [3, 17, 200, 9, 41, 77, 5, 130, 22, 64] * 6  # longer than the windows of these models
# Architecture -> the models it is tested with, and fields that a GGUF file cannot express.
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama", {}),
    ("llama", "llama3", {}),
    ("llama", "mistral", {}),
    ("llama", "mixtral", {"sliding_window": None}),
    ("qwen2", "qwen2", {"use_sliding_window": False}),
    ("qwen3", "qwen3", {}),
    ("qwen3moe", "qwen3_moe", {"decoder_sparse_step": 1}),
    ("gemma", "gemma", {}),
    ("gemma2", "gemma2", {"query_pre_attn_scalar": 16}),
    ("gemma3", "gemma3", {"query_pre_attn_scalar": 16}),
    ("phi3", "phi3", {}),
    ("phi3", "phi4", {}),
    ("qwen2moe", "qwen2_moe", {"mlp_only_layers": []}),
    ("granite", "granite", {}),
    ("granitemoe", "granite_moe", {}),
    ("gpt-oss", "gpt_oss", {}),
    ("olmo2", "olmo2", {}),
    ("olmo2", "olmo3", {}),
    ("olmoe", "olmoe", {}),
    ("smollm3", "smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 5, "use_sliding_window": False}),
    ("glm4", "glm4", {}),
    ("glm4moe", "glm4_moe", {}),
    ("deepseek2", "deepseek_v2", {"norm_topk_prob": False}),
    ("deepseek2", "deepseek_v3", {"rope_parameters": NATIVE["deepseek_v3"][1]["rope_parameters"] | {"mscale": 0.7}}),
    ("deepseek2", "glm4_moe_lite", {}),
    ("command-r", "cohere", {}),
    ("cohere2", "cohere2", {}),
    ("starcoder2", "starcoder2", {"sliding_window": None}),
]
ROUNDED_ONCE_MORE = {"llama3"}  # its frequencies are stored as factors


def loaded(path: Path) -> LoadedModel:
    return load_model(WorkerConfig(model=str(path), dtype="float32", kernels="torch", fallback=False))


@pytest.mark.parametrize(("arch", "name", "changes"), MODELS, ids=[name for _, name, _ in MODELS])
def test_logits_are_those_of_the_safetensors_checkpoint(
    arch: str, name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    transformers.logging.disable_progress_bar()
    model_type, fields = NATIVE[name]
    model = make_model(model_type, fields | changes)
    directory = save(model, tmp_path / "model")
    ours = loaded(write_gguf(directory, model.config, arch, tmp_path / "model.gguf"))
    with torch.inference_mode():
        found = logits_of(ours, TOKENS, [32])
        wanted = logits_of(loaded(directory), TOKENS, [32])
    if name in ROUNDED_ONCE_MORE:
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    else:
        assert torch.equal(found, wanted)


def test_layers_that_guess_tokens_are_left_out(tmp_path: Path) -> None:
    """Such layers follow the others and are included in the layer count."""
    model_type, fields = NATIVE["glm4_moe"]
    model = make_model(model_type, fields)
    directory = save(model, tmp_path / "model")
    layers, parts = model.config.num_hidden_layers, ("nextn.eh_proj", "attn_output")
    plain = write_gguf(directory, model.config, "glm4moe", tmp_path / "model.gguf")
    guessing = write_gguf(
        directory, model.config, "glm4moe", tmp_path / "guessing.gguf",
        pairs={"block_count": layers + 1, "nextn_predict_layers": 1},
        tensors={f"blk.{layers}.{part}.weight": stored(torch.ones(64, 64)) for part in parts},
    )  # fmt: skip
    with torch.inference_mode():
        assert torch.equal(logits_of(loaded(guessing), TOKENS, [32]), logits_of(loaded(plain), TOKENS, [32]))


def test_latents_of_older_files(tmp_path: Path) -> None:
    """Key and value lengths are those of a head, not of the latent, and one matrix makes both."""
    model_type, fields = NATIVE["deepseek_v3"]
    model = make_model(model_type, fields)
    directory, config = save(model, tmp_path / "model"), model.config
    tensors = load_file(directory / "model.safetensors")
    apart = {f"blk.{i}.attn_{part}_b.weight": None for i in range(config.num_hidden_layers) for part in "kv"}
    both = {
        f"blk.{i}.attn_kv_b.weight": stored(tensors[f"model.layers.{i}.self_attn.kv_b_proj.weight"])
        for i in range(config.num_hidden_layers)
    }
    newer = write_gguf(directory, config, "deepseek2", tmp_path / "newer.gguf")
    older = write_gguf(
        directory, config, "deepseek2", tmp_path / "older.gguf",
        pairs={
            "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length": config.v_head_dim, "attention.head_count_kv": config.num_attention_heads,
            "attention.key_length_mla": None, "attention.value_length_mla": None,
        },
        tensors=apart | both,
    )  # fmt: skip
    with torch.inference_mode():
        assert torch.equal(logits_of(loaded(older), TOKENS, [32]), logits_of(loaded(newer), TOKENS, [32]))
