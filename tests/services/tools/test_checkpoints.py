"""From the name that a user gives for a model to its directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagoda.settings.problems import ConfigError
from pagoda.tools.checkpoints import DEMO_NAME, locate, served_name


def checkpoint(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_no_name_is_the_bundled_model() -> None:
    assert (locate("") / "config.json").is_file()
    assert served_name("") == DEMO_NAME


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path / "mine")
    assert locate(str(path)) == path
    monkeypatch.chdir(tmp_path)
    assert locate("mine") == locate("./mine") == path
    assert served_name("./mine/") == "mine"


def test_the_home_directory_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = checkpoint(tmp_path / "mine")
    assert locate("~/mine") == path


@pytest.mark.parametrize("model", ["", "."])
def test_what_is_no_model_of_the_hub_has_no_revision(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint(tmp_path / "mine"))
    locate(model)
    with pytest.raises(ConfigError, match=r"revision: .* is not a hub model"):
        locate(model, "main")


def test_a_hub_id_keeps_its_name() -> None:
    assert served_name("org/some-model") == "org/some-model"


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        ("/no/such/model", "no such directory"),
        ("./model", "no such directory"),
        ("a/b/c", "not a hub id"),
        ("org/no model", "not a hub id"),
        ("org/model", "HF_HUB_OFFLINE"),
    ],
)
def test_a_model_that_is_not_there_is_refused_with_its_cause(
    model: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=cause) as caught:
        locate(model)
    assert f"model {model}" in str(caught.value)


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        locate(str(tmp_path))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match="is a file but not a GGUF file"):
        locate(str(tmp_path / "model.bin"))


def test_a_gguf_file_is_itself_and_its_directory_may_stand_for_it(tmp_path: Path) -> None:
    path = tmp_path / "mine-Q8_0.gguf"
    path.touch()
    assert locate(str(path)) == locate(str(tmp_path)) == path
    assert served_name(str(path)) == "mine-Q8_0"
    (tmp_path / "config.json").write_text("{}")  # as repositories of GGUF files often have
    assert locate(str(tmp_path)) == path
    (tmp_path / "model.safetensors").touch()
    assert locate(str(tmp_path)) == tmp_path


def test_parts_of_one_model_are_one_and_several_models_are_refused_by_name(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{index}-of-00002.gguf" for index in (1, 2)]
    for part in parts:
        part.touch()
    assert locate(str(tmp_path)) == parts[0]
    (tmp_path / "mmproj.gguf").touch()
    with pytest.raises(ConfigError, match=r"2 GGUF models .* \(m-00001-of-00002\.gguf, mmproj\.gguf\); name one"):
        locate(str(tmp_path))
