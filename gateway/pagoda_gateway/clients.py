"""Who asks is known from the head alone, before anything else of a request is read: its caller.

That is an address: its connection's peer, unless the peer is a proxy we were told to believe. Then it is the last
address in X-Forwarded-For that is no such proxy. Whatever stands before that address was written by somebody we do not
know. Addresses that one subscriber has by the thousand (IPv6 /64) count as one. Where there are API keys (`keys/`),
whoever shows none may ask for nothing but health and the page's files, and each key is a tenant, who shares cached
prefixes with nobody else.
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
    """Made once per request, and handed on to whatever counts by caller, which it does under `key`: an address.
    `tenant` and `grant` are its API key's.
    """

    key: str
    tenant: str = ""  # names the API key, and does not tell it
    grant: Grant = ANYBODY


class Origin(NamedTuple):
    """What a record says of who asks; see `RequestRecord`."""

    cache_salt: str
    tenant: str
    weight: int


def origin_of(caller: Caller, asked_salt: str | None = None) -> Origin:
    """A tenant's own salts are told apart from equal ones of others. Whoever shows no key is told by the address."""
    asked = asked_salt or ""
    salt = f"{caller.tenant}.{asked}" if caller.tenant else asked
    return Origin(salt, caller.tenant or caller.key, caller.grant.weight)


def tenant_of(salt: str) -> str:
    """Whose a record with this salt is. What clients ask for has no dot."""
    tenant, dot, _ = salt.partition(".")
    return tenant if dot else ""


Identify = Callable[[Scope], Awaitable[Caller]]
"""Raises PagodaError for a caller who is not known here."""
NOBODY = Caller("")
KEY_CHARS = (8, 256)
HEALTH_PATHS = frozenset(("/health", "/health/live", "/health/ready", "/health/startup", "/ping"))
OPEN_PATHS = HEALTH_PATHS | files.PATHS  # a browser shows no key before its page asks for one


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
        """The address to count a request under."""
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
    """What connections and requests of one client have in common."""
    found = _address(address)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address if found is None else str(found)


def _without_port(hop: str) -> str:
    """Some proxies write `1.2.3.4:567`, or `[2001:db8::5]:567`."""
    written = _WITH_PORT.fullmatch(hop.strip())
    return hop.strip() if written is None else written[written.lastindex or 0]


def _address(text: str) -> Address | None:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found
