#!/usr/bin/env python3
"""Every schema of a directory is refused in words, or every output made under it is valid.

    git clone https://github.com/guidance-ai/jsonschemabench /tmp/jsb
    python bench/schemas.py /tmp/jsb/data --limit 1000

Of each schema, n outputs are sampled at a high temperature, so that whatever the grammar leaves open is tried, and
judged by the `jsonschema` package under the draft that the schema names. Outputs that `--tokens` cut short cannot be
judged and are counted apart, as are schemas that are none, or that the judge itself cannot read. The exit status is 0
if no output was invalid and every refusal says what it is about.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema.validators import validator_for

from pagoda import AsyncLLM, SamplingParams
from pagoda_proto import grammars
from pagoda_proto.errors import ErrorCode, PagodaError

AT_ONCE = 8
MAX_SCHEMA_BYTES = 96 * 1024
PROMPT = "Answer in JSON:"
SHOWN = 200


class Tally:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.invalid: list[str] = []

    def refused(self, error: PagodaError) -> None:
        self.counts["refused"] += 1
        self.reasons[re.sub(r"^.*?(?=/|Unimpl|Unsat|[A-Z])", "", error.message, count=1)[:70]] += 1
        if error.code is not ErrorCode.INVALID_ARGUMENT:
            self.counts[f"refused as {error.code}"] += 1


def chosen(directory: Path, limit: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    paths = sorted(directory.rglob("*.json"))
    random.Random(seed).shuffle(paths)
    for path in paths[:limit] if limit else paths:
        if path.stat().st_size <= MAX_SCHEMA_BYTES:
            schema = json.loads(path.read_bytes())
            if isinstance(schema, dict):
                yield str(path.relative_to(directory)), schema


def judge(schema: dict[str, Any]) -> Any:
    """None for what is no schema."""
    kind = validator_for(schema, jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except (jsonschema.SchemaError, RecursionError, re.error):
        return None
    return kind(schema)


async def check(llm: AsyncLLM, name: str, schema: dict[str, Any], params: dict[str, Any], tally: Tally) -> None:
    validator = judge(schema)
    if validator is None:
        tally.counts["no schema"] += 1
        return
    try:
        formed = SamplingParams(grammar=grammars.json_schema(schema), **params)
        async for output in llm.generate(PROMPT, formed):
            last = output
    except PagodaError as error:
        tally.refused(error)
        return
    tally.counts["compiled"] += 1
    for choice in last.outputs:
        if choice.finish_reason != "stop":
            tally.counts["outputs cut"] += 1
            continue
        try:
            problem = next(validator.iter_errors(json.loads(choice.text)), None)
        except json.JSONDecodeError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - expressions and references that the judge cannot read
            tally.counts[f"not judged: {type(error).__name__}"] += 1
            continue
        tally.counts["outputs invalid" if problem else "outputs valid"] += 1
        if problem:
            told = getattr(problem, "message", str(problem))
            tally.invalid.append(f"{name}: {told[:SHOWN]} -- {choice.text[:SHOWN]!r}")


async def check_all(model: str, found: list[tuple[str, dict[str, Any]]], params: dict[str, Any]) -> Tally:
    tally, turns = Tally(), asyncio.Semaphore(AT_ONCE)
    async with AsyncLLM(model, kv_cache_gib=0.25) as llm:

        async def one(index: int, name: str, schema: dict[str, Any]) -> None:
            async with turns:
                await check(llm, name, schema, params | {"seed": index}, tally)
                done = sum(tally.counts[kind] for kind in ("compiled", "refused", "no schema"))
                if done % 100 == 0:
                    print(done, dict(tally.counts), flush=True)

        await asyncio.gather(*(one(i, *pair) for i, pair in enumerate(found)))
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--limit", type=int, default=1000, help="how many schemas, chosen at random; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.5)
    given = parser.parse_args()
    found = list(chosen(given.directory, given.limit, given.seed))
    params = {"n": given.n, "max_tokens": given.tokens, "temperature": given.temperature}
    tally = asyncio.run(check_all(given.model, found, params))
    print(f"{len(found)} schemas:", ", ".join(f"{kind} {count}" for kind, count in sorted(tally.counts.items())))
    for reason, count in tally.reasons.most_common(25):
        print(f"  refused {count:5}: {reason}")
    for told in tally.invalid:
        print("  INVALID", told)
    strange = sum(count for kind, count in tally.counts.items() if kind.startswith("refused as"))
    sys.exit(1 if tally.invalid or strange else 0)


if __name__ == "__main__":
    main()
