"""Writes to a store for ever, and prints after every write what was acknowledged: ADDRESS."""

from __future__ import annotations

import asyncio
import itertools
import sys

from pagoda_gateway.store.opening import open_store


async def main(address: str) -> None:
    store = open_store(address)
    for i in itertools.count():
        await store.put("things", f"k{i}", b"%d" % i)
        length = await store.append("log", [b"%d" % i])
        print(i, length, flush=True)


asyncio.run(main(sys.argv[1]))
