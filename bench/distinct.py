#!/usr/bin/env python3
"""Sends ten thousand different schemas, and measures the memory of each process of the stack.

    python bench/distinct.py [--schemas 10000]

Prints the memory after every tenth. The first tenth fills caches; the growth after it must stay below a limit per
process. The exit status is 0 if it does.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.stack import Stack, running_stack

MAX_GROWTH_MB = 64.0
AT_ONCE = 16
TENTHS = 10
ROLES = ("gateway", "engine-core", "worker")


async def ask(stack: Stack, first: int, last: int) -> None:
    numbers = iter(range(first, last))
    async with httpx.AsyncClient(base_url=stack.url, timeout=600) as client:

        async def some() -> None:
            for i in numbers:
                properties = {f"p{i}_{k}": {"type": "string", "maxLength": 1 + i} for k in range(5)}
                body = {"prompt": [40, 41], "max_tokens": 2, "guided_json": {"properties": properties}}
                (await client.post("/v1/completions", json=body)).raise_for_status()

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))


def memory_mb(stack: Stack) -> dict[str, float]:
    """Memory by role, including child processes."""
    found = {}
    for role in ROLES:
        family = [one for child in stack.children(role) for one in (child, *child.children(recursive=True))]
        found[role] = sum(one.memory_info().rss for one in set(family)) / 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=10_000)
    count = parser.parse_args().schemas
    with tempfile.TemporaryDirectory(prefix="pagoda-distinct-") as name, running_stack(Path(name)) as stack:
        found = []
        for tenth in range(TENTHS):
            last = count * (tenth + 1) // TENTHS
            asyncio.run(ask(stack, count * tenth // TENTHS, last))
            found.append(memory_mb(stack))
            told = ", ".join(f"{role} {found[-1][role]:.1f}" for role in ROLES)
            print(f"MB after {last:6} schemas: {told}", flush=True)
    sys.exit(1 if any(found[-1][role] - found[0][role] > MAX_GROWTH_MB for role in ROLES) else 0)


if __name__ == "__main__":
    main()
