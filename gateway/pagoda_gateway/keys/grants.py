"""What a key allows, checked here: rights, models and limits, as plain data that travels with its requests.

A path needs the right listed for it here, and otherwise USE, so an unlisted route is never an operator's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from pagoda_proto.errors import ErrorCode, PagodaError


class Right(StrEnum):
    USE = "use"  # call the model, and see one's own data
    WATCH = "watch"  # see aggregate numbers, which reveal no single request
    MANAGE = "manage"  # manage keys, and see the usage of each
    LOAD = "load"  # load adapters, for everybody


class Role(StrEnum):
    CLIENT = "client"
    MONITOR = "monitor"
    ADMIN = "admin"


RIGHTS: Mapping[Role, frozenset[Right]] = {
    Role.CLIENT: frozenset({Right.USE}),
    Role.MONITOR: frozenset({Right.WATCH}),
    Role.ADMIN: frozenset(Right),
}
ADMIN_PATH = "/v1/admin"
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NEEDED: Mapping[str, frozenset[Right]] = {  # any of these rights, for the path and everything below it
    ADMIN_PATH: frozenset({Right.MANAGE}),
    LOAD_PATH: frozenset({Right.LOAD}),
    UNLOAD_PATH: frozenset({Right.LOAD}),
    "/metrics": frozenset({Right.WATCH}),
    "/load": frozenset({Right.USE, Right.WATCH}),
    "/version": frozenset({Right.USE, Right.WATCH}),
}
_USE = frozenset({Right.USE})


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key's limits in one gateway; 0 means no limit, None the default from the gateway's options."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    def or_else(self, defaults: Limits) -> Limits:
        found = {name: getattr(self, name) for name in LIMITS}
        return Limits(**{name: getattr(defaults, name) if value is None else value for name, value in found.items()})


LIMITS = Limits.__struct_fields__
NO_LIMITS = Limits(**dict.fromkeys(LIMITS, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """`models`: names that requests may use, including adapters; None for all. `weight`: the tenant's share where
    tenants take turns."""

    rights: frozenset[Right]
    models: tuple[str, ...] | None = None
    limits: Limits = NO_LIMITS
    weight: int = 1

    def allows_model(self, name: str) -> bool:
        return self.models is None or name in self.models

    def check_path(self, path: str) -> None:
        """Raises PagodaError FORBIDDEN. `path` is ASGI's."""
        found = (rights for place, rights in NEEDED.items() if f"{path}/".startswith(f"{place}/"))
        needed = next(found, _USE)
        if not needed & self.rights:
            names = " or ".join(role for role in Role if needed & RIGHTS[role])
            raise PagodaError(ErrorCode.FORBIDDEN, f"this needs an API key of the role {names}")


# For a server without keys; creating the first key is not open to strangers.
ANYBODY = Grant(rights=frozenset({Right.USE, Right.WATCH, Right.LOAD}))
