"""Measures the demo model's accuracy per task on held-out conversations.

Through a server:  python -m demo.evaluate --base-url http://127.0.0.1:8000/v1
Without one:       python -m demo.evaluate --local services/pagoda/demo_model
Decoding is greedy. Exits with 1 if a task with a bar falls below it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from demo.schema import Example
from demo.scoring import (
    BARS,
    Call,
    Outcome,
    Reply,
    accuracies,
    below_bar,
    judge,
    message_calls,
    parse_reply,
)
from demo.tasks import TASKS, evaluation_example

MAX_TOKENS = 400
LOCAL_BATCH = 25


def make_examples(tasks: list[str], samples: int, seed: int) -> list[Example]:
    """The same examples for the same seed, each task independent of the others."""
    examples = []
    for task in tasks:
        rng = random.Random(f"{seed}:{task}")
        examples += [evaluation_example(rng, task) for _ in range(samples)]
    return examples


async def ask_server(client: Any, model: str, example: Example) -> Reply:
    """One greedy chat completion; a failed request counts as a wrong answer."""
    import openai

    tools = {"tools": example.tools} if example.tools else {}
    try:
        completion = await client.chat.completions.create(
            model=model,
            messages=example.messages,
            temperature=0,
            max_tokens=MAX_TOKENS,
            **tools,
        )
    except openai.OpenAIError as error:
        return Reply(f"[{type(error).__name__}: {error}]")
    message = completion.choices[0].message
    calls: list[Call] = message_calls(message.model_dump())
    return Reply(message.content or "", calls)


async def evaluate_server(examples: list[Example], base_url: str, model: str | None, concurrency: int) -> list[Outcome]:
    """Asks an OpenAI-compatible server, `concurrency` requests at a time."""
    from openai import AsyncOpenAI

    gate = asyncio.Semaphore(concurrency)
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        name = model or (await client.models.list()).data[0].id

        async def one(example: Example) -> Outcome:
            async with gate:
                return judge(example, await ask_server(client, name, example))

        return list(await asyncio.gather(*map(one, examples)))


def evaluate_local(examples: list[Example], folder: Path) -> list[Outcome]:
    """Generates with transformers, in left-padded batches."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outcomes = []
    for start in range(0, len(examples), LOCAL_BATCH):
        batch = examples[start : start + LOCAL_BATCH]
        prompts = [
            tokenizer.apply_chat_template(e.messages, tools=e.tools or None, tokenize=False, add_generation_prompt=True)
            for e in batch
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            output = model.generate(
                input_ids=inputs.input_ids,
                attention_mask=inputs.attention_mask,
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
            )
        fresh = output[:, inputs.input_ids.shape[1] :]
        texts = tokenizer.batch_decode(fresh, skip_special_tokens=True)
        outcomes += [judge(e, parse_reply(t)) for e, t in zip(batch, texts, strict=True)]
    return outcomes


def report(outcomes: list[Outcome], failures: int) -> list[str]:
    """Prints a table, some failures and a line of JSON; returns the tasks below their bar."""
    results = accuracies(outcomes)
    print(f"{'task':<22}{'correct':>9}{'samples':>9}{'accuracy':>10}{'bar':>7}")
    for task, (correct, total) in results.items():
        bar = f"{BARS[task]:.0%}" if task in BARS else "-"
        print(f"{task:<22}{correct:>9}{total:>9}{correct / total:>10.1%}{bar:>7}")
    wrong = [outcome for outcome in outcomes if not outcome.correct]
    shown: dict[str, int] = {}
    for outcome in wrong:
        shown[outcome.task] = shown.get(outcome.task, 0) + 1
        if shown[outcome.task] <= failures:
            print(f"wrong {outcome.task}: {outcome.question!r}")
            print(f"  expected {outcome.expected!r}, got {outcome.got!r}")
    missed = below_bar(results)
    summary = {
        "accuracy": {task: correct / total for task, (correct, total) in results.items()},
        "samples": {task: total for task, (_, total) in results.items()},
        "below_bar": missed,
    }
    print(json.dumps(summary))
    return missed


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", help="of an OpenAI-compatible server, ending in /v1")
    where.add_argument("--local", type=Path, help="folder of an exported model")
    parser.add_argument("--model", help="model name for the server; default: its first one")
    parser.add_argument("--samples", type=int, default=100, help="per task")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--failures", type=int, default=2, help="wrong answers shown per task")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    examples = make_examples(args.tasks, args.samples, args.seed)
    if args.local is not None:
        outcomes = evaluate_local(examples, args.local)
    else:
        run = evaluate_server(examples, args.base_url, args.model, args.concurrency)
        outcomes = asyncio.run(run)
    if report(outcomes, args.failures):
        sys.exit(1)


if __name__ == "__main__":
    main()
