"""Untrusted adapter files: their sizes are bounded before they are read, and they never lie outside allowed places."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda_proto.adapters.files import CONFIG, MAX_CONFIG_BYTES, WEIGHTS, AdapterError, identify, inside, read_config


def write(path: Path, config: bytes = b"{}", weights: bytes = b"x") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_bytes(config)
    (path / WEIGHTS).write_bytes(weights)
    return path


def test_the_same_files_are_the_same_adapter_wherever_they_lie(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two", b" { } ")
    assert identify(one, 10).digest == identify(two, 10).digest != identify(write(tmp_path / "x", weights=b"y"), 10)
    assert identify(one, 10).path == str(one)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 200_000, "JSON"),
        (b"[]", "object"),
        (b'{"r": NaN}', "NaN"),
        (b'{"r": Infinity}', "Infinity"),
        (b'{"r": 1, "x": 0, "r": 2}', "given twice: 'r'"),
        (b'{"rank_pattern": {"a": 1, "a": 2}}', "given twice: 'a'"),
        (b" " * (MAX_CONFIG_BYTES + 1), "more than"),
    ],
)
def test_a_config_that_is_none_is_refused(config: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=why):
        read_config(write(tmp_path, config))


def test_weights_are_bounded_regular_files_in_one_format(tmp_path: Path) -> None:
    path = write(tmp_path / "a", weights=b"x" * 11)
    with pytest.raises(AdapterError, match="11 bytes, more than the 10"):
        identify(path, 10)
    (path / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match="No such file"):
        identify(path, 10)
    (path / "adapter_model.bin").touch()
    with pytest.raises(AdapterError, match="convert the adapter to safetensors"):
        identify(path, 10)
    os.mkfifo(path / WEIGHTS)
    with pytest.raises(AdapterError, match="not a regular file"):
        identify(path, 10)


def test_paths_and_links_do_not_lead_out(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", write(tmp_path / "outside")
    inner = write(allowed / "inner")
    (allowed / "link").symlink_to(outside)
    (allowed / "near").symlink_to(inner)
    assert inside(inner, [allowed]) == inside(allowed / "near", [allowed]) == inner.resolve()
    for path in (allowed / ".." / "outside", outside, allowed / "link", Path("/etc"), tmp_path / "allowed2"):
        (tmp_path / "allowed2").mkdir(exist_ok=True)
        with pytest.raises(AdapterError, match="outside"):
            inside(path, [allowed])
    for path in (allowed / "none", allowed / ("x" * 300), Path("a\0b")):
        with pytest.raises(AdapterError, match="no such directory"):
            inside(path, [allowed])
    (inner / CONFIG).unlink()
    (inner / CONFIG).symlink_to(outside / CONFIG)
    with pytest.raises(AdapterError, match="outside"):
        read_config(inner)
    (inner / CONFIG).unlink()
    (inner / CONFIG).symlink_to(inner / CONFIG)
    with pytest.raises(AdapterError):
        read_config(inner)


def test_a_hubs_cache_links_to_its_own_blobs(tmp_path: Path) -> None:
    blobs, snapshot = write(tmp_path / "models--a--b" / "blobs"), tmp_path / "models--a--b" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    for name in (CONFIG, WEIGHTS):
        (snapshot / name).symlink_to(Path("..", "..", "blobs", name))
    assert identify(snapshot, 100).digest == identify(blobs, 100).digest
