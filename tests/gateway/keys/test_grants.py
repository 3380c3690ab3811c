"""What a key with a given role may request, path by path."""

from __future__ import annotations

import pytest

from pagoda_gateway.keys.grants import ANYBODY, RIGHTS, Grant, Role
from pagoda_proto.errors import ErrorCode, PagodaError

WHO = {"anybody": ANYBODY} | {role.value: Grant(rights=RIGHTS[role]) for role in Role}


@pytest.mark.parametrize(
    ("path", "may"),
    [
        ("/v1/models", "anybody client admin"),
        ("/v1/usage", "anybody client admin"),
        ("/nothing/there", "anybody client admin"),
        ("/v1/administration", "anybody client admin"),
        ("/metricsx", "anybody client admin"),
        ("/metrics", "anybody monitor admin"),
        ("/metrics/", "anybody monitor admin"),
        ("/load", "anybody client monitor admin"),
        ("/v1/admin", "admin"),
        ("/v1/admin/", "admin"),
        ("/v1/admin/keys", "admin"),
        ("/v1/admin/keys/key_1", "admin"),
        ("/v1/admin/not/made/yet", "admin"),
    ],
)
def test_who_may_ask_at_a_path(path: str, may: str) -> None:
    for name, grant in WHO.items():
        if name in may.split():
            grant.check_path(path)
        else:
            with pytest.raises(PagodaError, match="API key of the role") as caught:
                grant.check_path(path)
            assert caught.value.code is ErrorCode.FORBIDDEN


def test_models_are_all_or_those_named() -> None:
    some = Grant(rights=frozenset(), models=("a", "b"))
    assert [some.allows_model(name) for name in ("a", "b", "c", "")] == [True, True, False, False]
    assert ANYBODY.allows_model("c")
