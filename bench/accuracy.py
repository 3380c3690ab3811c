#!/usr/bin/env python3
"""Measures what weights of fewer bits cost in accuracy.

    python bench/accuracy.py tasks [--samples 100]
    python bench/accuracy.py divergence MODEL [--text FILE] [--reference DIR]

`tasks`: the bundled demo model's exact-match accuracy per task, offline and greedy, for every weight format, on the
same held-out examples. `divergence`: for any checkpoint, compares the next-token distributions of each format with
those of the reference (the checkpoint as stored, unless another directory is named), after every token of the same
sequences: mean KL(reference || format) in nats, and how often the most probable token is the same. Sequences are pieces
of a text file, or uniformly random token ids, which say more about a network's arithmetic than about its use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from demo.evaluate import MAX_TOKENS, make_examples
from demo.schema import Example
from demo.scoring import Outcome, accuracies, judge, parse_reply
from demo.tasks import TASKS

from pagoda import LLM, SamplingParams
from pagoda.tools import checkpoints
from pagoda_gateway.text.model_text import ModelText
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.config import QUANTIZATIONS, WorkerConfig
from pagoda_worker.loading.model import LoadedModel, load_model
from pagoda_worker.rows.batch import Batch

STORED = "as stored"
BLOCK_SIZE = 32
HEAD_ROWS = 64  # positions whose logits are in memory at once


def option(name: str) -> str:
    return "" if name == STORED else name


def task_accuracies(name: str, examples: list[Example], options: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """task -> (correct, total)"""
    text = ModelText.load(checkpoints.locate(""))
    prompts = [text.encode_chat(one.messages, tools=one.tools or None) for one in examples]
    with LLM(quantization=option(name), **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    outcomes: list[Outcome] = [
        judge(example, parse_reply(output.outputs[0].text)) for example, output in zip(examples, outputs, strict=True)
    ]
    return accuracies(outcomes)


def print_tasks(args: argparse.Namespace) -> None:
    examples = make_examples(args.tasks, args.samples, args.seed)
    columns = {name: task_accuracies(name, examples, {"kernels": args.kernels}) for name in args.formats}
    print(f"{'task':<22}" + "".join(f"{name:>12}" for name in columns))
    for task in args.tasks:
        shares = [column[task][0] / column[task][1] for column in columns.values()]
        print(f"{task:<22}" + "".join(f"{share:>12.1%}" for share in shares))
    totals = [sum(c for c, _ in column.values()) / sum(t for _, t in column.values()) for column in columns.values()]
    print(f"{'all':<22}" + "".join(f"{share:>12.1%}" for share in totals))


def log_probabilities(model: LoadedModel, token_ids: list[int]) -> Iterator[torch.Tensor]:
    """Yields [R, V] float32, a few positions at a time, for every token of one row."""
    count, places = len(token_ids), torch.arange(len(token_ids), device=model.device)
    num_blocks = -(-count // BLOCK_SIZE)
    batch = Batch(
        token_ids=torch.tensor(token_ids, device=model.device),
        positions=places,
        kv_indices=places,
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=model.device)[None],
        query_starts=[0, count],
        query_lens=[count],
        context_lens=[count],
        logit_indices=places,
    )
    hidden = model.model.forward(batch, model.new_kv_cache(num_blocks, BLOCK_SIZE)).clone()
    for rows in torch.split(hidden, HEAD_ROWS):
        yield model.model.logits(rows).log_softmax(-1)


def divergence(reference: LoadedModel, other: LoadedModel, sequences: list[list[int]]) -> tuple[float, float, int]:
    """(mean KL divergence in nats, share of equal most probable tokens, positions)"""
    total, agreed, count = 0.0, 0, 0
    with torch.inference_mode():
        for ids in sequences:
            both = zip(log_probabilities(reference, ids), log_probabilities(other, ids), strict=True)
            for expected, got in both:
                total += float((expected.exp() * (expected - got)).sum(-1, dtype=torch.float64).sum())
                agreed += int((expected.argmax(-1) == got.argmax(-1)).sum())
                count += len(got)
    return total / count, agreed / count, count


def make_sequences(args: argparse.Namespace, path: Path, vocab_size: int) -> list[list[int]]:
    if args.text is None:
        generator = torch.Generator().manual_seed(args.seed)
        return torch.randint(vocab_size, (args.sequences, args.length), generator=generator).tolist()  # type: ignore[no-any-return]
    ids = ModelText.load(path).encode(args.text.read_text())
    pieces = [ids[start : start + args.length] for start in range(0, len(ids), args.length)]
    return pieces[: args.sequences]


def print_divergence(args: argparse.Namespace) -> None:
    path = checkpoints.locate(args.model)
    reference_path = checkpoints.locate(args.reference) if args.reference else path
    config = {"dtype": args.dtype, "kernels": args.kernels, "max_model_len": args.length, "fallback": False}
    reference = load_model(WorkerConfig(model=str(reference_path), **config))
    sequences = make_sequences(args, reference_path, reference.vocab_size)
    print(f"{'weights':<12}{'mean KL, nats':>15}{'same top-1':>12}{'positions':>11}  kernels")
    for name in args.formats:
        if name == STORED and reference_path == path:
            continue
        try:
            model = load_model(WorkerConfig(model=str(path), quantization=option(name), **config))
        except UnsupportedConfig as error:
            print(f"{name:<12}{error}")
            continue
        mean, agreement, count = divergence(reference, model, sequences)
        print(f"{name:<12}{mean:>15.5f}{agreement:>12.1%}{count:>11}  {model.ops.name}", flush=True)


def parse_args() -> argparse.Namespace:
    formats = [name or STORED for name in QUANTIZATIONS]
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--formats", nargs="+", choices=formats, default=formats)
    common.add_argument("--kernels", default="auto")
    common.add_argument("--seed", type=int, default=7)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parts = parser.add_subparsers(dest="part", required=True)
    tasks = parts.add_parser("tasks", parents=[common])
    tasks.add_argument("--samples", type=int, default=100, help="per task")
    tasks.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    tasks.set_defaults(run=print_tasks)
    diverge = parts.add_parser("divergence", parents=[common])
    diverge.add_argument("model", nargs="?", default="", help="directory or hub id; default: the demo model")
    diverge.add_argument("--reference", default="", help="another checkpoint that counts as exact, not quantised")
    diverge.add_argument("--dtype", default="auto")
    diverge.add_argument("--text", type=Path, help="file whose pieces are the sequences")
    diverge.add_argument("--sequences", type=int, default=8)
    diverge.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    diverge.set_defaults(run=print_divergence)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
