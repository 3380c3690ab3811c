#!/usr/bin/env python3
"""Tokens per step with draft tokens from suffixes, on recorded traces.

    python bench/drafts.py [--max-drafts 8] [--chats 200]

A draft is accepted if it is the trace's next token, as under greedy decoding, so no model runs, except for the last
trace: the demo model's answers to held-out conversations. The others are made from this repository's files: each
rewritten with a name changed; rewritten three times without being in the prompt; as a diff; tool calls; documents.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from pagoda import LLM, SamplingParams
from pagoda_proto.params import SamplingParams as Params
from pagoda_proto.steps import Chunk, NewRow
from pagoda_worker.rows.rows import Row
from pagoda_worker.speculation.drafting import Drafter
from pagoda_worker.speculation.suffixes import SuffixLookup

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "services" / "pagoda" / "demo_model"
CHARACTERS = 4000  # used of a file
PROMPT_STEP = 2048
Said = tuple[str, str]
Trace = Sequence[tuple[Sequence[int], Sequence[int]]]


@dataclass
class Count:
    """Counts over all steps except prefill."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    held: int = 0
    seconds: float = 0.0

    def told(self) -> dict[str, float]:
        return {
            "tokens_per_step": round(self.tokens / self.steps, 2),
            "computed_per_token": round((self.steps + self.drafted) / self.tokens, 2),
            "held": round(self.held / max(1, self.drafted), 2),
            "us_per_step": round(1e6 * self.seconds / self.steps),
        }


def measure(drafter: Drafter, trace: Trace, domain: str | None = "") -> Count:
    """Replay the trace's prompts and outputs, one after the other."""
    count = Count()
    for number, (prompt, output) in enumerate(trace):
        tokens = np.array(prompt, np.int64)
        new = NewRow(
            row_id=number, token_ids=[], num_prompt_tokens=len(prompt), num_computed=0, block_ids=[], params=Params(),
            seed=0, domain=domain,
        )  # fmt: skip
        row = Row.of(new, tokens, np.zeros(0, np.int64))
        for start in range(0, len(prompt), PROMPT_STEP):
            drafter.draft([(row, Chunk(number, start, min(PROMPT_STEP, len(prompt) - start), False))])
        _follow(drafter, row, output, count)
    return count


def _follow(drafter: Drafter, row: Row, output: Sequence[int], count: Count) -> None:
    row.append(output[0])
    wanted, at = drafter.learn(row, 0, 0), 1
    while at < len(output):
        began = time.perf_counter()
        drafts = drafter.draft([(row, Chunk(row.row_id, len(row.tokens) - 1, 1, True, wanted))]).get(row.row_id, [])
        pairs = zip(drafts, output[at:], strict=False)
        held = next((i for i, (draft, said) in enumerate(pairs) if draft != said), min(len(drafts), len(output) - at))
        new = output[at : at + held + 1]
        for token in new:
            row.append(token)
        wanted = drafter.learn(row, len(drafts), held)
        count.seconds += time.perf_counter() - began
        count.tokens, count.steps = count.tokens + len(new), count.steps + 1
        count.drafted, count.held = count.drafted + len(drafts), count.held + held
        at += len(new)


def _files(rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yields a file's name, its text, and an identifier in it."""
    for path in sorted((ROOT / "worker" / "pagoda_worker").glob("[rs]*/*.py")):
        text = path.read_text(encoding="utf-8")[:CHARACTERS]
        names = sorted({name for name in re.findall(r"\b[a-z_]{5,}\b", text) if text.count(name) > 2})
        if names:
            yield path.name, text, rng.choice(names)


def edits(rng: random.Random) -> list[Said]:
    return [(f"rename {name}\n{text}", text.replace(name, f"{name}_new")) for _, text, name in _files(rng)]


def again(rng: random.Random) -> list[Said]:
    """The same file in three answers, each time with a different name changed."""
    files = [[*_files(rng)][:10] for _ in range(3)]
    return [
        (f"write {file} with {name} renamed\n", text.replace(name, f"{name}_v{i}"))
        for versions in zip(*files, strict=True)
        for i, (file, text, name) in enumerate(versions)
    ]


def diffs(rng: random.Random) -> list[Said]:
    found = []
    for _, text, name in _files(rng):
        hunks = []
        lines = text.splitlines()
        for at in [i for i, line in enumerate(lines) if name in line and 2 < i < len(lines) - 3]:
            near = [f" {line}" for line in lines[at - 3 : at]], [f" {line}" for line in lines[at + 1 : at + 4]]
            changed = [f"-{lines[at]}", f"+{lines[at].replace(name, name + '_new')}"]
            hunks += [f"@@ -{at - 2},7 +{at - 2},7 @@", *near[0], *changed, *near[1]]
        found += [(f"rename {name}, as a diff\n{text}", "\n".join(hunks))] if hunks else []
    return found


def calls(rng: random.Random) -> list[Said]:
    found, files = [], [file for file, *_ in _files(rng)]
    for step in range(60):
        tool, file, limit = (
            rng.choice(["read_file", "list_directory", "search"]),
            rng.choice(files),
            rng.choice([9, 99]),
        )
        call = {"name": tool, "arguments": {"path": f"worker/{file}", "limit": limit, "recursive": False}}
        found.append((f"step {step}: {tool} {file}\n", f"<tool_call>\n{json.dumps(call)}\n</tool_call>"))
    return found


def prose(rng: random.Random) -> list[Said]:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return [("go on\n", text[start : start + 1500]) for start in range(0, len(text), 1500)]


def chats(count: int) -> Trace:
    """The demo model's answers to conversations that it was not trained on."""
    from demo.evaluate import make_examples
    from demo.tasks import TASKS

    examples = make_examples(sorted(TASKS), -(-count // len(TASKS)), 5)[:count]
    random.Random(5).shuffle(examples)
    with LLM(str(MODEL)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=200)
        answers = [llm.chat(one.messages, params, tools=one.tools or None, use_tqdm=False)[0] for one in examples]
    return [(answer.prompt_token_ids, answer.outputs[0].token_ids) for answer in answers]


MADE: tuple[Callable[[random.Random], list[Said]], ...] = (edits, again, diffs, calls, prose)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-drafts", type=int, default=8)
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    encode = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode
    traces: dict[str, Trace] = {
        make.__name__: [(encode(asked).ids, encode(said).ids) for asked, said in make(random.Random(3))]
        for make in MADE
    }
    traces["chats"] = chats(arguments.chats)
    most, found = arguments.max_drafts, {}
    for name, trace in traces.items():
        found[name] = {
            "suffix": measure(SuffixLookup(most), trace).told(),
            "suffix, own text": measure(SuffixLookup(most), trace, None).told(),
        }
        for way, told in found[name].items():
            print(f"{name:6} {way:17}" + "".join(f" {value:8} {unit}" for unit, value in told.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
