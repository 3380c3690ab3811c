#!/usr/bin/env python3
"""What a JSON schema costs, and what it gains by forcing tokens, on the real stack.

    python bench/structured.py [MODEL] [--vocab 128000] [--clients 1,4,16] [--tokens 128] [--rounds 5]
    python bench/structured.py MODEL --peer http://127.0.0.1:8100         # another server that serves MODEL

Three sides take turns: `free` (no schema), `masked` (a schema, no drafts), `forced` (a schema as served by default,
where tokens that the grammar forces are draft tokens). One server serves `free` and `forced`; another, without drafts,
`masked`. `--peer` adds two: `peer free` and `peer`, without and with the schema. Every answer has exactly `--tokens`
sampled tokens: the schema is a list too long to end. Figures are output tokens per second of all clients together, as
ratios within a round: the median over rounds, and the smallest and largest.

Without MODEL, a model of random weights in the shape of a 135M Llama with `--vocab` tokens is made for the run; for a
peer, make it with `bench/make_model.py b135m MODEL --vocab 128000`. Random weights fill a schema with noise, so fewer
of their tokens are forced than of a trained model's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.make_model import write_model
from tests.e2e.stack import running_stack

LINE = {"type": "string", "maxLength": 24}
SCHEMA = {
    "type": "array", "minItems": 1000,
    "items": {
        "type": "object", "additionalProperties": False, "required": ["name", "occupation", "age", "address"],
        "properties": {
            "name": LINE,
            "occupation": {"enum": ["engineer", "teacher", "physician", "carpenter"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "address": {
                "type": "object", "additionalProperties": False, "required": ["street", "city"],
                "properties": {"street": LINE, "city": LINE},
            },
        },
    },
}  # fmt: skip
FREE = {"ignore_eos": True}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA}}}
RATIOS = (("masked", "free"), ("forced", "masked"), ("forced", "free"), ("peer", "peer free"), ("forced", "peer"))


class Side(NamedTuple):
    url: str
    form: dict[str, Any]


async def rate(side: Side, clients: int, tokens: int, seed: int) -> float:
    """Output tokens per second of `clients` concurrent requests."""
    async with httpx.AsyncClient(base_url=side.url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def one(i: int) -> int:
            prompt = [40 + (seed * 31 + i * 7 + k) % 150 for k in range(32)]
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "seed": seed * 100 + i, "temperature": 1}
            response = await client.post("/v1/completions", json=body | side.form)
            response.raise_for_status()
            return int(response.json()["usage"]["completion_tokens"])

        began = time.perf_counter()
        counts = await asyncio.gather(*map(one, range(clients)))
        took_s = time.perf_counter() - began
    if set(counts) != {tokens}:
        raise SystemExit(f"{side.url} answered with {counts} tokens instead of {tokens} each")
    return sum(counts) / took_s


def measure(sides: dict[str, Side], clients: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Rates by side; sides take turns in being first. The first round is a warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds + 1):
        for k in range(len(names)):
            name = names[(number + k) % len(names)]
            found = asyncio.run(rate(sides[name], clients, tokens, number))
            if number:
                rates[name].append(found)
    return rates


def told(name: str, ratios: list[float]) -> str:
    return f"{name} {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def show(clients: int, rates: dict[str, list[float]]) -> None:
    speeds = ", ".join(f"{side} {statistics.median(rates[side]):.1f}" for side in rates)
    print(f"{clients} clients: {speeds} tokens/s", flush=True)
    for one, other in RATIOS:
        if {one, other} <= rates.keys():
            ratios = [a / b for a, b in zip(rates[one], rates[other], strict=True)]
            print("   " + told(f"{one} / {other}", ratios), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", default="", help="another server's address")
    given = parser.parse_args()
    if given.peer and not given.model:
        parser.error("--peer needs the MODEL that it serves")
    with tempfile.TemporaryDirectory(prefix="pagoda-structured-") as name:
        scratch = Path(name)
        for part in ("model", "one", "two"):
            (scratch / part).mkdir()
        if not given.model:
            write_model(scratch / "model", "b135m", given.vocab)
        model = given.model or str(scratch / "model")
        flags = ("--kv-cache-gib", "0.5")
        with (
            running_stack(scratch / "one", *flags, model=model) as one,
            running_stack(scratch / "two", *flags, "--speculation-tokens", "0", model=model) as two,
        ):
            sides = {"free": Side(one.url, FREE), "masked": Side(two.url, FORM), "forced": Side(one.url, FORM)}
            if given.peer:
                sides |= {"peer free": Side(given.peer, FREE), "peer": Side(given.peer, FORM)}
            found = {}
            for clients in map(int, given.clients.split(",")):
                found[clients] = measure(sides, clients, given.tokens, given.rounds)
                show(clients, found[clients])
                stats = one.stats()
                print(f"   drafts so far: {stats.accepted_draft_tokens} of {stats.draft_tokens} held", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
