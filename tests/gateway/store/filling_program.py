"""Writes to a store whose file may not grow beyond a size, and prints what the calls did: ADDRESS BYTES."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys

from pagoda_gateway.store.opening import open_store
from pagoda_proto.errors import PagodaError


async def main(address: str, most_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    store = open_store(address)
    written = 0
    try:
        while True:
            written = await store.append("log", [bytes(100_000)])
    except PagodaError as error:
        print(written, error.code, error.retry_after_s > 0, *error.__notes__, sep="|")
    print(await store.length("log"), len(await store.read("log")), sep="|")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(await store.append("log", [b"there is room again"]))
    await store.aclose()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
