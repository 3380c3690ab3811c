"""A key consists of a public id and a secret that is never stored; the record holds a digest of the key.

The secret has 256 random bits, so a plain SHA-256 of the key reveals nothing. The id finds the record of a key that a
client presents; digests are compared in constant time.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator

import msgspec

from pagoda_gateway.keys.grants import LIMITS, Limits, Role
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.records import MAX_WEIGHT

PREFIX = "sk-pagoda-"
ID_BYTES, SECRET_BYTES = 8, 32
MAX_NAME_CHARS = 64
MAX_MODELS, MAX_MODEL_CHARS = 64, 256
MAX_LIMIT = 2**53
_KEY = re.compile(rb"sk-pagoda-([0-9a-f]{16})-[A-Za-z0-9_-]{43}")
_ID = re.compile(r"key_[0-9a-f]{16}")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The record of a key; `digest` is in hex, `models` as in `Grant`, times in Unix seconds.

    An unknown field may restrict the key in a way that this version cannot see, so such a record is rejected.
    """

    id: str
    name: str
    digest: str
    created_at: int
    role: Role = Role.CLIENT
    models: tuple[str, ...] | None = None
    limits: Limits = Limits()
    weight: int = 1
    expires_at: int | None = None
    revoked_at: int | None = None

    @property
    def shown(self) -> str:
        """The part of the key that lists show."""
        return f"{PREFIX}{self.id.removeprefix('key_')}-.."

    def state(self, now: float) -> str:
        """active, expired or revoked."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and now >= self.expires_at else "active"


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a new key. The constructor raises InvalidParams."""

    name: str
    role: Role = Role.CLIENT
    models: tuple[str, ...] | None = None
    limits: Limits = Limits()
    weight: int = 1
    expires_at: int | None = None

    def __post_init__(self) -> None:
        problems = [*self._problems()]
        if problems:
            raise InvalidParams(problems)

    def _problems(self) -> Iterator[Problem]:
        if not (0 < len(self.name) <= MAX_NAME_CHARS and self.name.isprintable()):
            yield Problem("name", f"must have 1 to {MAX_NAME_CHARS} printable characters")
        if self.models is not None:
            if not 0 < len(self.models) <= MAX_MODELS:
                yield Problem("models", f"must be 1 to {MAX_MODELS} names, or left out for all, got {len(self.models)}")
            if any(not (0 < len(name) <= MAX_MODEL_CHARS and name.isprintable()) for name in self.models):
                yield Problem("models", f"a name has 1 to {MAX_MODEL_CHARS} printable characters")
        for name in LIMITS:
            value = getattr(self.limits, name)
            if value is not None and not 0 <= value <= MAX_LIMIT:
                yield Problem(name, f"must be between 0 (no limit) and {MAX_LIMIT}, got {value}")

        if not 1 <= self.weight <= MAX_WEIGHT:
            yield Problem("weight", f"must be between 1 and {MAX_WEIGHT}, got {self.weight}")

    def made(self, now: float) -> tuple[ApiKey, str]:
        """The record, and the key itself, which is never seen again. Raises InvalidParams."""
        if self.expires_at is not None and self.expires_at <= now:
            raise InvalidParams([Problem("expires_at", f"must be later than now, {int(now)}, got {self.expires_at}")])
        public = secrets.token_hex(ID_BYTES)
        text = f"{PREFIX}{public}-{secrets.token_urlsafe(SECRET_BYTES)}"
        fields = msgspec.structs.asdict(self)
        return ApiKey(id=f"key_{public}", digest=digest_of(text.encode()), created_at=int(now), **fields), text


def digest_of(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


NO_DIGEST = digest_of(b"")  # compared if there is no record, so that this takes as long


def id_of(key: bytes) -> str | None:
    """None if it does not have the form of our keys."""
    found = _KEY.fullmatch(key)
    return None if found is None else f"key_{found[1].decode()}"


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None
