"""A TCP proxy that injects network faults into links: blackhole, half-open connection, reset, delay, throttling."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType

FAULTS = ("half-open", "blackhole", "reset", "delay", "throttle")
DELAY_S = 0.3
THROTTLED = 64 * 1024  # bytes per second in each direction
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


class _Link:
    """One connection through the proxy. Once vanished, it drops all data and never closes, like a peer that lost
    power."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.writers = (client, server)
        self.vanished = False

    def reset(self) -> None:
        for writer in self.writers:
            if writer.is_closing():
                continue
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            writer.transport.abort()


class ChaosProxy:
    """Forwards `port` to `target_port`, both on the loopback address; runs in a thread of its own."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._links: set[_Link] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._delay_s = 0.0
        self._bytes_per_s = 0.0  # 0: unlimited
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.port = 0
        self.num_links = 0  # accepted so far

    def __enter__(self) -> ChaosProxy:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._accept, "127.0.0.1", 0), self._loop
        ).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def hold(self) -> None:
        """A partition: nothing arrives on any link until `release`, then everything does."""
        self._call(self._passing.clear)

    def release(self) -> None:
        self._call(self._passing.set)

    def vanish(self) -> None:
        """Make all current links half-open for good; new links work."""

        def vanish() -> None:
            for link in self._links:
                link.vanished = True

        self._call(vanish)

    def reset(self) -> None:
        self._call(lambda: [link.reset() for link in list(self._links)])

    def delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def throttle(self, bytes_per_s: float) -> None:
        """Limit each link in each direction; 0 lifts the limit. Waiting data fills the buffers of both ends."""
        self._bytes_per_s = bytes_per_s

    async def strike(self, fault: str, seconds: float) -> None:
        """Inject one of FAULTS; those with a duration last `seconds`."""
        if fault == "half-open":
            self.vanish()
        elif fault == "reset":
            self.reset()
        elif fault == "blackhole":
            self.hold()
            await asyncio.sleep(seconds)
            self.release()
        elif fault == "throttle":
            self.throttle(THROTTLED)
            await asyncio.sleep(seconds)
            self.throttle(0.0)
        else:
            self.delay(DELAY_S)
            await asyncio.sleep(seconds)
            self.delay(0.0)

    def _call(self, function: Callable[[], object]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(), done.set()))
        done.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_links += 1
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(writer, far_writer)
        self._links.add(link)
        pumps = asyncio.gather(self._pump(link, reader, far_writer), self._pump(link, far_reader, writer))
        with contextlib.suppress(asyncio.CancelledError):  # on closing; asyncio would log it as our error
            await pumps
        self._links.discard(link)
        for end in link.writers:
            end.close()

    async def _pump(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(4096 if self._bytes_per_s else 65536):
                await self._passing.wait()
                if self._bytes_per_s:
                    await asyncio.sleep(len(data) / self._bytes_per_s)
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if not link.vanished:
                    writer.write(data)
                    await writer.drain()
            await self._passing.wait()
            if not link.vanished:
                writer.close()

    async def _close(self) -> None:
        self._server.close()
        self._passing.set()
        for link in list(self._links):
            link.reset()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
