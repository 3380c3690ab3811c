#!/usr/bin/env python3
"""Checks that every schema of a directory is refused with a reason, or every output generated under it is valid.

    git clone https://github.com/guidance-ai/jsonschemabench /tmp/jsb
    python bench/schemas.py /tmp/jsb/data --limit 1000
    python bench/schemas.py /tmp/jsb/data/Glaiveai2K --calls [--random-weights]

For each schema, n outputs are sampled at a high temperature, to exercise everything that the grammar leaves open, and
the `jsonschema` package validates them under the draft that the schema names. Outputs cut short by `--tokens` cannot be
validated and are counted separately, as are invalid schemas, and those that the package cannot read. The exit status is
0 if no output was invalid and every refusal says what it is about.

With `--calls` a schema is that of a function's parameters, and `pagoda serve` must call: one of two functions, or a
named one, in turn; one call or several. Then the outputs are arguments. Their schemas are bounded first, because a
model that samples wildly never ends a string by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx
import jsonschema
import torch
from jsonschema.validators import validator_for
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.stack import Stack, running_stack

from pagoda import AsyncLLM, SamplingParams
from pagoda.tools import checkpoints
from pagoda_proto import grammars
from pagoda_proto.errors import ErrorCode, PagodaError, error_code_from

AT_ONCE = 8
MAX_SCHEMA_BYTES = 96 * 1024
PROMPT = "Answer in JSON:"
SHOWN = 200
NOTHING: dict[str, Any] = {"not": {}}

Schema = dict[str, Any]


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


def chosen(directory: Path, limit: int, seed: int) -> Iterator[tuple[str, Schema]]:
    paths = sorted(directory.rglob("*.json"))
    random.Random(seed).shuffle(paths)
    for path in paths[:limit] if limit else paths:
        if path.stat().st_size <= MAX_SCHEMA_BYTES:
            schema = json.loads(path.read_bytes())
            if isinstance(schema, dict):
                yield str(path.relative_to(directory)), schema


def judge(schema: Schema) -> Any:
    """None if it is not a valid schema."""
    kind = validator_for(schema, jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except (jsonschema.SchemaError, RecursionError, re.error):
        return None
    return kind(schema)


class Output(NamedTuple):
    """`text` should be valid under `schema`, if it is `whole`."""

    text: str
    schema: Schema
    whole: bool


class Asked(Protocol):
    """Generates outputs; each request has a number, which is also its seed."""

    async def outputs(self, schema: Schema, number: int) -> list[Output]:
        """Raises PagodaError if the schema is refused."""


class Forms:
    """The schema describes the answer."""

    def __init__(self, llm: AsyncLLM, params: dict[str, Any]) -> None:
        self._llm = llm
        self._params = params

    async def outputs(self, schema: Schema, number: int) -> list[Output]:
        formed = SamplingParams(grammar=grammars.json_schema(schema), seed=number, **self._params)
        async for output in self._llm.generate(PROMPT, formed):
            last = output
        return [Output(choice.text, schema, choice.finish_reason == "stop") for choice in last.outputs]


class Calls:
    """The schema describes a function's arguments. Strict, so that a schema that cannot be enforced is refused."""

    def __init__(self, client: httpx.AsyncClient, params: dict[str, Any]) -> None:
        self._client = client
        self._params = params

    async def outputs(self, schema: Schema, number: int) -> list[Output]:
        takes = {"f": bounded(schema), "g": {"type": "object", "properties": {"n": {"type": "integer"}}}}
        tools = [
            {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}
            for name, parameters in takes.items()
        ]
        named = {"type": "function", "function": {"name": "f"}}
        body = {
            "messages": [{"role": "user", "content": PROMPT}], "tools": tools, "seed": number,
            "tool_choice": named if number % 2 else "required", "parallel_tool_calls": number % 4 == 0,
        }  # fmt: skip
        answer = await self._client.post("/v1/chat/completions", json=body | self._params)
        if answer.status_code != httpx.codes.OK:
            error = answer.json()["error"]
            raise PagodaError(error_code_from(error["code"]) or ErrorCode.INTERNAL, error["message"])
        expected = {"f": takes["f"]} if number % 2 else takes
        return [output for choice in answer.json()["choices"] for output in _calls(choice, expected)]


def _calls(choice: dict[str, Any], takes: dict[str, Schema]) -> Iterator[Output]:
    """The answer must consist of calls only; anything else is judged by a schema that admits nothing. If an answer is
    cut within a call's name, its beginning appears as text."""
    message, is_cut = choice["message"], choice["finish_reason"] == "length"
    calls = message.get("tool_calls") or []
    if is_cut and (message["content"] or not calls):
        yield Output("", NOTHING, whole=False)
    elif message["content"] or not (is_cut or (calls and choice["finish_reason"] == "tool_calls")):
        yield Output(json.dumps(message), NOTHING, whole=True)
    for place, call in enumerate(calls):
        ended = not is_cut or bool(message["content"]) or place < len(calls) - 1
        yield Output(call["function"]["arguments"], takes.get(call["function"]["name"], NOTHING), ended)


