"""The address under which a request is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_gateway.clients import Caller, TrustedProxies, client_key, origin_of, tenant_of
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.keys.grants import ANYBODY


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("9.9.9.9", [], "9.9.9.9"),
        ("9.9.9.9", [b"1.2.3.4"], "9.9.9.9"),  # an untrusted peer's header is ignored
        ("127.0.0.1", [], "127.0.0.1"),
        ("127.0.0.1", [b"1.2.3.4"], "1.2.3.4"),
        ("127.0.0.1", [b"6.6.6.6, 1.2.3.4"], "1.2.3.4"),  # entries before it are made up by the client
        ("127.0.0.1", [b"6.6.6.6", b"1.2.3.4"], "1.2.3.4"),
        ("127.0.0.1", [b"1.2.3.4, 10.1.2.3"], "1.2.3.4"),
        ("127.0.0.1", [b"10.1.2.3"], "10.1.2.3"),
        ("127.0.0.1", [b"nonsense"], "127.0.0.1"),
        ("127.0.0.1", [b"nonsense, 10.1.2.3"], "10.1.2.3"),
        ("127.0.0.1", [b"\xff"], "127.0.0.1"),
        ("127.0.0.1", [b""], "127.0.0.1"),
        ("127.0.0.1", [b"6.6.6.6:1, 1.2.3.4:56789, 10.1.2.3:443"], "1.2.3.4"),
        ("127.0.0.1", [b"1.2.3.4:port"], "127.0.0.1"),
        ("127.0.0.1", [b"1.2.3.4:567:8"], "127.0.0.1"),
        ("::ffff:127.0.0.1", [b"1.2.3.4"], "1.2.3.4"),
        ("::1", [b"[2001:db8::5]:567"], "2001:db8::/64"),
        ("::1", [b"[2001:db8::5], [::1]"], "2001:db8::/64"),
        ("127.0.0.1", [b"[2001:db8::5"], "127.0.0.1"),
        ("127.0.0.1", [b"[]:1"], "127.0.0.1"),
        ("::1", [b"2001:db8::5"], "2001:db8::/64"),
        ("", [b"1.2.3.4"], ""),
    ],
)
def test_whose_word_is_taken(peer: str, forwarded: list[bytes], client: str) -> None:
    assert TrustedProxies("127.0.0.1, ::1,10.0.0.0/8").client_of(peer, forwarded) == client


def test_sec_10_equal_salts_of_two_tenants_differ() -> None:
    salts = [origin_of(Caller("", tenant), asked).cache_salt for tenant in ("", "a", "b") for asked in (None, "s", "a")]
    assert len(set(salts)) == len(salts)
    assert origin_of(Caller(""), "s").cache_salt == "s"


@pytest.mark.parametrize("tenant", ["", "0123456789abcdef"])
@pytest.mark.parametrize("asked", [None, "s", "a-b_c", "0123456789abcdef"])
def test_a_salt_tells_whose_it_is(tenant: str, asked: str | None) -> None:
    assert tenant_of(origin_of(Caller("", tenant), asked).cache_salt) == tenant


@pytest.mark.parametrize("keys", ["short", "good-key-1,", "a b c d e f g", "k\u00e9y-of-eight", "x" * 257])
def test_sec_23_a_key_that_cannot_be_is_refused_and_not_shown(keys: str) -> None:
    with pytest.raises(ValueError, match=r"^api_key: a key must have 8 to 256 visible") as caught:
        GatewayConfig(api_key=keys)
    assert keys not in str(caught.value)


def test_nobody_is_believed_without_a_list() -> None:
    assert TrustedProxies("").client_of("127.0.0.1", [b"1.2.3.4"]) == "127.0.0.1"


def test_a_subscriber_of_ipv6_is_one_client() -> None:
    assert client_key("2001:db8::1") == client_key("2001:db8::ffff") != client_key("2001:db8:0:1::1")
    assert client_key("fe80::1%eth0") == "fe80::/64"
    assert client_key("::ffff:1.2.3.4") == "1.2.3.4"


@given(peer=st.sampled_from(["127.0.0.1", "9.9.9.9", "", "x"]), forwarded=st.lists(st.binary(max_size=20), max_size=3))
def test_any_header_gives_a_client(peer: str, forwarded: list[bytes]) -> None:
    assert isinstance(TrustedProxies("127.0.0.1").client_of(peer, forwarded), str)


@pytest.mark.parametrize("text", ["*", "10.0.0.0/33", "proxy.local", "10.0.0.1/8"])
def test_what_is_no_address_is_refused_at_start(text: str) -> None:
    with pytest.raises(ValueError, match="forwarded_allow_ips"):
        GatewayConfig(forwarded_allow_ips=text)


def test_whoever_shows_no_key_is_told_by_the_address() -> None:
    assert origin_of(Caller("10.0.0.1"))[1:] == ("10.0.0.1", 1)
    assert origin_of(Caller("10.0.0.1", "key_a", replace(ANYBODY, weight=3)))[1:] == ("key_a", 3)
