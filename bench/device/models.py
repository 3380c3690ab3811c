"""Models by shape, with weights that are made up where they are needed: no file, no copy, no tokenizer."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
import torch
from bench.device.hardware import Hardware
from bench.device.job import ENGINE

from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import NewRow
from pagoda_worker.checkpoints.checkpoint import Checkpoint, Entry
from pagoda_worker.checkpoints.spec import DecoderSpec, MoeShape, expected_tensors, linear_layers
from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.model import LoadedModel, load_model, native_spec
from pagoda_worker.process.startup import runner_on_device
from pagoda_worker.rows.rows import Row
from pagoda_worker.step.runner import ModelRunner

_QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 5e5, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": _QWEN | {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    },
    "1B": _LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    "8B": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
    "OLMoE": {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": 1e4, "vocab_size": 50304, "max_position_embeddings": 4096, "hidden_size": 2048,
        "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
_SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
_SMALL_EXPERTS = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 24, "num_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
# What a GPU's reference computes row by row in reasonable time: the 0.6B shape with fewer layers.
SHAPES["small"] = SHAPES["0.6B"] | {"num_hidden_layers": 6, "max_position_embeddings": 4096}
SPREAD = 0.02  # of a matrix; the published models were initialised with it


def shapes(smoke: bool) -> dict[str, dict[str, Any]]:
    """The shapes by name; in a smoke test each is the same architecture of no size."""
    if not smoke:
        return SHAPES
    return {name: fields | (_SMALL_EXPERTS if "num_experts" in fields else _SMALL) for name, fields in SHAPES.items()}


def spec_of(fields: dict[str, Any]) -> DecoderSpec:
    taken = {name: value for name, value in fields.items() if name != "model_type"}
    return native_spec(fields["architectures"][0], taken)


def weight_bytes(spec: DecoderSpec, rows: float = math.inf) -> int:
    """What a step of `rows` reads of the weights in two bytes each: every matrix once, the embedding only as a tied
    head; of the experts of a layer, as many as are expected to be chosen where each is as likely as any other.
    """
    matrices = sum(map(math.prod, linear_layers(spec).values()))
    left = sum(
        _left_alone(layer.mlp, rows) * 3 * layer.mlp.width for layer in spec.layers if isinstance(layer.mlp, MoeShape)
    )
    return 2 * (matrices - round(left * spec.hidden_size) + (spec.vocab_size * spec.hidden_size if spec.tied else 0))


def _left_alone(moe: MoeShape, rows: float) -> float:
    """How many experts no row is expected to choose."""
    routing = moe.routing
    return float(routing.experts * (1 - routing.chosen / routing.experts) ** rows)


@dataclass
class MadeUp(Checkpoint):
    """A checkpoint in bfloat16 that was never written. Equal seeds give equal tensors on one device."""

    hardware: Hardware | None = None
    seconds: float = field(default=0.0, init=False)  # spent making tensors up

    def stored(self, name: str) -> torch.Tensor:
        assert self.hardware is not None
        self.hardware.synchronize()
        started = time.perf_counter()
        shape, device = self.entries[name].shape, self.hardware.device
        if len(shape) == 1:
            made = torch.ones(shape, dtype=torch.bfloat16, device=device)
        else:
            generator = torch.Generator(device).manual_seed(crc32(name.encode()))
            made = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, SPREAD, generator=generator)
        self.hardware.synchronize()
        self.seconds += time.perf_counter() - started
        return made


def made_up(path: Path, spec: DecoderSpec, hardware: Hardware) -> MadeUp:
    entries = {
        name: Entry(path / "made up", "BF16", shape, 0, 2 * math.prod(shape))
        for name, shape in expected_tensors(spec).items()
    }
    return MadeUp(path, entries, "made up", hardware=hardware)


def load(hardware: Hardware, fields: dict[str, Any], **options: Any) -> tuple[LoadedModel, WorkerConfig, MadeUp]:
    """The model of `fields` (as in config.json) by the product's own loader, and its weights as they were made up."""
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(fields))
        config = WorkerConfig(
            model=directory,
            device=str(hardware.device),
            **({"dtype": "bfloat16", "max_tokens_per_step": ENGINE["max_tokens_per_step"]} | options),
        )
        weights = made_up(Path(directory), spec_of(fields), hardware)
        return load_model(config, None, lambda path, progress: weights), config, weights


def runner_of(hardware: Hardware, loaded: LoadedModel, config: WorkerConfig) -> ModelRunner:
    """As a worker makes it on a device: caches that take what is left or what `config` says, recorded decode steps."""
    runner = runner_on_device(loaded, None, config, lambda _: hardware.accelerator(), lambda done, of: None)
    runner.warm_up()
    return runner


def records_steps(loaded: LoadedModel, config: WorkerConfig) -> bool:
    return loaded.ops.capturable and not config.enforce_eager


def row_of(row_id: int, token_ids: list[int], block_ids: list[int]) -> Row:
    """A greedy row as a worker holds it."""
    new = NewRow(
        row_id=row_id, token_ids=token_ids, num_prompt_tokens=len(token_ids), num_computed=0, block_ids=block_ids,
        params=SamplingParams(temperature=0.0), seed=0,
    )  # fmt: skip
    return Row.of(new, np.array(token_ids, np.int64), np.array(block_ids, np.int64))
