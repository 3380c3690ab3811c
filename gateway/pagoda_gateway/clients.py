"""Identifies a request's caller from its head alone, before the body is read.

A caller is an address: the connection's peer, unless the peer is a trusted proxy. Then it is the last address in
X-Forwarded-For that is not a trusted proxy; whatever precedes that address was written by strangers. All addresses of
an IPv6 /64, which one subscriber has, count as one. If there are API keys (`keys/`), a caller without one gets only
health and the page's files, and each key is a tenant, who shares cached prefixes with nobody else.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pagoda_gateway.keys.gate import Gate
from pagoda_gateway.keys.grants import ANYBODY, Grant
from pagoda_gateway.page import files

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Scope = MutableMapping[str, Any]  # of ASGI

_WITH_PORT = re.compile(r"\[([^]]*)\](?::\d+)?|([^:]*):\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Caller:
    """Made once per request, and passed to everything that counts by caller. `key` is the address to count under;
    `tenant` and `grant` belong to the API key.
    """

    key: str
    tenant: str = ""  # the API key's id, not the key itself
    grant: Grant = ANYBODY


class Origin(NamedTuple):
    """What a record says about its caller; see `RequestRecord`."""

    cache_salt: str
    tenant: str
    weight: int


def origin_of(caller: Caller, asked_salt: str | None = None) -> Origin:
    """Prefix a salt with its tenant, so that equal salts of two tenants differ. Without a key, the address is the
    tenant."""
    asked = asked_salt or ""
    salt = f"{caller.tenant}.{asked}" if caller.tenant else asked
    return Origin(salt, caller.tenant or caller.key, caller.grant.weight)


def tenant_of(salt: str) -> str:
    """The tenant of a record with this salt. Salts from clients contain no dot."""
    tenant, dot, _ = salt.partition(".")
    return tenant if dot else ""


Identify = Callable[[Scope], Awaitable[Caller]]
"""Raises PagodaError for an unknown caller."""
NOBODY = Caller("")
KEY_CHARS = (8, 256)
HEALTH_PATHS = frozenset(("/health", "/health/live", "/health/ready", "/health/startup", "/ping"))
OPEN_PATHS = HEALTH_PATHS | files.PATHS  # a browser sends no key until its page has asked for one


def is_key(text: str) -> bool:
    return KEY_CHARS[0] <= len(text) <= KEY_CHARS[1] and all("!" <= char <= "~" and char != "," for char in text)


def identify_by(forwarded_allow_ips: str, gate: Gate) -> Identify:
    """Raises ValueError naming a wrong address."""
    proxies = TrustedProxies(forwarded_allow_ips)

    async def identify(scope: Scope) -> Caller:
        caller = proxies.caller_of(scope)
        if scope["path"] in OPEN_PATHS:
            return caller
        holder = await gate.holder_of(scope["headers"])
        return replace(caller, tenant=holder.tenant, grant=holder.grant)

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
        """The address under which to count a request."""
        client = peer
        if self.trusts(peer):
            hops = b",".join(forwarded_for).decode("latin-1").split(",")
            for hop in map(_without_port, reversed(hops)):
                if _address(hop) is None:
                    break
                client = hop
                if not self.trusts(hop):
                    break
        return client_key(client)


def client_key(address: str) -> str:
    """The key under which all connections and requests of one client are counted."""
    found = _address(address)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address if found is None else str(found)


def _without_port(hop: str) -> str:
    """Strip the port: some proxies write `1.2.3.4:567` or `[2001:db8::5]:567`."""
    written = _WITH_PORT.fullmatch(hop.strip())
    return hop.strip() if written is None else written[written.lastindex or 0]


def _address(text: str) -> Address | None:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found
