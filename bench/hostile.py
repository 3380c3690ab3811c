"""One hostile client beside eight chats: measures its effect on token gaps, health probes and the gateway's memory.

    pagoda serve &
    python bench/hostile.py http://127.0.0.1:8000

The bar: no gap between chat tokens above 250 ms, /health/live within 100 ms at the 99th percentile, at most 300 MB in
the gateway. Attack and measurement are separate processes, so neither delays the other; clients are distinguished by
X-Forwarded-For, which a gateway trusts from its own host. The exit status is 0 if every bar was met.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil

MAX_GAP_MS, MAX_PROBE_MS, MAX_RSS_MB = 250.0, 100.0, 300.0
NUM_CHATS = 8
PROBE_EVERY_S = 0.02
HOSTILE = "10.66.66.66"


def head(path: str, client: str, size: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"x-forwarded-for: {client}"]
    return "\r\n".join([*lines, f"content-length: {size}", "connection: close", "", ""]).encode()


async def ask(place: tuple[str, int], path: str, body: bytes, patience_s: float = 60.0) -> None:
    """Send a request and read its answer, for at most `patience_s`."""
    try:
        reader, writer = await asyncio.open_connection(*place)
        try:
            async with asyncio.timeout(patience_s):
                writer.write(head(path, HOSTILE, len(body)) + body)
                await writer.drain()
                while await reader.read(1 << 16):
                    pass
        finally:
            writer.transport.abort()  # close() would still send the rest
    except (OSError, TimeoutError):
        await asyncio.sleep(0.01)


Attack = Callable[[tuple[str, int]], Coroutine[Any, Any, None]]
TEXT = "the quick brown fox jumps over the lazy dog, and " * 84_000


def attack(path: str, body: Any, patience_s: float = 60.0) -> Attack:
    data = json.dumps(body).encode()
    return lambda place: ask(place, path, data, patience_s)


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, *messages], "max_tokens": 1, **fields}


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "x", "tool_calls": [call]}


async def abandoned_upload(place: tuple[str, int]) -> None:
    try:
        reader, writer = await asyncio.open_connection(*place)
        try:
            async with asyncio.timeout(20):
                writer.write(head("/tokenize", HOSTILE, 10_000_000) + b'{"prompt": "' + b"x" * 9_900_000)
                await reader.read()
        finally:
            writer.close()
    except (OSError, TimeoutError):
        await asyncio.sleep(0.01)


def logprobs(num_prompts: int) -> dict[str, Any]:
    return {"prompt": [[i % 400 for i in range(2000)]] * num_prompts, "prompt_logprobs": 20, "max_tokens": 1}


ATTACKS: dict[str, tuple[int, Callable[[], Attack]]] = {  # concurrency, and what each does
    "nothing": (0, lambda: attack("/tokenize", {})),
    "4 MB tool description": (8, lambda: attack("/v1/chat/completions", chat(tools=[tool(description=TEXT)]))),
    "4 MB tool arguments": (
        8, lambda: attack("/v1/chat/completions", chat(called(json.dumps({"a": TEXT})), tools=[tool()]))
    ),
    "4 MB of escapes": (
        8, lambda: attack("/v1/chat/completions", chat({"role": "user", "content": '"\\\n' * 660_000}))
    ),
    "500,000 values": (
        8, lambda: attack("/v1/chat/completions", chat(tools=[tool(parameters={"a": [{}] * 500_000})]))
    ),
    "130,000 values": (
        8, lambda: attack("/v1/chat/completions", chat(tools=[tool(parameters={"a": [{}] * 130_000})]))
    ),
    "integers of 4000 digits": (
        8, lambda: attack("/v1/chat/completions", chat(tools=[tool(parameters={"a": [int("9" * 4000)] * 600})]))
    ),
    "500,000 token ids": (8, lambda: attack("/detokenize", {"tokens": [1] * 500_000})),
    "4 MB of emoji": (
        8, lambda: attack("/v1/chat/completions", chat({"role": "user", "content": "\U0001f600" * 330_000}))
    ),
    "32 x 2000 x prompt_logprobs 20": (8, lambda: attack("/v1/completions", logprobs(32))),
    "128 x 2000 x prompt_logprobs 20": (8, lambda: attack("/v1/completions", logprobs(128))),
    "6 x 2000 x prompt_logprobs 20": (4, lambda: attack("/v1/completions", logprobs(6))),
    "abandoned 1 MB /tokenize": (8, lambda: attack("/tokenize", {"prompt": TEXT[:1_000_000]}, 0.05)),
    "abandoned 0.5 MB /tokenize": (8, lambda: attack("/tokenize", {"prompt": TEXT[:500_000]}, 0.05)),
    "abandoned uploads": (64, lambda: abandoned_upload),
}  # fmt: skip


async def keep_attacking(place: tuple[str, int], name: str) -> None:
    at_once, make = ATTACKS[name]
    one = make()

    async def forever() -> None:
        while True:
            await one(place)

    await asyncio.gather(*(forever() for _ in range(at_once)))


@dataclass
class Seen:
    gaps_ms: list[float] = field(default_factory=lambda: [0.0])
    probes_ms: list[float] = field(default_factory=list)
    rss_mb: float = 0.0


async def lines_of(place: tuple[str, int], body: dict[str, Any], client: str) -> AsyncIterator[bytes]:
    reader, writer = await asyncio.open_connection(*place)
    try:
        data = json.dumps(body).encode()
        writer.write(head("/v1/chat/completions", client, len(data)) + data)
        while line := await reader.readline():
            yield line
    finally:
        writer.close()


async def chats(place: tuple[str, int], number: int, seen: Seen) -> None:
    """Run one chat after the other; gaps are those between a stream's events."""
    body = chat(max_tokens=400, stream=True, ignore_eos=True, seed=number)
    while True:
        last = None
        async for line in lines_of(place, body, f"10.0.0.{number + 1}"):
            if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
                print(f"a chat was refused: {line!r}")
            if line.startswith(b"data: "):
                now = time.perf_counter()
                if last is not None:
                    seen.gaps_ms.append(1e3 * (now - last))
                last = now


