"""Random adapters in the format that PEFT writes, and checkpoints with them merged in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import pagoda
from pagoda_worker.checkpoints.checkpoint import open_checkpoint, read_json
from pagoda_worker.checkpoints.spec import DecoderSpec, as_spelled, linear_layers, matrices_of_all, whole_tensors
from pagoda_worker.loading.model import native_spec

# Every field that PEFT 0.21 writes, most of them with their defaults.
CONFIG: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "somewhere/else", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 16, "lora_bias": False, "lora_dropout": 0.1,
    "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 8,
    "rank_pattern": {}, "revision": None, "target_modules": "all-linear", "target_parameters": None,
    "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip
DEMO = Path(pagoda.__file__).parent / "demo_model"
RANKS = {"down_proj": 3, "q_proj": 17, "c_fc": 5, "qkv_proj": 20}
PREFIX = "base_model.model."
Tensors = dict[str, torch.Tensor]


def factors(
    shapes: Mapping[str, tuple[int, int]],
    rank: Callable[[str], int] = lambda name: 8,
    seed: int = 1,
    size: float = 0.06,
) -> Tensors:
    """A and B for every (outputs, inputs), by module name."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = size * torch.randn(rank(name), inputs, generator=random)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = size * torch.randn(outputs, rank(name), generator=random)
    return tensors


def write(path: Path, tensors: Tensors, **changes: Any) -> Path:
    """Write an adapter's directory; `changes` override fields of its config."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def rank_of(name: str) -> int:
    return RANKS.get(name.rpartition(".")[2], 8)


def spelt(path: Path) -> DecoderSpec:
    fields = read_json(path / "config.json")
    spec = native_spec(fields["architectures"][0], fields)
    with open_checkpoint(path) as checkpoint:
        return as_spelled(spec, checkpoint.entries)


def scale_of(name: str) -> float:
    return 16 / rank_of(name)


def adapter_of(path: Path, out: Path, seed: int = 1, size: float = 0.06, **changes: Any) -> tuple[Path, Tensors]:
    """An adapter for every matrix of a checkpoint that may be adapted, with various ranks."""
    spec = spelt(path)
    shapes = {name: linear_layers(spec)[name] for name in matrices_of_all(spec)}
    tensors = factors(shapes, rank_of, seed, size)
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    return write(out, tensors, target_modules=targets, rank_pattern=RANKS, **changes), tensors


def embedding_factors(module: str, shape: tuple[int, int], rank: int, size: float = 0.06) -> Tensors:
    """A and B for an embedding of (tokens, dimensions)."""
    random = torch.Generator().manual_seed(7)
    sides = {"A": (rank, shape[0]), "B": (shape[1], rank)}
    name = f"{PREFIX}{module}.lora_embedding_"
    return {name + side: size * torch.randn(*sizes, generator=random) for side, sizes in sides.items()}


def whole_of(path: Path, *ends: str, seed: int = 5) -> Tensors:
    """Replacements for a checkpoint's tensors in modules whose names end so."""
    random, found = torch.Generator().manual_seed(seed), {}
    for name, weight in untied(path).items():
        if name.rpartition(".")[0].endswith(ends) and name in whole_tensors(spelt(path)):
            spread = 0.3 if weight.dim() == 1 else 0.5 * weight.std()
            found[PREFIX + name] = weight + spread * torch.randn(weight.shape, generator=random)
    return found


def untied(path: Path) -> Tensors:
    """A checkpoint's tensors in float32, with a separate output matrix."""
    names, weights = spelt(path).names, load_file(path / "model.safetensors")
    head = weights.get(f"{names.head}.weight", weights[f"{names.top(names.embed)}.weight"])
    return {name: weight.float() for name, weight in (weights | {f"{names.head}.weight": head.clone()}).items()}


def merged(model: Path, tensors: Tensors, out: Path, scale: Callable[[str], float], transposed: bool = False) -> Path:
    """The checkpoint of `model` in float32, with whole tensors replaced and scale * B A added to matrices that have
    factors; if embedding and head are tied and one changes, they become separate."""
    shutil.copytree(model, out)
    weights = {name: weight.float() for name, weight in load_file(model / "model.safetensors").items()}
    names = {name.removeprefix(PREFIX).replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}
    ends = {f"{spelt(model).names.head}.", f"{spelt(model).names.top(spelt(model).names.embed)}."}
    if spelt(model).tied and any(name.startswith(tuple(ends)) for name in names):
        weights = untied(model)
        fields = read_json(out / "config.json") | {"tie_word_embeddings": False}
        (out / "config.json").write_text(json.dumps(fields))
    weights |= {name: tensor.float().clone() for name, tensor in names.items() if ".lora_" not in name}
    for name, a in names.items():
        module, side, _ = name.partition(".lora_A.weight" if ".lora_A" in name else ".lora_embedding_A")
        if side:
            b = names[module + side.replace("A", "B")]
            delta = scale(module) * b.double() @ a.double()
            flipped = transposed if side == ".lora_A.weight" else True
            weight = weights[f"{module}.weight"]
            weights[f"{module}.weight"] = (weight + (delta.T if flipped else delta)).float().contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out
