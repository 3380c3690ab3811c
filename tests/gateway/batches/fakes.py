"""A service that answers lines as told, and a desk for it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pagoda_gateway.batches.batch import Batch, new_batch
from pagoda_gateway.batches.batches import Batches
from pagoda_gateway.batches.files import BATCH, FileLimits, Files
from pagoda_gateway.batches.work import Desk
from pagoda_gateway.store.interface import Store
from pagoda_proto.errors import ErrorCode, PagodaError

URL = "/v1/completions"
OWNER = "me"
Script = Callable[[str], Exception | asyncio.Event | None]


class FakeService:
    """Answers every line with its own prompt, unless `script` returns something for that prompt: it raises an error,
    and waits for an event."""

    def __init__(self, models: Sequence[str] = ("m",)) -> None:
        self.models = models
        self.script: Script = lambda prompt: None
        self.asked: Counter[str] = Counter()
        self.running = 0
        self.most_running = 0
        self.begun = asyncio.Event()

    def known(self, model: str | None) -> str:
        name = self.models[0] if model is None else model
        if name not in self.models:
            raise PagodaError(ErrorCode.MODEL_NOT_FOUND, "no such model", "model")
        return name

    async def in_thread(self, num_bytes: int, work: Callable[[], None]) -> None:
        await asyncio.to_thread(work)

    async def answer(self, endpoint: str, line: bytes, owner: str) -> bytes:
        prompt = json.loads(line)["body"]["prompt"]
        self.asked[prompt] += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.begun.set()
        try:
            await asyncio.sleep(0)
            found = self.script(prompt)
            if isinstance(found, asyncio.Event):
                await found.wait()
            elif found is not None:
                raise found
            return json.dumps({"echo": prompt}).encode()
        finally:
            self.running -= 1


def desk_on(store: Store, service: FakeService, clock: Callable[[], float], slots: int = 4) -> Desk:
    """The desk of one gateway; several may share a store."""
    return Desk(
        batches=Batches(store, clock),
        files=Files(store, FileLimits(2**30, 2**40), clock),
        service=service,
        slots=asyncio.Semaphore(slots),
        max_line_bytes=100_000,
    )


def line(custom_id: str, **fields: Any) -> bytes:
    whole = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"model": "m", "prompt": custom_id}}
    return json.dumps(whole | fields).encode() + b"\n"


async def submitted(desk: Desk, content: bytes, owner: str = OWNER) -> Batch:
    """A batch made from a file with this content."""
    upload = await desk.files.begin(owner, len(content))
    await upload.write(content)
    info = await upload.finish("lines.jsonl", BATCH, None)
    batch = new_batch(URL, info.id, None, 3600, desk.batches.clock())
    await desk.batches.add(owner, batch)
    return batch


async def rows(desk: Desk, file_id: str, owner: str = OWNER) -> list[dict[str, Any]]:
    info = await desk.files.find(owner, file_id)
    data = b"".join([piece async for piece in desk.files.content(info)])
    assert len(data) == info.bytes
    return [json.loads(row) for row in data.splitlines()]


async def ids(desk: Desk, file_id: str) -> list[str]:
    return sorted(row["custom_id"] for row in await rows(desk, file_id))
