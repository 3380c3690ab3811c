from __future__ import annotations

from pathlib import Path

import pytest

from pagoda_worker.process.signs import Signs


def test_each_file_is_touched_by_its_own_sign_and_what_was_left_is_removed(tmp_path: Path) -> None:
    alive, ready = tmp_path / "alive", tmp_path / "ready"
    ready.touch()
    signs = Signs(str(alive), str(ready))
    signs.clear()
    assert list(tmp_path.iterdir()) == []
    signs.alive()
    assert list(tmp_path.iterdir()) == [alive]
    signs.ready()
    assert sorted(tmp_path.iterdir()) == [alive, ready]


def test_no_file_is_no_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    signs = Signs()
    signs.clear()
    signs.alive()
    signs.ready()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_made_is_told_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^ready_file: .*No such file.*missing"):
        Signs("", str(tmp_path / "missing" / "ready")).clear()


def test_a_file_that_can_no_longer_be_touched_is_told_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    signs = Signs(str(place / "alive"))
    signs.clear()
    place.rmdir()
    signs.alive()
    signs.alive()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["alive_file cannot be touched"]
