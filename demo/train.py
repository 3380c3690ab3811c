"""Trains the demo model from scratch: `python -m demo.train --out DIR --minutes N`.

The budget is wall-clock time: the learning rate falls to zero over it, so a slow machine
ends with a less trained but equally annealed model. An interrupted run goes on from its
last checkpoint when started again with the same `--work` directory.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.export import export_model, verify_export
from demo.model import ModelConfig, TinyLlama, rope_tables
from demo.packing import Batch, Document, DocumentSource, pack
from demo.tasks import evaluation_example
from demo.tokenizer import VOCAB_SIZE, build_tokenizer

LossFunction = Callable[[Batch], Tensor]
WARMUP_STEPS, FLAT_SHARE = 100, 0.3
LOG_EVERY, PROBE_EVERY, CHECKPOINT_SECONDS = 50, 20, 240.0


@dataclass
class Progress:
    """What a resumed run needs to know besides the weights."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def make_optimizers(model: TinyLlama, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    # match_rms_adamw scales Muon's updates so that one learning rate fits both.
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def lr_factor(step: int, share: float) -> float:
    """Warm-up by steps, then flat, then linear to zero by the share of the budget used."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * min(1.0, max(0.0, 1.0 - share) / (1.0 - FLAT_SHARE))


class ThreadChooser:
    """Picks the thread count with the shortest recent step, trying the others now and then.

    On a shared machine a second thread that has to wait for its core stalls every parallel
    region, so that one thread alone is several times faster than two.
    """

    def __init__(self, most: int) -> None:
        self._seconds = dict.fromkeys(range(1, most + 1), 0.0)
        self._trials: list[int] = []

    def choose(self, step: int) -> int:
        """The thread count for the coming step."""
        if step % PROBE_EVERY == 0:
            self._trials = 2 * list(self._seconds)
        best = min(self._seconds, key=lambda count: self._seconds[count])
        count = self._trials.pop() if self._trials else best
        torch.set_num_threads(count)
        return count

    def record(self, count: int, seconds: float) -> None:
        # The mean with what was known smooths out what other processes do meanwhile.
        self._seconds[count] = (self._seconds[count] + seconds) / 2


def make_loss(model: TinyLlama, length: int) -> LossFunction:
    """Weighted cross entropy of a packed batch, in bf16 with fp32 weights and softmax."""
    cos, sin = (table.bfloat16() for table in rope_tables(model.config, length))

    def forward(ids: Tensor, targets: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, mask, cos, sin)
        each = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        flat = weights.flatten()
        return (each * flat).sum() / flat.sum()

    return lambda batch: forward(batch.ids, batch.targets, batch.weights, batch.mask)


class Trainer:
    """Model, optimizers and progress of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        self.tokenizer = build_tokenizer()
        self.model = TinyLlama(ModelConfig(VOCAB_SIZE))
        self.optimizers = make_optimizers(self.model, args.lr)
        self.progress = Progress()
        self.checkpoint = args.work / "checkpoint.pt"
        if self.checkpoint.exists():
            self._resume()
        self.loss = make_loss(self.model, args.length)

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        print(f"resumed at step {self.progress.step}", flush=True)

    def save(self) -> None:
        """Replaces the checkpoint atomically, and exports the model as it is now."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": vars(self.progress),
        }
        fresh = self.checkpoint.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self.checkpoint)
        export_model(self.model, self.tokenizer, self.args.out)

    def documents(self) -> Iterator[Document]:
        # A resumed run draws fresh conversations instead of repeating the first ones.
        seed = self.args.seed + self.progress.step
        return iter(DocumentSource(self.tokenizer, self.args.length, seed))

    def step(self, documents: Iterator[Document]) -> float:
        """One optimizer step on a fresh batch; returns the loss."""
        batch = pack(documents, self.args.rows, self.args.length, torch.bfloat16)
        factor = lr_factor(self.progress.step, self.progress.seconds / (self.args.minutes * 60))
        loss = self.loss(batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.args.lr * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += int((batch.weights > 0).sum())
        return loss.item()

    def run(self) -> None:
        """Steps until the time budget is used up."""
        documents, progress = self.documents(), self.progress
        threads = ThreadChooser(self.args.threads)
        started, already = time.monotonic(), progress.seconds
        saved, total = started, 0.0
        while progress.seconds < self.args.minutes * 60:
            count, before = threads.choose(progress.step), time.monotonic()
            total += self.step(documents)
            threads.record(count, time.monotonic() - before)
            progress.seconds = already + time.monotonic() - started
            if progress.step % LOG_EVERY == 0:
                speed = progress.tokens / progress.seconds
                print(
                    f"step {progress.step} loss {total / LOG_EVERY:.4f} "
                    f"{progress.seconds:.0f} s {speed:.0f} tokens/s, {count} threads",
                    flush=True,
                )
                total = 0.0
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="where the model is exported to")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall-clock budget")
    parser.add_argument("--work", type=Path, default=Path("demo_train"), help="checkpoints")
    parser.add_argument("--rows", type=int, default=12, help="sequences per batch")
    parser.add_argument("--length", type=int, default=320, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="at most")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    trainer.run()
    rng = random.Random(0)
    for task in ("smalltalk", "tool_answer"):
        difference = verify_export(trainer.model, args.out, evaluation_example(rng, task))
        print(f"largest logit difference to transformers ({task}): {difference:.2g}")
        if difference > 1e-3:
            raise SystemExit("the exported model differs from the trained one")


if __name__ == "__main__":
    main()