def bounded(schema: Any) -> Any:
    """A copy with bounds on strings, lists and objects that have none."""
    if not isinstance(schema, dict):
        return schema
    told = {
        name: {inner: bounded(part) for inner, part in value.items()}
        if name in grammars.NAMED_SCHEMAS
        else bounded(value)
        for name, value in schema.items()
    }
    kind = told.get("type")
    bounds: dict[Any, Schema] = {
        "string": {} if {"enum", "const", "pattern", "format"} & set(told) else {"maxLength": 12},
        "array": {"maxItems": max(3, told.get("minItems", 0))},
        "object": {"additionalProperties": False} if told.get("properties") else {},
    }
    return bounds.get(kind if isinstance(kind, str) else None, {}) | told


async def check(asked: Asked, name: str, schema: Schema, number: int, tally: Tally) -> None:
    if judge(schema) is None:
        tally.counts["no schema"] += 1
        return
    try:
        outputs = await asked.outputs(schema, number)
    except PagodaError as error:
        tally.refused(error)
        return
    tally.counts["compiled"] += 1
    for output in outputs:
        check_output(name, output, tally)


def check_output(name: str, output: Output, tally: Tally) -> None:
    if not output.whole:
        tally.counts["outputs cut"] += 1
        return
    try:
        problem = next(judge(output.schema).iter_errors(json.loads(output.text)), None)
    except json.JSONDecodeError as error:
        problem = error
    except Exception as error:  # noqa: BLE001 - expressions and references that the judge cannot read
        tally.counts[f"not judged: {type(error).__name__}"] += 1
        return
    tally.counts["outputs invalid" if problem else "outputs valid"] += 1
    if problem:
        told = getattr(problem, "message", str(problem))
        tally.invalid.append(f"{name}: {told[:SHOWN]} -- {output.text[:SHOWN]!r}")


async def check_all(asked: Asked, found: list[tuple[str, Schema]]) -> Tally:
    tally, turns = Tally(), asyncio.Semaphore(AT_ONCE)

    async def one(number: int, name: str, schema: Schema) -> None:
        async with turns:
            await check(asked, name, schema, number, tally)
            done = sum(tally.counts[kind] for kind in ("compiled", "refused", "no schema"))
            if done % 100 == 0:
                print(done, dict(tally.counts), flush=True)

    await asyncio.gather(*(one(i, *pair) for i, pair in enumerate(found)))
    return tally


async def check_forms(model: str, found: list[tuple[str, Schema]], params: dict[str, Any]) -> Tally:
    async with AsyncLLM(model, kv_cache_gib=0.25) as llm:
        return await check_all(Forms(llm, params), found)


async def check_calls(stack: Stack, found: list[tuple[str, Schema]], params: dict[str, Any]) -> Tally:
    async with httpx.AsyncClient(base_url=stack.url, timeout=600) as client:
        return await check_all(Calls(client, params), found)


def with_random_weights(model: str, path: Path) -> str:
    """A copy with the same shape and tokenizer, but random matrices."""
    shutil.copytree(checkpoints.locate(model, ""), path)
    torch.manual_seed(0)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        drawn = {name: torch.randn(t.shape).mul(0.05).to(t.dtype) if t.dim() > 1 else t for name, t in tensors.items()}
        save_file(drawn, file, {"format": "pt"})
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--limit", type=int, default=1000, help="how many schemas, chosen at random; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.5)
    parser.add_argument("--calls", action="store_true", help="schemas are those of functions that must be called")
    parser.add_argument("--random-weights", action="store_true", help="in the shape of the model")
    given = parser.parse_args()
    found = list(chosen(given.directory, given.limit, given.seed))
    params = {"n": given.n, "max_tokens": given.tokens, "temperature": given.temperature}
    with tempfile.TemporaryDirectory(prefix="pagoda-schemas-") as name:
        scratch = Path(name)
        model = with_random_weights(given.model, scratch / "model") if given.random_weights else given.model
        if given.calls:
            with running_stack(scratch, model=model) as stack:
                tally = asyncio.run(check_calls(stack, found, params))
        else:
            tally = asyncio.run(check_forms(model, found, params))
    print(f"{len(found)} schemas:", ", ".join(f"{kind} {count}" for kind, count in sorted(tally.counts.items())))
    for reason, count in tally.reasons.most_common(25):
        print(f"  refused {count:5}: {reason}")
    for told in tally.invalid:
        print("  INVALID", told)
    strange = sum(count for kind, count in tally.counts.items() if kind.startswith("refused as"))
    sys.exit(1 if tally.invalid or strange else 0)


if __name__ == "__main__":
    main()
