"""A request without a key is admitted only if the server has no keys; while that is unknown, no request is admitted.

Keys come from the options, or from the store, where they are created and revoked while gateways run. A key revoked in
the store is refused within `KEY_FRESH_S` by every gateway that reaches the store; a gateway that cannot reach it keeps
accepting keys it has seen lately, and refuses others as unavailable, not as wrong.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagoda_gateway.keys.answers import Answers
from pagoda_gateway.keys.api_key import NO_DIGEST, ApiKey, digest_of, id_of, is_id
from pagoda_gateway.keys.grants import ANYBODY, RIGHTS, Grant, Limits, Role
from pagoda_gateway.keys.register import KeyRegister
from pagoda_proto.errors import ErrorCode, PagodaError

TENANT_CHARS = 16
FOREVER_S = float("inf")


class Auth:
    """When a key is required: if the server has one, always, never."""

    AUTO, KEYS, NONE = WORDS = ("auto", "keys", "none")


class Holder(NamedTuple):
    """`tenant` identifies the key without revealing it; "" if none is required."""

    tenant: str
    grant: Grant


NOBODY = Holder("", ANYBODY)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionKeys:
    """Keys given as options, separated by commas."""

    client: str = ""
    admin: str = ""

    def holders(self, defaults: Limits) -> Sequence[tuple[str, Holder]]:
        """Pairs of a key's digest and its holder."""
        found = []
        for role, keys in ((Role.CLIENT, self.client), (Role.ADMIN, self.admin)):
            for key in filter(None, keys.split(",")):
                digest = digest_of(key.encode())
                found.append((digest, Holder(digest[:TENANT_CHARS], Grant(rights=RIGHTS[role], limits=defaults))))
        return found


class Gate:
    """`defaults` apply to keys without limits of their own; `clock` returns Unix seconds, `now` is monotonic."""

    def __init__(
        self,
        register: KeyRegister,
        options: OptionKeys,
        *,
        auth: str = Auth.AUTO,
        defaults: Limits,
        clock: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options.holders(defaults)
        self._auth = auth
        self._defaults = defaults
        self._clock = clock
        self._keys: Answers[ApiKey] = Answers(register.find, now)
        self._locked = bool(self._options) or auth == Auth.KEYS

        async def locked(_: str) -> bool:
            return await register.any()

        self._locks: Answers[bool] = Answers(locked, now, FOREVER_S)

    @property
    def knows(self) -> bool:
        """Whether it can admit requests: it needs no store, or the store has once said whether there are keys."""
        return self._auth == Auth.NONE or bool(self._options) or self._locks.began

    async def learn(self) -> None:
        """Ask the store whether there are keys, if that matters. Raises PagodaError if it does not answer."""
        if not self.knows:
            await self._locks.of("")

    async def is_open(self) -> bool:
        """Whether no key is required. Once false, it stays false. Raises PagodaError if that is unknown."""
        if self._auth == Auth.NONE:
            return True
        self._locked = self._locked or bool(await self._locks.of(""))
        return not self._locked

    async def holder_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Holder:
        """The holder of the key that a request presents. Compares all keys of options, so that timing reveals nothing.

        Raises:
            PagodaError: INVALID_API_KEY; UNAVAILABLE if the store is needed and cannot be reached.
        """
        if await self.is_open():
            return NOBODY
        shown = set(_shown_keys(headers))
        if len(shown) != 1:
            why = "show one API key, as `authorization: Bearer KEY` or as `x-api-key: KEY`"
            raise PagodaError(ErrorCode.INVALID_API_KEY, f"{why}; the request has {len(shown)}")
        key = shown.pop()
        digest = digest_of(key)
        found = [holder for known, holder in self._options if hmac.compare_digest(digest, known)]
        return found[0] if found else await self._holder_in_store(key, digest)

    async def _holder_in_store(self, shown: bytes, digest: str) -> Holder:
        key_id = id_of(shown)
        key = None if key_id is None else await self._keys.of(key_id)
        is_it = hmac.compare_digest(NO_DIGEST if key is None else key.digest, digest)
        if key is None or not is_it:
            raise PagodaError(ErrorCode.INVALID_API_KEY, "the API key is not one of this server's")
        return self._holder(key)

    def _holder(self, key: ApiKey) -> Holder:
        state = key.state(self._clock())
        if state != "active":
            raise PagodaError(ErrorCode.INVALID_API_KEY, f"the API key is {state}")
        limits = key.limits.or_else(self._defaults)
        return Holder(key.id, Grant(rights=RIGHTS[key.role], models=key.models, limits=limits, weight=key.weight))

    async def grant_of(self, tenant: str) -> Grant:
        """What a tenant's key allows now, for work begun with it earlier. Raises PagodaError as `holder_of` does."""
        if not tenant:
            return ANYBODY
        of_options = [holder.grant for _, holder in self._options if holder.tenant == tenant]
        if of_options:
            return of_options[0]
        key = await self._keys.of(tenant) if is_id(tenant) else None
        if key is None:
            raise PagodaError(ErrorCode.INVALID_API_KEY, "the API key that this was started with is no longer valid")
        return self._holder(key).grant

    async def aclose(self) -> None:
        await self._keys.aclose()
        await self._locks.aclose()


def _shown_keys(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for name, value in headers:
        scheme, _, rest = value.strip().partition(b" ")
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization" and scheme.lower() == b"bearer":
            yield rest.strip()
