"""Decode steps of Triton kernels, recorded and replayed under a runner, whatever happens to the rows meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.worker.fakes_accelerator import FakeAccelerator
from tests.worker.fakes_capturable import BLOCK, VOCAB, decoder, decoder_of
from tests.worker.fakes_engine import GREEDY, Choice, Engine
from tests.worker.kernels.triton.support import DEVICE, reference, splitting, walking
from tests.worker.step.test_adapted_rows import ONE, TWO, FakeAdapters

from pagoda_worker.adapters.store import NO_ADAPTERS
from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.spec import linear_layers
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.ops import Ops, SlotRoom
from pagoda_worker.kernels.triton.attention import SPLIT
from pagoda_worker.kernels.triton.ops import TritonOps
from pagoda_worker.loading.model import LoadedModel, native_spec
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.models.linear import AdapterTensors, Factors
from pagoda_worker.process.startup import accelerator_of, runner_on_device
from pagoda_worker.step.graphs import Graphed
from pagoda_worker.step.runner import ModelRunner

MAX_LEN, NUM_BLOCKS, MAX_ROWS = 2 * SPLIT, 40, 3  # a recording is made for two splits
MAX_TOKENS = 96  # per step: two prompts, or a high tile and part of another
PROMPTS = [(47, 8), (33, 8), (1, 6), (33, 8)]  # tokens, outputs; the second and the last are forks of one
REPLAYS = 9  # steps left that only decode, given what happens to the rows
# Softcaps of scores and logits and a scaled embedding might also break a recording.
SHAPE: dict[str, Any] = {
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "max_positions": MAX_LEN,
    "ropes": (RopeShape(theta=10_000.0, head_dim=16),),
    "windows": (None, 20),
    "tied": False,
    "final_softcap": 30.0,
    "attention_softcap": 5.0,
    "embed_scale": 1.5,
}


# Attention chunks of one block, several of which a row spans; experts, and position-scaled queries.
LLAMA4: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "intermediate_size_mlp": 48, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": MAX_LEN,
    "num_local_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2,
    "attention_chunk_size": BLOCK, "floor_scale": 16, "attn_scale": 0.5, "hidden_act": "silu",
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": MAX_LEN,
    "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip
# Latents, stored once.
DEEPSEEK: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24, "hidden_act": "silu",
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": MAX_LEN,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 3, "topk_group": 2, "kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "rms_norm_eps": 1e-6,
}  # fmt: skip
FIELDS = {"Llama4ForCausalLM": LLAMA4, "Qwen3MoeForCausalLM": QWEN3_MOE, "DeepseekV3ForCausalLM": DEEPSEEK}


RANKS = (5, 16)  # of the two adapters, for every matrix
ADAPTERS = [ONE, TWO, None, TWO]  # of each choice


def add_adapters(model: Decoder) -> None:
    random = torch.Generator().manual_seed(4)
    shapes = linear_layers(model.spec)
    for slot, rank in enumerate(RANKS):
        pairs = {name: [torch.randn(size, rank, generator=random) for size in shapes[name]] for name in model.adapted}
        model.adapt(slot, AdapterTensors({name: Factors(a.T, 0.1 * b, 0.5) for name, (b, a) in pairs.items()}))


def loaded_by(ops: Ops, architecture: str = "", adapted: bool = False) -> LoadedModel:
    if not architecture:
        model = decoder(ops, torch.float32, room=SlotRoom(len(RANKS), max(RANKS)) if adapted else None, **SHAPE)
        if adapted:
            add_adapters(model)
    else:
        spec = native_spec(architecture, FIELDS[architecture])
        spec = replace(spec, names=replace(spec.names, expert_inputs_first=False))  # only checkpoints store them so
        model = decoder_of(spec, ops, torch.float32)
    return LoadedModel(
        model=model, kv_groups=model.kv_groups, ops=ops, dtype=torch.float32, device=ops.device, vocab_size=VOCAB,
        max_model_len=MAX_LEN, fingerprint="tiny", numerics_id="tiny", batch_invariant=False,
        adapters=FakeAdapters() if adapted else NO_ADAPTERS,
    )  # fmt: skip


def config(**changes: Any) -> WorkerConfig:
    options = {"max_tokens_per_step": MAX_TOKENS} | changes
    return WorkerConfig(block_size=BLOCK, max_rows=MAX_ROWS, num_blocks=NUM_BLOCKS, **options)


def choices() -> list[Choice]:
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(count)] for count, _ in PROMPTS]
    prompts[3] = prompts[1]
    return [Choice(prompt, outputs, GREEDY) for prompt, (_, outputs) in zip(prompts, PROMPTS, strict=True)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The undisturbed result of the reference back end on the host."""
    with torch.inference_mode():
        runner = ModelRunner(loaded_by(reference), NUM_BLOCKS, config())
        return Engine(runner, choices(), random.Random(1)).run()


