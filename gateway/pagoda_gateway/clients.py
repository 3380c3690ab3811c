"""Who asks is known from the head alone, before anything else of a request is read: its caller.

That is an address: its connection's peer, unless the peer is a proxy we were told to believe. Then it is the last
address in X-Forwarded-For that is no such proxy. Whatever stands before that address was written by somebody we do not
know. Addresses that one subscriber has by the thousand (IPv6 /64) count as one. Where there are API keys, whoever shows
none may ask for nothing but health and the page's files, and each key is a tenant, who shares cached prefixes with
nobody else.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from pagoda_gateway.page import files
from pagoda_proto.errors import ErrorCode, PagodaError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Scope = MutableMapping[str, Any]  # of ASGI


@dataclass(frozen=True, slots=True)
class Caller:
    """Made once per request, and handed on to whatever counts."""

    address: str
    tenant: str = ""  # names the API key, and does not tell it

    @property
    def key(self) -> str:
        """What is counted by caller is counted under this."""
        return self.address


def salt_of(caller: Caller, asked: str | None) -> str:
    """The salt of a caller's record: a tenant's own salts are told apart from equal ones of others."""
    return f"{caller.tenant}.{asked or ''}" if caller.tenant else asked or ""


def tenant_of(salt: str) -> str:
    """Whose a record with this salt is. What clients ask for has no dot."""
    tenant, dot, _ = salt.partition(".")
    return tenant if dot else ""


Identify = Callable[[Scope], Caller]
"""Raises PagodaError for a caller who may not ask here."""
NOBODY = Caller("")
KEY_CHARS = (8, 256)
TENANT_CHARS = 16
HEALTH_PATHS = frozenset(("/health", "/health/live", "/health/ready", "/health/startup", "/ping"))
OPEN_PATHS = HEALTH_PATHS | files.PATHS  # a browser shows no key before its page asks for one


def is_key(text: str) -> bool:
    return KEY_CHARS[0] <= len(text) <= KEY_CHARS[1] and all("!" <= char <= "~" and char != "," for char in text)


class ApiKeys:
    """Keys are compared by digest and all of them, so the time it takes tells nothing."""

    def __init__(self, keys: str) -> None:
        self._digests = [_digest(key.encode()) for key in keys.split(",") if key]

    def tenant_of(self, scope: Scope) -> str:
        """Whose key the request shows; "" where none is asked for. Raises PagodaError INVALID_API_KEY."""
        if not self._digests or scope["path"] in OPEN_PATHS:
            return ""
        shown = set(_shown_keys(scope["headers"]))
        if len(shown) != 1:
            why = "show one API key, as `authorization: Bearer KEY` or as `x-api-key: KEY`"
            raise PagodaError(ErrorCode.INVALID_API_KEY, f"{why}; the request has {len(shown)}")
        digest = _digest(shown.pop())
        if not sum([hmac.compare_digest(digest, known) for known in self._digests]):
            raise PagodaError(ErrorCode.INVALID_API_KEY, "the API key is not one of this server's")
        return digest.hex()[:TENANT_CHARS]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _shown_keys(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for name, value in headers:
        scheme, _, rest = value.strip().partition(b" ")
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization" and scheme.lower() == b"bearer":
            yield rest.strip()


def identify_by(forwarded_allow_ips: str, api_key: str) -> Identify:
    """Raises ValueError naming a wrong address."""
    proxies, keys = TrustedProxies(forwarded_allow_ips), ApiKeys(api_key)

    def identify(scope: Scope) -> Caller:
        return replace(proxies.caller_of(scope), tenant=keys.tenant_of(scope))

    return identify


class TrustedProxies:
    def __init__(self, addresses: str) -> None:
        """`addresses` are addresses and CIDR blocks, separated by commas. Raises ValueError naming a wrong one."""
        self._networks: list[Network] = []
        for item in filter(None, (part.strip() for part in addresses.split(","))):
            try:
                self._networks.append(ipaddress.ip_network(item))
            except ValueError as error:
                raise ValueError(f"{item!r} is neither an address nor a CIDR block: {error}") from error

    def trusts(self, address: str) -> bool:
        found = _address(address)
        return found is not None and any(found in network for network in self._networks)

    def caller_of(self, scope: Scope) -> Caller:
        peer = scope.get("client")
        forwarded_for = (value for name, value in scope["headers"] if name == b"x-forwarded-for")
        return Caller(self.client_of(peer[0] if peer else "", forwarded_for))

    def client_of(self, peer: str, forwarded_for: Iterable[bytes]) -> str:
        """The address to count a request under."""
        client = peer
        if self.trusts(peer):
            hops = b",".join(forwarded_for).decode("latin-1").split(",")
            for hop in reversed([hop.strip() for hop in hops]):
                if _address(hop) is None:
                    break
                client = hop
                if not self.trusts(hop):
                    break
        return client_key(client)


def client_key(address: str) -> str:
    """What connections and requests of one client have in common."""
    found = _address(address)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address if found is None else str(found)


def _address(text: str) -> Address | None:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found
