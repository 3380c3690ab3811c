"""`pagoda keys`: what it prints, and where; and what it refuses."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from pagoda.cli import main
from pagoda.processes.exit_codes import EXIT_CONFIG, EXIT_OK, EXIT_UNREACHABLE
from pagoda_gateway.keys.api_key import id_of


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store, named in the environment as an operator would, where no other user of the machine can read it."""
    path = tmp_path / "s.db"
    monkeypatch.setenv("PAGODA_STORE", f"sqlite://{path}")
    return path


def keys(*words: str) -> int:
    return main(["keys", *words])


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert keys("list", "--json") == EXIT_OK
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_sec_23_a_key_is_printed_once_and_alone(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys("create", "Ann", "--model", "a", "--model", "b", "--tokens-per-minute", "9") == EXIT_OK
    printed = capsys.readouterr()
    text = printed.out.rstrip("\n")
    assert printed.out == f"{text}\n"
    key_id = id_of(text.encode())
    assert key_id is not None
    assert key_id in printed.err
    assert text not in printed.err
    (row,) = listed(capsys)
    assert row["id"] == key_id
    assert (row["name"], row["role"], row["models"], row["limits"], row["state"]) == (
        "Ann", "client", ["a", "b"], {"tokens_per_minute": 9}, "active",
    )  # fmt: skip
    keys("list")
    assert key_id in capsys.readouterr().out
    assert store.stat().st_mode & 0o077 == 0
    for file in (store, store.with_name("s.db-wal")):  # the second vanishes with its last user
        with contextlib.suppress(FileNotFoundError):
            assert text.encode() not in file.read_bytes()


def test_a_new_store_is_told_and_no_directory_is_made_for_it(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for told in (True, False):
        assert keys("create", "Ann") == EXIT_OK
        assert (f"{store} is a new store" in capsys.readouterr().err) == told
    monkeypatch.setenv("PAGODA_STORE", f"sqlite://{store.parent}/mistyped/s.db")
    assert keys("create", "Ann") == EXIT_CONFIG
    assert f"there is no directory {store.parent}/mistyped" in capsys.readouterr().err
    assert not (store.parent / "mistyped").exists()


def test_keys_are_listed_oldest_first_and_revoked_by_id(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        keys("create", name, "--role", "admin", "--valid-days", "2")
    first, second = listed(capsys)
    assert [first["name"], second["name"], first["expires_at"] is None] == ["one", "two", False]
    assert keys("revoke", str(first["id"])) == EXIT_OK
    assert "every gateway refuses it within" in capsys.readouterr().err
    assert [row["state"] for row in listed(capsys)] == ["revoked", "active"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["revoke", "key_0123456789abcdef"], "there is no API key 'key_0123456789abcdef'"),
        (["create", ""], "name: must have 1 to 64 printable characters"),
        (["create", "x", "--model", ""], "models: a name has 1 to 256"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    keys("create", "first")
    assert keys(*words) == EXIT_CONFIG
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("action", [["create", "x"], ["list"], ["revoke", "key_x"]])
def test_without_the_gateways_store_there_is_nothing_to_do(
    action: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGODA_STORE", "")
    assert keys(*action) == EXIT_CONFIG
    assert "--store is needed" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_no_empty_list(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys("list") == EXIT_CONFIG
    assert f"there is no file {store}" in capsys.readouterr().err
    assert not store.exists()


def test_a_store_that_is_gone_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "directory").mkdir()
    assert keys("create", "x", "--store", f"sqlite://{tmp_path}/directory") == EXIT_UNREACHABLE
    assert "the store cannot be reached" in capsys.readouterr().err
