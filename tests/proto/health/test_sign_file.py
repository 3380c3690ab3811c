from __future__ import annotations

from pathlib import Path

import pytest

from pagoda_proto.health.sign_file import SignFile


def test_it_is_there_once_touched_whatever_an_earlier_life_left(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    path.touch()
    file = SignFile("alive_file", str(path))
    assert not path.exists()
    file.touch()
    assert path.exists()


def test_no_path_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SignFile("alive_file", "").touch()
    assert list(tmp_path.iterdir()) == []


def test_one_that_cannot_be_made_is_told_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^ready_file: .*No such file.*missing"):
        SignFile("ready_file", str(tmp_path / "missing" / "ready"))


def test_what_nobody_left_as_a_sign_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    for other in (path, tmp_path):
        with pytest.raises(ValueError, match=r"^alive_file: .* exists and is not an empty file"):
            SignFile("alive_file", str(other))
    assert path.read_text() == "{}"


def test_one_that_can_no_longer_be_touched_is_told_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    file = SignFile("alive_file", str(place / "alive"))
    place.rmdir()
    file.touch()
    file.touch()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["alive_file cannot be touched"]
