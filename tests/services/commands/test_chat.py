"""`pagoda chat` as a process: fed by a pipe, and at a terminal with somebody who presses keys."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from tests.services.sse_server import SseServer, serving


def chat(url: str) -> list[str]:
    return [sys.executable, "-m", "pagoda.cli", "chat", "--base-url", url]


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], keys: int) -> None:
        self.process = process
        self._keys = keys
        self.screen = ""

    def press(self, text: str) -> None:
        os.write(self._keys, text.encode())

    async def shows(self, text: str) -> None:
        while text not in self.screen:
            self.screen += (await asyncio.to_thread(os.read, self._keys, 4096)).decode()

    async def ends(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)


@contextlib.contextmanager
def at_a_terminal(command: list[str]) -> Iterator[Terminal]:
    keys, end = os.openpty()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite run in the background may ignore it
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, start_new_session=True)
    signal.signal(signal.SIGINT, before)
    os.close(end)
    try:
        yield Terminal(process, keys)
    finally:
        process.kill()
        process.wait()
        os.close(keys)


def piped(url: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(chat(url), input=text, capture_output=True, text=True, timeout=120, check=False)


async def test_a_failed_turn_of_a_pipe_ends_it_with_its_reason() -> None:
    async with serving(SseServer(failures=[500])) as server:
        done = await asyncio.to_thread(piped, server.url, "one\ntwo\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "[http 500" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(server.bodies) == 1


async def test_a_pipe_whose_turns_are_answered_ends_well() -> None:
    async with serving(SseServer()) as server:
        done = await asyncio.to_thread(piped, server.url, "one\ntwo\n")
    assert (done.returncode, done.stdout) == (0, "word word word \n" * 2)


async def test_at_a_terminal_a_failed_turn_is_told_and_forgotten() -> None:
    async with serving(SseServer(failures=[500])) as server:
        with at_a_terminal(chat(server.url)) as terminal:
            await terminal.shows("> ")
            terminal.press("one\n")
            await terminal.shows("[http 500")
            terminal.press("two\n")
            await terminal.shows("word word word")
            terminal.press("/quit\n")
            assert await terminal.ends() == 0
    assert [body["messages"][0]["content"] for body in server.bodies] == ["one", "two"]


async def test_ctrl_c_ends_the_turn_and_then_the_talk() -> None:
    async with serving(SseServer(answered=asyncio.Event())) as server:
        with at_a_terminal(chat(server.url)) as terminal:
            await terminal.shows("> ")
            terminal.press("one\n")
            await server.asked.wait()
            terminal.process.send_signal(signal.SIGINT)
            await terminal.shows("[interrupted]\r\n> ")
            while terminal.process.poll() is None:  # a signal before `input` reads takes effect with the next
                terminal.process.send_signal(signal.SIGINT)
                await asyncio.sleep(2.0)
            assert await terminal.ends() == 130
    assert "[]" not in terminal.screen
    assert "Traceback" not in terminal.screen
