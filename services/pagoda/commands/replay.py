"""`pagoda replay FILE`: recompute a finished request from its transcript, and say whether the result is the same.

Exit code 0: bit-equal; 1: it differs, and where; 2: no verdict, because weights or numerics differ, or because the file
or the model cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pagoda.settings.flags import add_model_argument, add_options, given_flags
from pagoda.settings.numbers import number
from pagoda.settings.problems import ConfigError
from pagoda.tools.asking import own_key, problem_of
from pagoda.tools.http_stream import Connection, HttpError, Target
from pagoda_proto.errors import PagodaError

if TYPE_CHECKING:
    from pagoda_gateway.generation.transcripts import Transcript, TranscriptPart
    from pagoda_proto.records import Task

STDIN = "-"
MAX_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="answer of GET /v1/requests/{id}/transcript; -: standard input")
    add_model_argument(parser)
    group = parser.add_argument_group("where")
    group.add_argument("--url", default="", help="a running server to ask, instead of loading a model here")
    group.add_argument("--api-key", default=own_key(), help="sent as bearer token [the first of $PAGODA_API_KEY]")
    group.add_argument("--timeout-s", type=number(), default=600.0, help="limit for the server's answer [%(default)s]")
    group.add_argument("--force", action="store_true", help="compare even if weights or numerics differ")
    add_options(parser, "offline")
    parser.usage = f"{parser.prog} FILE [MODEL] [options]"


def main(arguments: argparse.Namespace) -> int:
    kept = _read(arguments.file)
    given = given_flags(arguments, "offline")
    if arguments.url and given:
        raise ConfigError([f"{name} has no effect with --url: the server uses its own" for name in given])
    now = _asked(arguments, kept) if arguments.url else _computed(given, kept, force=arguments.force)
    return _told(kept, now)


def _told(kept: Transcript, now: Transcript) -> int:
    from pagoda_gateway.generation.transcripts import differences

    found = list(differences(kept, now))
    for difference in found[:MAX_SHOWN]:
        print(f"differs: {difference}")
    if not found:
        tokens = sum(len(choice.token_ids) for part in kept.parts for choice in part.choices)
        print(f"bit-equal: {kept.id}, {tokens} tokens")
    return 1 if found else 0


def _check_conditions(kept: Transcript, model_fingerprint: str, numerics_id: str, *, force: bool) -> None:
    """Raises ConfigError if equal tokens are not to be expected, unless `force`."""
    from pagoda_gateway.generation.transcripts import other_conditions

    others = other_conditions(kept, model_fingerprint, numerics_id)
    if others and not force:
        raise ConfigError([*others, "tokens may differ here: --force compares them anyway"])
    for other in others:
        print(other, file=sys.stderr)


def _read(file: str) -> Transcript:
    """Reads no more than a transcript may have."""
    from pagoda_gateway.generation.transcripts import MAX_TRANSCRIPT_BYTES, read_transcript

    try:
        if file == STDIN:
            data = sys.stdin.buffer.read(MAX_TRANSCRIPT_BYTES + 1)
        else:
            with Path(file).open("rb") as stream:
                data = stream.read(MAX_TRANSCRIPT_BYTES + 1)
        return read_transcript(data)
    except OSError as error:
        raise ConfigError([f"{file}: {error.strerror or error}"]) from error
    except ValueError as error:
        raise ConfigError([f"{file}: {error}"]) from error


def _computed(options: dict[str, object], kept: Transcript, *, force: bool) -> Transcript:
    """Replay with a model in this process; without `force`, only with the same one."""
    from pagoda.offline.llm import LLM

    with LLM(**options) as llm:  # type: ignore[arg-type]
        _check_conditions(kept, llm.model_fingerprint, llm.numerics_id, force=force)
        try:
            return llm.replay(kept)
        except PagodaError as error:
            raise ConfigError([error.message]) from error


def _asked_for(part: TranscriptPart) -> tuple[list[int], Task]:
    return part.record.prompt_token_ids, part.record.task


def _asked(arguments: argparse.Namespace, kept: Transcript) -> Transcript:
    from pagoda_gateway.generation.transcripts import read_transcript

    async def ask() -> bytes:
        target = Target(arguments.url, arguments.api_key)
        connection = await Connection.open(target)
        request = target.request("POST", "/v1/requests/replay", msgspec.json.encode(kept))
        answer = await connection.exchange(request, lambda now, event: None, arguments.timeout_s)
        connection.close()
        if answer.status != 200:
            raise HttpError(f"the server answers {answer.status}: {answer.body[:2000].decode(errors='replace')}")
        return answer.body

    try:
        now = read_transcript(asyncio.run(ask()))
    except (HttpError, ValueError) as error:
        raise problem_of(error, f"{arguments.url}: ") from error
    if [_asked_for(part) for part in now.parts] != [_asked_for(part) for part in kept.parts]:
        raise ConfigError([f"{arguments.url}: the server answered a different request"])
    first = now.parts[0]
    _check_conditions(kept, first.model_fingerprint, first.numerics_id, force=arguments.force)
    return now
