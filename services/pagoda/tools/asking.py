"""Sends one request to a running server, and prints its answer as it arrives, then its speed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from pagoda.settings.numbers import number, seed, whole
from pagoda.settings.problems import ConfigError, UnreachableError
from pagoda.settings.resolving import environment_value
from pagoda.tools.http_stream import Connection, HttpError, NotNow, Target, refused
from pagoda.tools.timing import Timing, decode_event

QUIET_TIMEOUT_S = 600.0


def problem_of(error: Exception, about: str = "") -> ConfigError:
    """The exception to raise for a failed exchange; its message begins with `about`."""
    kind = UnreachableError if isinstance(error, NotNow) else ConfigError
    return kind([f"{about}{error}"])


@dataclass
class Ask:
    """Where to send requests, and with which model and options."""

    target: Target
    model: str
    options: dict[str, Any]


def own_key() -> str:
    """The API key that a server on this machine would require."""
    return environment_value("PAGODA_API_KEY").partition(",")[0]


def add_target_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", default="http://127.0.0.1:8000", help="[%(default)s]")
    group.add_argument("--model", default="", help="default: the server's first model")
    group.add_argument("--api-key", default=own_key(), help="sent as bearer token [the first of $PAGODA_API_KEY]")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser.add_argument_group("server"))
    parser.add_argument("--max-tokens", type=whole(1), help="maximum output tokens")
    parser.add_argument("--temperature", type=number(), help="0 is greedy")
    parser.add_argument("--seed", type=seed(), help="the same seed gives the same answer")


async def connect(arguments: argparse.Namespace) -> Ask:
    """Raises HttpError or ValueError if there is no such server."""
    target = Target(arguments.base_url, arguments.api_key)
    named = {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "seed")}
    options = {name: value for name, value in named.items() if value is not None}
    return Ask(target, arguments.model or await first_model(target, QUIET_TIMEOUT_S), options)


async def first_model(target: Target, timeout_s: float) -> str:
    """The name of the server's first model. Raises HttpError if it does not say."""
    connection = await Connection.open(target)
    answer = await connection.exchange(target.request("GET", "/v1/models"), lambda now, event: None, timeout_s)
    connection.close()
    if answer.status != 200:
        raise refused(answer.status, f"GET /v1/models: http {answer.status}")
    try:
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise HttpError("GET /v1/models: the answer lists no model") from error


async def ask(session: Ask, path: str, question: dict[str, Any]) -> str:
    """Print the answer as it arrives, then its speed on standard error; returns the answer's text.

    Raises:
        HttpError: there was no complete answer.
    """
    stream = {"model": session.model, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(stream | session.options | question).encode()
    timing = Timing()
    pieces: list[str] = []

    def on_event(now: float, data: bytes) -> None:
        timing.on_event(now, data)
        if data.startswith(b"{") and timing.error is None:
            pieces.append(decode_event(data).text)
            print(pieces[-1], end="", flush=True)

    connection = await Connection.open(session.target)
    timing.started = time.perf_counter()
    answer = await connection.exchange(session.target.request("POST", path, body), on_event, QUIET_TIMEOUT_S)
    connection.close()
    timing.finish(answer)
    if timing.error is not None:
        raise refused(answer.status, timing.error)
    print(flush=True)
    print(_pace(timing), file=sys.stderr)
    return "".join(pieces)


def _pace(timing: Timing) -> str:
    if timing.first is None or timing.last is None:
        return "[no text]"
    text = f"[first token after {1000 * (timing.first - timing.started):.0f} ms"
    if timing.output_tokens and timing.output_tokens > 1 and timing.last > timing.first:
        text += f", then {(timing.output_tokens - 1) / (timing.last - timing.first):.1f} tokens/s"
    return f"{text}; {timing.prompt_tokens} prompt tokens, {timing.output_tokens} output tokens]"
