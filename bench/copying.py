#!/usr/bin/env python3
"""Makes a workload whose answers repeat earlier text, to measure what suffix drafts gain.

    python bench/copying.py MODEL --out copy.jsonl

A model with random weights does not follow instructions, so it cannot be asked to copy. Instead, many random prompts P
are continued greedily to P + G. The beginning of that text becomes the prompt, and greedy decoding then yields the
known rest. The texts kept are those whose rest repeats earlier text to about the wanted share; the actual share is
printed, and must be quoted with every figure measured. Many models fall into loops, a share of 100 %, and some never
do: for those there is no such workload, and the share printed is about 0. (P + G + P does not make the model repeat G:
the second time it says something else.) The first tokens of an answer must be whole characters, because its first event
has to come with the first token.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.workloads import CONTINUED, WORKLOADS

from pagoda.bench.workload import WorkloadRow, write_rows

if TYPE_CHECKING:
    from pagoda.offline.llm import LLM

SEED_TOKENS = 64  # length of a random prompt
FIRST_TOKENS = 4  # tokens at the start of an answer that must be whole characters
LOOKUP = 2  # tokens that must match for their continuation to be proposed


def copied_share(before: Sequence[int], text: Sequence[int], length: int = LOOKUP) -> float:
    """The share of `text` predicted correctly by the latest earlier occurrence of the same `length` tokens."""
    tokens = list(before)
    followers = {tuple(tokens[i - length : i]): i for i in range(length, len(tokens))}
    hits = 0
    for token in text:
        key = tuple(tokens[-length:])
        place = followers.get(key)
        hits += place is not None and tokens[place] == token
        followers[key] = len(tokens)
        tokens.append(token)
    return hits / len(text)


def choose(texts: Sequence[list[int]], prompt_len: int, count: int, wanted: float) -> list[tuple[float, list[int]]]:
    """The `count` texts whose rest after `prompt_len` tokens repeats to a share nearest `wanted`, with that share."""
    shares = [(copied_share(text[:prompt_len], text[prompt_len:]), text) for text in texts]
    return sorted(shares, key=lambda pair: abs(pair[0] - wanted))[:count]


def begins_whole(llm: LLM, tokens: Sequence[int]) -> bool:
    """Whether each of these tokens is text by itself."""
    return all(llm.decode([token]).strip("\ufffd") for token in tokens)


def make_texts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Random prompts with their greedy continuations, `length` tokens in total."""
    from pagoda import SamplingParams

    rng, ids = random.Random(0), range(min(100, llm.vocab_size // 2), llm.vocab_size)
    prompts = [[rng.choice(ids) for _ in range(SEED_TOKENS)] for _ in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=length - SEED_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    return [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]


def main() -> None:
    workload = WORKLOADS["copy-1"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a checkpoint; '' is the bundled demo model")
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file for `pagoda bench serve --workload`")
    parser.add_argument("--texts", type=int, default=24, help="to choose from [%(default)s]")
    parser.add_argument("--share", type=float, default=0.8, help="of an answer that repeats, about [%(default)s]")
    parser.add_argument("--requests", type=int, default=workload.requests, help="[%(default)s]")
    parser.add_argument("--prompt-len", type=int, default=CONTINUED, help="[%(default)s]")
    parser.add_argument("--output-len", type=int, default=workload.output_len, help="[%(default)s]")
    arguments = parser.parse_args()
    length = arguments.prompt_len + arguments.output_len
    from pagoda import LLM

    with LLM(arguments.model, max_model_len=length, kv_cache_gib=1.0) as llm:
        begin, end = arguments.prompt_len, arguments.prompt_len + FIRST_TOKENS
        texts = [text for text in make_texts(llm, arguments.texts, length) if begins_whole(llm, text[begin:end])]
        chosen = choose(texts, arguments.prompt_len, arguments.requests, arguments.share)
    if not chosen:
        raise SystemExit("copying.py: no answer begins with text; try more --texts")
    rows = [
        WorkloadRow(
            prompt_tokens=arguments.prompt_len, output_tokens=arguments.output_len, prompt=text[: arguments.prompt_len]
        )
        for _, text in chosen
    ]
    write_rows(rows, arguments.out)
    shares = [round(share, 3) for share, _ in chosen]
    print(json.dumps({"copied_share": sum(shares) / len(shares), "of_each": shares}))


if __name__ == "__main__":
    main()
