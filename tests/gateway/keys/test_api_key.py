"""The format of a key, and that nothing else is accepted as one."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_gateway.keys import api_key
from pagoda_gateway.keys.api_key import ApiKey, NewKey, digest_of, id_of
from pagoda_gateway.keys.grants import Limits
from pagoda_proto.errors import InvalidParams


def test_sec_23_a_key_has_256_random_bits_and_its_record_none_of_them() -> None:
    made = [NewKey(name="n").made(100.0) for _ in range(64)]
    assert len({text for _, text in made}) == len({key.id for key, _ in made}) == 64
    for key, text in made:
        public, secret = text.removeprefix("sk-pagoda-").split("-", 1)
        assert key.id == f"key_{public}"
        assert re.fullmatch(r"[A-Za-z0-9_-]{43}", secret)  # 256 bits in base64
        assert secret not in msgspec.json.encode(key).decode()
        assert secret not in key.shown
        assert id_of(text.encode()) == key.id
        assert key.digest == digest_of(text.encode())
        assert key.digest != digest_of(text.encode() + b"=")
    assert api_key.SECRET_BYTES * 8 == 256


@given(st.binary(max_size=90))
def test_whatever_is_shown_names_a_key_of_ours_or_none(shown: bytes) -> None:
    found = id_of(shown)
    assert found is None or api_key.is_id(found)


@pytest.mark.parametrize(
    "shown", ["key", "sk-pagoda-", "sk-pagoda-0123456789abcdef-short", "SK-PAGODA-0123456789abcdef"]
)
def test_what_looks_alike_is_no_key(shown: str) -> None:
    assert id_of(shown.encode()) is None
    assert id_of(f"sk-pagoda-0123456789abcdef-{'x' * 43}\n".encode()) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"models": ()}, "models"),
        ({"models": ("",)}, "models"),
        ({"models": ("x",) * 65}, "models"),
        ({"limits": Limits(tokens_per_minute=-1)}, "tokens_per_minute"),
        ({"limits": Limits(requests_per_minute=2**60)}, "requests_per_minute"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        NewKey(**{"name": "n"} | fields)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_a_key_ends_by_its_time_or_by_word() -> None:
    key, _ = NewKey(name="n", expires_at=200).made(100.0)
    assert [key.state(now) for now in (100.0, 199.9, 200.0)] == ["active", "active", "expired"]
    assert msgspec.structs.replace(key, revoked_at=150).state(100.0) == "revoked"
    with pytest.raises(InvalidParams, match="must be later than now, 200, got 200"):
        NewKey(name="n", expires_at=200).made(200.0)


def test_a_record_that_says_more_than_is_known_is_not_read() -> None:
    key, _ = NewKey(name="n").made(100.0)
    more = msgspec.json.decode(msgspec.json.encode(key)) | {"only_on_sundays": True}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(more), type=ApiKey)
