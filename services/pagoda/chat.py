"""`pagoda chat`: talk to a running server in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from pagoda.asking import Ask, add_server_arguments, ask, connect
from pagoda.http_stream import HttpError
from pagoda.settings import ConfigError

HELP = "/clear forgets the conversation, /system TEXT sets instructions, /quit (or end of input) leaves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("--system", default="", help="instructions for the model")


def main(arguments: argparse.Namespace) -> int:
    try:
        session = asyncio.run(connect(arguments))
    except (HttpError, ValueError) as error:
        raise ConfigError([str(error)]) from error
    print(f"{session.model} at {arguments.base_url}; {HELP}", file=sys.stderr)
    Conversation(session, arguments.system).run()
    return 0


class Conversation:
    """Turns of one talk; an answer that failed is not kept."""

    def __init__(self, session: Ask, system: str) -> None:
        self._session = session
        self._messages: list[dict[str, Any]] = []
        self._forget(system)

    def run(self) -> None:
        """Read lines until the input ends."""
        while (line := _read()) is not None and line != "/quit":
            if line == "/clear":
                self._forget("")
            elif line.startswith("/system "):
                self._forget(line.removeprefix("/system "))
            elif line.startswith("/"):
                print(HELP, file=sys.stderr)
            elif line:
                self._turn(line)

    def _turn(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            text = asyncio.run(ask(self._session, "/v1/chat/completions", {"messages": self._messages}))
        except (HttpError, KeyboardInterrupt) as error:
            print(f"\n[{error or 'interrupted'}]", file=sys.stderr)
            self._messages.pop()
        else:
            self._messages.append({"role": "assistant", "content": text})

    def _forget(self, system: str) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []


def _read() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
