"""`python -m tests.engine_core.stuck_loop DIRECTORY`: an engine core whose loop gets stuck when a worker joins, because
nobody reads the log it writes to."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.server import serve


class Stuck(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread().name == "engine-loop":
            block_for_ever()


def block_for_ever() -> None:
    threading.Event().wait()


async def main(directory: str) -> None:
    config = EngineConfig(listen=f"unix:{directory}/e.sock", worker_endpoint=f"ipc://{directory}/w.sock")
    await serve(config, lambda event: None, asyncio.Event())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, handlers=[Stuck()])
    asyncio.run(main(sys.argv[1]))
