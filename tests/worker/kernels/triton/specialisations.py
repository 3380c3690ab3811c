"""Run by test_specialisations in a process without the interpreter: finds the kernel variants that steps ask for.

Nothing is compiled or run: every launch stops once Triton knows the variant that would serve it. Prints a line per
variant that some step needs and the warm-up steps did not compile.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.worker.checkpoints.formats.sources import PlainSource
from tests.worker.fakes_accelerator import FakeAccelerator
from tests.worker.fakes_spec import spec_of
from tests.worker.kernels.triton.launches import CPU, Driver
from tests.worker.models.harness import make_batch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.spec import MoeShape, expected_tensors
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.ops import SlotRoom
from pagoda_worker.kernels.routing import Routing
from pagoda_worker.kernels.triton.ops import TritonKVCache, TritonOps
from pagoda_worker.kernels.triton.plan import Tiles
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.rows.batch import Batch
from pagoda_worker.rows.slots import NO_ADAPTER, TokenSlots
from pagoda_worker.step.feeding import uploaded
from pagoda_worker.step.profiling import adapted, mixed_steps

SPEC = spec_of(
    vocab_size=512, hidden_size=128, intermediate_size=192, num_heads=4, num_kv_heads=2, head_dim=32, norm_eps=1e-6,
    max_positions=2048, ropes=(RopeShape(theta=1e4, head_dim=32),), rope_of_layer=(0, 0), windows=(None, 64),
    attention_scale=0.2,
)  # fmt: skip
ROUTING = Routing(experts=8, chosen=3, renormalised=True)
SPEC = replace(SPEC, layers=(*SPEC.layers, replace(SPEC.layers[0], mlp=MoeShape(routing=ROUTING, width=96))))
seen: set[str] = set()


def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    _, _, _, _, binder = self.device_caches[0]
    _, specialisation, rest = binder(*args, debug=False, instrumentation_mode="", **options)
    seen.add(f"{self.__name__} {specialisation} {rest}")


def steps(rng: random.Random) -> list[Batch]:
    found = []
    for _ in range(60):
        rows = []
        for _ in range(rng.randint(1, 9)):
            new = rng.choice([1, 1, 1, rng.randint(2, 400)])
            context = new + rng.choice([0, rng.randint(0, 300)])
            rows.append(([1] * new, context - new, list(range(-(-context // 32)))))
        batch = make_batch(rows, 32)
        slots = np.repeat([rng.randrange(NO_ADAPTER, 3) for _ in rows], batch.query_lens).astype(np.int32)
        found.append(batch)
        if rng.random() < 0.5:
            of_tokens, of_logits = (TokenSlots(one, CPU) for one in (slots, slots[batch.logit_indices.numpy()]))
            found[-1] = replace(batch, slots=of_tokens, logit_slots=of_logits)
    return found


def run(model: Decoder, batch: Batch, kv: list[TritonKVCache]) -> None:
    there = uploaded(batch, FakeAccelerator())
    model.logits(model.forward(there, kv)[there.logit_indices], slots=there.logit_slots)


if __name__ == "__main__":
    driver.set_active(Driver(90))
    JITFunction.run = recorded  # type: ignore[method-assign]
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in expected_tensors(SPEC).items()}
    for fill in (0, 10**6):
        ops = TritonOps(CPU, Tiles(fill=fill))
        source, room = PlainSource(weights.__getitem__), SlotRoom(3, 8)
        model = Decoder(SPEC, ops, source, torch.bfloat16, SPEC.max_positions, room=room)
        kv = [ops.new_kv_cache(group, 32, 32) for group in model.kv_groups]
        seen.clear()
        with torch.inference_mode():
            for batch in mixed_steps(WorkerConfig(block_size=32), 2048):
                run(model, adapted(batch), kv)
            warm = set(seen)
            for batch in steps(random.Random(fill)):
                run(model, batch, kv)
        print("\n".join(sorted(seen - warm)), end="")
    assert warm
