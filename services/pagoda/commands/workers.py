"""`pagoda workers list | drain | forget-prefixes`: an operator's requests to engine cores while they serve."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grpc

from pagoda.processes.exit_codes import EXIT_OK, EXIT_UNREACHABLE
from pagoda.settings.flags import add_named_options, given_flags
from pagoda.settings.problems import ConfigError
from pagoda.settings.resolving import ASKED_OF, resolve
from pagoda.tools.columns import in_columns
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.engine.session import EngineAddress
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1.engine_pb2_grpc import AdminStub
from pagoda_proto.keys import KeyFileError

CALL_S = 10.0
HEADS = ("WORKER", "STATE", "DEVICE", "ROWS", "FREE BLOCKS", "STEPS", "MIB", "ENGINE CORE")
# States of workers that can still be asked to leave; an engine core also lists lives that have ended.
STAYS = frozenset({"ready", "suspect"})


class Answer(NamedTuple):
    """The answer of the engine core at `address`: a message, or the error instead."""

    address: str
    message: Any
    error: grpc.aio.AioRpcError | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="print the workers of every engine core", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", dest="as_json", help="as JSON")
    leaving = "drain a worker: its requests continue elsewhere after its step, then its process exits"
    drain = actions.add_parser("drain", help=leaving, description=leaving, allow_abbrev=False)
    drain.add_argument("worker_id", metavar="NAME", help="name as shown by list")
    what = "forget every cached prefix that no running request uses"
    forget = actions.add_parser("forget-prefixes", help=what, description=what, allow_abbrev=False)
    for each in (listing, drain, forget):
        add_named_options(each, "workers", sorted(ASKED_OF["workers"]))


def main(arguments: argparse.Namespace) -> int:
    config = resolve("workers", given_flags(arguments, "workers")).build(GatewayConfig)
    try:
        addresses = EngineAddress.several(config.engine, config.keys_dir)
    except (ValueError, KeyFileError) as error:
        raise ConfigError([f"engine: {error}"]) from error
    match arguments.action:
        case "list":
            return asyncio.run(_list(addresses, as_json=arguments.as_json))
        case "drain":
            return asyncio.run(_drain(addresses, arguments.worker_id))
        case _:
            return asyncio.run(_forget(addresses))


async def _list(addresses: Sequence[EngineAddress], *, as_json: bool) -> int:
    answers = await _each(addresses, "ListWorkers", pb.ListWorkersRequest())
    rows = list(_rows(answers))
    if as_json:
        print(json.dumps(rows, indent=2))
    elif any(answer.error is None for answer in answers):
        print(in_columns([HEADS, *map(_line, rows)]))
    return _told(answers)


async def _drain(addresses: Sequence[EngineAddress], worker_id: str) -> int:
    """Raises ConfigError if no engine core has such a worker, or several have."""
    answers = await _each(addresses, "ListWorkers", pb.ListWorkersRequest())
    holders = [row["engine"] for row in _rows(answers) if row["worker_id"] == worker_id and row["state"] in STAYS]
    if len(holders) > 1:
        raise ConfigError([f"{worker_id!r} is at {' and at '.join(holders)}: choose one with --engine"])
    if holders:
        (holder,) = (address for address in addresses if address.text == holders[0])
        answers = await _each([holder], "DrainWorker", pb.DrainWorkerRequest(worker_id=worker_id))
        if answers[0].error is None:
            print(f"{worker_id} leaves {holder.text}", file=sys.stderr)
            return EXIT_OK
    # All of them answered, or the one that had it says that it has left meanwhile.
    if all(error is None or error.code() is grpc.StatusCode.NOT_FOUND for *_, error in answers):
        raise ConfigError([f"there is no worker {worker_id!r} to drain"])
    return _told(answers)


async def _forget(addresses: Sequence[EngineAddress]) -> int:
    answers = await _each(addresses, "ResetPrefixCache", pb.ResetPrefixCacheRequest())
    for answer in answers:
        if answer.error is None:
            print(f"{answer.address}: {answer.message.blocks_dropped} blocks dropped", file=sys.stderr)
    return _told(answers)


async def _each(addresses: Sequence[EngineAddress], method: str, request: Any) -> list[Answer]:
    """Send the same request to all of them concurrently; returns their answers."""

    async def ask(address: EngineAddress) -> Answer:
        async with address.channel() as channel:
            try:
                call = getattr(AdminStub(channel), method)
                return Answer(address.text, await call(request, timeout=CALL_S))
            except grpc.aio.AioRpcError as error:
                return Answer(address.text, None, error)

    return list(await asyncio.gather(*map(ask, addresses)))


def _told(answers: Sequence[Answer]) -> int:
    """Print a line for each engine core that did not answer; returns the exit status."""
    failed = [answer for answer in answers if answer.error is not None]
    for address, _, error in failed:
        print(f"pagoda: error: {address}: {error and (error.details() or error.code().name)}", file=sys.stderr)
    return EXIT_UNREACHABLE if failed else EXIT_OK


def _rows(answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
    for address, message, error in answers:
        for worker in () if error else message.workers:
            fields = {field.name: getattr(worker, field.name) for field in worker.DESCRIPTOR.fields}
            yield fields | {"engine": address}


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    blocks, memory = f"{row['num_free_blocks']} of {row['num_blocks']}", f"{row['rss_bytes'] >> 20}"
    shown = (row["worker_id"], row["state"], row["device"], row["num_rows"], blocks, row["steps_done"], memory)
    return (*map(str, shown), row["engine"])