async def probes(place: tuple[str, int], process: psutil.Process, seen: Seen) -> None:
    while True:
        begun_at = time.perf_counter()
        reader, writer = await asyncio.open_connection(*place)
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await reader.read()
        writer.close()
        seen.probes_ms.append(1e3 * (time.perf_counter() - begun_at))
        seen.rss_mb = max(seen.rss_mb, process.memory_info().rss / 1e6)
        await asyncio.sleep(PROBE_EVERY_S)


async def measure(place: tuple[str, int], process: psutil.Process, seconds: float) -> Seen:
    seen = Seen()
    tasks = [asyncio.create_task(chats(place, i, seen)) for i in range(NUM_CHATS)]
    tasks.append(asyncio.create_task(probes(place, process, seen)))
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    return seen


def listener(port: int) -> psutil.Process:
    for process in psutil.process_iter():
        try:
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("inet")):
                return process
        except psutil.Error:
            continue
    raise SystemExit(f"no process of this machine listens on port {port}")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def run(url: str, names: list[str], seconds: float) -> bool:
    place = (urlsplit(url).hostname or "127.0.0.1", urlsplit(url).port or 80)
    process = listener(place[1])
    print(f"{'beside 8 chats':34}{'token gap p99':>14}{'worst':>8}{'live p50':>11}{'p99':>7}{'worst':>8}{'memory':>10}")
    met = True
    for name in names:
        command = [sys.executable, __file__, url, "--attack", name]
        attacker = subprocess.Popen(command, start_new_session=True)  # Linux divides processors between sessions
        try:
            seen = asyncio.run(measure(place, process, seconds))
        finally:
            attacker.kill()
            attacker.wait()
        fine = (
            max(seen.gaps_ms) <= MAX_GAP_MS
            and percentile(seen.probes_ms, 0.99) <= MAX_PROBE_MS
            and seen.rss_mb <= MAX_RSS_MB
        )
        met &= fine
        print(
            f"{name:34}{percentile(seen.gaps_ms, 0.99):11.0f} ms{max(seen.gaps_ms):5.0f} ms"
            f"{percentile(seen.probes_ms, 0.5):8.0f} ms{percentile(seen.probes_ms, 0.99):4.0f} ms"
            f"{max(seen.probes_ms):5.0f} ms{seen.rss_mb:7.0f} MB"
            f"{'' if fine else '   bar missed'}",
            flush=True,
        )
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=15.0, help="per attack")
    parser.add_argument("--only", nargs="*", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--attack", choices=list(ATTACKS), help="be the attacker, until killed")
    arguments = parser.parse_args()
    if arguments.attack:
        place = (urlsplit(arguments.url).hostname or "127.0.0.1", urlsplit(arguments.url).port or 80)
        asyncio.run(keep_attacking(place, arguments.attack))
        return 0
    return 0 if run(arguments.url, arguments.only, arguments.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
