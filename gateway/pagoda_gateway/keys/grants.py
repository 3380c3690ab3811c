"""What a key allows is plain data that goes with its requests: rights, models, limits. Here it is asked.

A path is anybody's with the right that it needs, and it needs USE unless it is named here; so a route that nobody has
thought of is no operator's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from pagoda_proto.errors import ErrorCode, PagodaError


class Right(StrEnum):
    USE = "use"  # ask the model, and see what is one's own
    WATCH = "watch"  # numbers of all together, in which nobody's request is seen
    MANAGE = "manage"  # keys, and what each of them used
    LOAD = "load"  # adapters, for everybody


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
NEEDED: Mapping[str, frozenset[Right]] = {  # any of these, at the path and below it
    ADMIN_PATH: frozenset({Right.MANAGE}),
    LOAD_PATH: frozenset({Right.LOAD}),
    UNLOAD_PATH: frozenset({Right.LOAD}),
    "/metrics": frozenset({Right.WATCH}),
    "/load": frozenset({Right.USE, Right.WATCH}),
    "/version": frozenset({Right.USE, Right.WATCH}),
}
_USE = frozenset({Right.USE})


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a key may ask of one gateway; 0 is without limit, None as the gateway's options say."""

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
    """`models`: names that requests may use, those of adapters too; None for all. `weight`: its share where
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


# Where there are no keys; to make the first is no stranger's.
ANYBODY = Grant(rights=frozenset({Right.USE, Right.WATCH, Right.LOAD}))
