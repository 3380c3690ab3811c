"""Whoever shows no key may ask only where there is none to show; where nobody knows whether there is, nobody may.

Keys come from the options, or from the store, in which they are made and revoked while gateways run. One in the store
that is revoked is refused `KEY_FRESH_S` later at every gateway that reaches the store; one that cannot reach it goes on
with the keys it has seen lately, and refuses others as unavailable, not as wrong.
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
    """When a key is asked for: where there is one, always, never."""

    AUTO, KEYS, NONE = WORDS = ("auto", "keys", "none")


class Holder(NamedTuple):
    """`tenant` names the key, and does not tell it; "" where none is asked for."""

    tenant: str
    grant: Grant


NOBODY = Holder("", ANYBODY)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionKeys:
    """Keys as options have them: separated by commas."""

    client: str = ""
    admin: str = ""

    def holders(self, defaults: Limits) -> Sequence[tuple[str, Holder]]:
        """By digest."""
        found = []
        for role, keys in ((Role.CLIENT, self.client), (Role.ADMIN, self.admin)):
            for key in filter(None, keys.split(",")):
                digest = digest_of(key.encode())
                found.append((digest, Holder(digest[:TENANT_CHARS], Grant(rights=RIGHTS[role], limits=defaults))))
        return found


class Gate:
    """`defaults` limit keys that have no limits of their own; `clock` is in Unix seconds, `now` monotonic."""

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
        """Whether it can let anybody in: it needs no store, or the store has said once whether there are keys."""
        return self._auth == Auth.NONE or bool(self._options) or self._locks.began

    async def learn(self) -> None:
        """Ask the store, where it has to be. Raises PagodaError where it does not answer."""
        if not self.knows:
            await self._locks.of("")

    async def is_open(self) -> bool:
        """Whether everybody may ask. Once it is not, it never is again. Raises PagodaError where nobody knows."""
        if self._auth == Auth.NONE:
            return True
        self._locked = self._locked or bool(await self._locks.of(""))
        return not self._locked

    async def holder_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Holder:
        """Whose key a request shows. All keys of options are compared, so the time it takes tells nothing.

        Raises:
            PagodaError: INVALID_API_KEY; UNAVAILABLE where the store would have to be asked and cannot be.
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
        """What a tenant's key allows now, for what was begun with it before. Raises PagodaError as `holder_of`."""
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
