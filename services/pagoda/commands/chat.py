"""`pagoda chat`: talk to a running server in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from pagoda.processes.exit_codes import EXIT_CRASH, EXIT_OK
from pagoda.tools.asking import Ask, add_server_arguments, ask, connect, problem_of
from pagoda.tools.http_stream import HttpError

HELP = "/clear forgets the conversation, /system TEXT sets instructions, /quit (or end of input) leaves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("--system", default="", help="instructions for the model")


def main(arguments: argparse.Namespace) -> int:
    try:
        session = asyncio.run(connect(arguments))
    except (HttpError, ValueError) as error:
        raise problem_of(error) from error
    print(f"{session.model} at {arguments.base_url}; {HELP}", file=sys.stderr)
    return EXIT_OK if TerminalChat(session, arguments.system).run() else EXIT_CRASH


class TerminalChat:
    """The turns of one conversation; a turn that fails is dropped."""

    def __init__(self, session: Ask, system: str) -> None:
        self._session = session
        self._messages: list[dict[str, Any]] = []
        self._forget(system)

    def run(self) -> bool:
        """Read lines until the input ends; False if a turn failed and the input is not a terminal."""
        while (line := _read()) is not None and line != "/quit":
            if line == "/clear":
                self._forget("")
            elif line.startswith("/system "):
                self._forget(line.removeprefix("/system "))
            elif line.startswith("/"):
                print(HELP, file=sys.stderr)
            elif line and not self._turn(line) and not sys.stdin.isatty():
                return False
        return True

    def _turn(self, line: str) -> bool:
        self._messages.append({"role": "user", "content": line})
        try:
            text = asyncio.run(ask(self._session, "/v1/chat/completions", {"messages": self._messages}))
        except (HttpError, KeyboardInterrupt) as error:
            print(f"\n[{error if isinstance(error, HttpError) else 'interrupted'}]", file=sys.stderr)
            self._messages.pop()
            return False
        self._messages.append({"role": "assistant", "content": text})
        return True

    def _forget(self, system: str) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []


def _read() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        if sys.stdin.isatty():
            print(file=sys.stderr)
        return None
