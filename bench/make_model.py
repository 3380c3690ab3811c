"""Makes checkpoints with random weights in the shapes of docs/numbers.md, for Pagoda and other servers.

    python bench/make_model.py b600m OUT
    python bench/make_model.py b600m OUT --w8a8      # its linear layers in int8, as compressed-tensors stores them

Shapes are those of `pagoda bench kernels`; g7, which is Qwen2-0.5B's, with 7 query heads per KV head; and two mixtures
of experts, granite-moe (Granite 3.1 1B-A400M) and olmoe (OLMoE 1B-7B). A model's speed depends on its shape; its output
is noise. The tokenizer knows bytes and made-up words, as many as the output matrix has room for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pagoda_worker.kernels.roofline import SHAPES, ModelShape

END = "<|end|>"


class Model(NamedTuple):
    """`more` holds the fields of config.json besides sizes."""

    shape: ModelShape
    family: str
    layers: int
    longest: int  # context, in tokens
    more: Mapping[str, Any] = {}


G7 = ModelShape(name="g7", hidden=896, middle=4864, heads=14, kv_heads=2, head_dim=64, vocab=151936, head_norm=False)
GRANITE_MOE = ModelShape(name="granite-moe", hidden=1024, middle=512, heads=16, kv_heads=8, head_dim=64, vocab=49155)
OLMOE = ModelShape(name="olmoe", hidden=2048, middle=1024, heads=16, kv_heads=16, head_dim=128, vocab=50304)
MODELS = {
    "b135m": Model(SHAPES["b135m"], "llama", 30, 8192),
    "b600m": Model(SHAPES["b600m"], "qwen3", 28, 40960),
    "b1b": Model(SHAPES["b1b"], "llama", 16, 131072),
    "8b": Model(SHAPES["8b"], "llama", 32, 131072),
    "g7": Model(G7, "qwen2", 24, 32768),
    "granite-moe": Model(GRANITE_MOE, "granitemoe", 24, 4096, {
        "num_local_experts": 32, "num_experts_per_tok": 8, "attention_multiplier": 1 / 64, "embedding_multiplier": 12.0,
        "logits_scaling": 6.0, "residual_multiplier": 0.22,
    }),
    "olmoe": Model(OLMOE, "olmoe", 16, 4096, {
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "tie_word_embeddings": False,
    }),
}  # fmt: skip
SIDE = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**SIDE, "strategy": "channel", "dynamic": False},
            "input_activations": {**SIDE, "strategy": "token", "dynamic": True},
        }
    },
}  # fmt: skip


def tokenizer_of(size: int) -> Any:
    """A tokenizer of bytes, and of as many words of two to four letters as there is room for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for length in (2, 3, 4):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            if len(vocab) >= size - 1:
                break
            word = "".join(letters)
            merges.append((word[:-1], word[-1]))
            vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def write_model(path: Path, name: str, vocab: int = 0) -> None:
    """Write a model in Hugging Face format in bf16, with the same weights every time; `vocab` overrides the shape's."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    shape, family, layers, longest, more = MODELS[name]
    size = vocab or shape.vocab
    tokenizer = tokenizer_of(size)
    end = tokenizer.token_to_id(END)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(path)
    fields = {
        "vocab_size": size, "hidden_size": shape.hidden, "intermediate_size": shape.middle,
        "num_hidden_layers": layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "max_position_embeddings": longest, "tie_word_embeddings": True,
        "eos_token_id": end, "bos_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **(fields | dict(more)))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)


def round_weights(path: Path) -> None:
    """Round the linear layers of the model at `path` to int8, with a scale per output; the embedding is unchanged."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = path / "model.safetensors"
    tensors = load_file(weights)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        whole = tensors.pop(name).float()
        scale = whole.abs().amax(1, keepdim=True) / 127
        tensors[name] = (whole / scale).round_().to(torch.int8)
        tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, weights, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": W8A8}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=MODELS)
    parser.add_argument("out", type=Path, help="a directory that does not exist yet")
    parser.add_argument("--w8a8", action="store_true", help="linear layers in int8")
    parser.add_argument("--vocab", type=int, default=0, help="tokens, where they are to be others than the shape's")
    given = parser.parse_args()
    if given.w8a8 and MODELS[given.shape].more:
        parser.error(f"--w8a8: {given.shape} has experts, which are not rounded here")
    given.out.mkdir(parents=True)
    write_model(given.out, given.shape, given.vocab)
    if given.w8a8:
        round_weights(given.out)


if __name__ == "__main__":
    main()
