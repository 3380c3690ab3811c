"""`pagoda keys create | list | revoke`: API keys in the store that gateways share, while they run."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pagoda.processes.exit_codes import EXIT_OK, EXIT_UNREACHABLE
from pagoda.settings.flags import add_named_options, given_flags
from pagoda.settings.numbers import whole
from pagoda.settings.problems import ConfigError
from pagoda.settings.resolving import ASKED_OF, resolve
from pagoda.tools.columns import in_columns
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.keys.api_key import MAX_LIMIT, ApiKey, NewKey
from pagoda_gateway.keys.grants import LIMITS, Limits, Role
from pagoda_gateway.keys.register import KeyRegister
from pagoda_gateway.store.interface import MAX_PAGE_RECORDS, unavailable
from pagoda_gateway.store.opening import SQLITE, open_store
from pagoda_gateway.store.sqlite_store import MEMORY
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import MAX_WEIGHT

DAY_S = 86400

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="create a key and print it once", allow_abbrev=False)
    create.add_argument("name", metavar="NAME", help="name to show in lists")
    roles = "client uses the model, monitor reads /metrics, admin may do all and manages keys over HTTP [%(default)s]"
    known = [role.value for role in Role]
    create.add_argument("--role", choices=known, default=Role.CLIENT.value, metavar="ROLE", help=roles)
    create.add_argument("--model", action="append", metavar="NAME", help="allow only this model; may be repeated")
    create.add_argument(
        "--valid-days", type=whole(1, 36500), metavar="N", help="days until the key expires; default: never"
    )
    share = "share under --policy fair: 2 is served twice as much as 1 while both wait [%(default)s]"
    create.add_argument("--weight", type=whole(1, MAX_WEIGHT), default=1, metavar="N", help=share)
    for name in LIMITS:
        flag, what = "--" + name.replace("_", "-"), "0: no limit; default: the gateway's own"
        create.add_argument(flag, type=whole(0, MAX_LIMIT), metavar="N", help=f"limit at each gateway; {what}")
    listing = actions.add_parser("list", help="print all keys without their secrets", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", dest="as_json", help="as JSON")
    revoke = actions.add_parser("revoke", help="revoke a key", allow_abbrev=False)
    revoke.add_argument("key_id", metavar="ID", help="id as shown by list: key_..")
    for each in (create, listing, revoke):
        add_named_options(each, "keys", sorted(ASKED_OF["keys"]))


def main(arguments: argparse.Namespace) -> int:
    store = resolve("keys", given_flags(arguments, "keys")).build(GatewayConfig).store
    _check_store(store, new=arguments.action == "create")
    actions = {"create": _create, "list": _list, "revoke": _revoke}
    try:
        return asyncio.run(_with_register(store, lambda register: actions[arguments.action](register, arguments)))
    except PagodaError as error:
        if error.code is ErrorCode.UNAVAILABLE:
            why = "; ".join(getattr(error, "__notes__", ()))
            print(f"pagoda: error: the store cannot be reached: {why}", file=sys.stderr)
            return EXIT_UNREACHABLE
        raise ConfigError([error.message]) from error


def _check_store(store: str, new: bool) -> None:
    """Raises ConfigError."""
    if store in ("", MEMORY):
        raise ConfigError(["--store is needed: the gateways' store (PAGODA_STORE or store in the settings file)"])
    path = Path(store.removeprefix(SQLITE)).expanduser()
    if not store.startswith(SQLITE) or path.exists():
        return
    if not new:
        raise ConfigError([f"store: there is no file {path}"])
    if not path.parent.is_dir():
        raise ConfigError([f"store: there is no directory {path.parent}"])
    print(f"{path} is a new store: start gateways with this --store to use its keys", file=sys.stderr)


async def _with_register(address: str, work: Callable[[KeyRegister], Awaitable[T]]) -> T:
    """Raises ConfigError and PagodaError."""
    try:
        store = open_store(address)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    try:
        async with asyncio.timeout(times.STORE_CALL_S):
            return await work(KeyRegister(store))
    except TimeoutError:
        raise unavailable(f"no answer within {times.STORE_CALL_S:g} s", times.STORE_REST_S) from None
    finally:
        await store.aclose()


async def _create(register: KeyRegister, arguments: argparse.Namespace) -> int:
    days = arguments.valid_days
    asked = NewKey(
        name=arguments.name,
        role=Role(arguments.role),
        models=None if arguments.model is None else tuple(arguments.model),
        limits=Limits(**{name: getattr(arguments, name) for name in LIMITS}),
        weight=arguments.weight,
        expires_at=None if days is None else int(time.time()) + days * DAY_S,
    )
    key, text = await register.create(asked)
    print(f"{key.id} for {key.name!a}; the key is shown only once and not stored:", file=sys.stderr)
    print(text)
    return EXIT_OK


async def _revoke(register: KeyRegister, arguments: argparse.Namespace) -> int:
    key = await register.revoke(arguments.key_id)
    print(
        f"{key.id} of {key.name!a} is revoked; every gateway refuses it within {times.KEY_FRESH_S:g} s", file=sys.stderr
    )
    return EXIT_OK


async def _list(register: KeyRegister, arguments: argparse.Namespace) -> int:
    keys: list[ApiKey] = []
    more, after = True, None
    while more:
        found, more = await register.page(limit=MAX_PAGE_RECORDS, after=after, newest_first=False)
        keys += found
        after = keys[-1].id if keys else None
    rows = [_row(key, time.time()) for key in keys]
    if arguments.as_json:
        print(json.dumps(rows, indent=2))
        return EXIT_OK
    lines = [("ID", "STATE", "ROLE", "CREATED", "EXPIRES", "NAME", "MODELS", "LIMITS"), *map(_line, rows)]
    print(in_columns(lines))
    return EXIT_OK


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    limits = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in row["limits"].items())
    models = "all" if row["models"] is None else ", ".join(row["models"])
    days = (_day(row["created_at"]), _day(row["expires_at"]))
    return row["id"], row["state"], row["role"], *days, row["name"], models, limits


def _row(key: ApiKey, now: float) -> dict[str, Any]:
    fields = msgspec.to_builtins(key.limits)
    shown = ("id", "name", "role", "models", "created_at", "expires_at", "revoked_at")
    return {name: getattr(key, name) for name in shown} | {"state": key.state(now), "limits": fields}


def _day(at: int | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at, UTC).date().isoformat()