@pytest.mark.parametrize(
    ("ops", "enforce_eager"),
    [(walking, False), (splitting, False), (splitting, True)],
    ids=["walking", "splitting", "operation by operation"],
)
def test_tokens_are_those_of_the_reference(
    ops: TritonOps, enforce_eager: bool, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    make = accelerator_of if DEVICE.type == "cuda" else lambda device: FakeAccelerator()
    options = config(enforce_eager=enforce_eager)
    runner = runner_on_device(loaded_by(ops), None, options, make, lambda done, of: told.append(done))
    replayed, plain = [], Graphed.replayed
    monkeypatch.setattr(Graphed, "replayed", lambda *step: replayed.append(plain(*step)) or replayed[-1])
    engine = Engine(runner, choices(), random.Random(11), ahead=1, chaos=0.08, chunk_tokens=30)
    assert engine.run() == expected
    assert (engine.errors, set(engine.events)) == ([], {"forked", "moved", "preempted"})
    assert told == ([] if enforce_eager else [1, 2, 3])
    assert sum(step is not None for step in replayed) == (0 if enforce_eager else REPLAYS)
    assert len({token for tokens in expected for token in tokens}) > 7


def test_rows_of_many_adapters_and_of_none_are_replayed_together(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every step the device itself looks up each line's adapter and what it adds."""

    def asked() -> list[Choice]:
        return [replace(one, adapter=adapter) for one, adapter in zip(choices(), ADAPTERS, strict=True)]

    with torch.inference_mode():
        runner = ModelRunner(loaded_by(reference, adapted=True), NUM_BLOCKS, config())
        undisturbed = Engine(runner, asked(), random.Random(1)).run()
    told: list[int] = []
    make = accelerator_of if DEVICE.type == "cuda" else lambda device: FakeAccelerator()
    options, loaded = config(max_tokens_per_step=64), loaded_by(walking, adapted=True)
    runner = runner_on_device(loaded, None, options, make, lambda done, of: told.append(done))
    replayed, plain = [], Graphed.replayed
    monkeypatch.setattr(Graphed, "replayed", lambda *step: replayed.append(plain(*step)) or replayed[-1])
    engine = Engine(runner, asked(), random.Random(11), ahead=1, chaos=0.08, chunk_tokens=30)
    assert engine.run() == undisturbed
    assert (engine.errors, told) == ([], [1, 2, 3, 4, 5, 6])
    assert sum(step is not None for step in replayed) == REPLAYS
    changed = [one != other for one, other in zip(undisturbed, expected, strict=True)]
    assert changed == [True, True, False, True]


@pytest.mark.parametrize("architecture", FIELDS)
def test_steps_are_replayed_that_look_at_what_they_are_given(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every step the device itself looks up a chunk's blocks, its length, and the experts of each token."""
    with torch.inference_mode():
        undisturbed = Engine(
            ModelRunner(loaded_by(reference, architecture), NUM_BLOCKS, config()), choices()[:2], random.Random(1)
        )
        expected = undisturbed.run()
    make = accelerator_of if DEVICE.type == "cuda" else lambda device: FakeAccelerator()
    runner = runner_on_device(loaded_by(walking, architecture), None, config(), make, lambda done, of: None)
    replayed, plain = [], Graphed.replayed
    monkeypatch.setattr(Graphed, "replayed", lambda *step: replayed.append(plain(*step)) or replayed[-1])
    assert Engine(runner, choices()[:2], random.Random(11), ahead=1).run() == expected
    assert sum(step is not None for step in replayed) > 4, "in these a row of chunks begins one"
    assert len({token for tokens in expected for token in tokens}) > 7
