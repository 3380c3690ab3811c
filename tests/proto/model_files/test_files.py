"""The files of a directory, and those that a GGUF file stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.gguf_files import DEMO, GgufFile, write_demo

from pagoda_proto.model_files.files import FileTooLarge, gguf_in, model_files


def test_a_directory_has_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = model_files(tmp_path)
    assert files.read("config.json", 2) == b"{}"
    assert files.read("tokenizer.json", 2) is None
    with pytest.raises(FileTooLarge, match=r"config\.json: larger than 1 bytes"):
        files.read("config.json", 1)


def test_a_gguf_file_stands_for_those_it_was_made_of(tmp_path: Path) -> None:
    files = model_files(write_demo(tmp_path / "m.gguf"))
    assert json.loads(files.read("config.json", 10_000) or "")["architectures"] == ["LlamaForCausalLM"]
    whole = json.loads(files.read("tokenizer.json", 1_000_000) or "")
    assert whole == json.loads((DEMO / "tokenizer.json").read_text())
    assert "eos_token" in json.loads(files.read("tokenizer_config.json", 100_000) or "")
    assert "eos_token_id" in json.loads(files.read("generation_config.json", 10_000) or "")
    assert files.read("modules.json", 10_000) is None
    with pytest.raises(FileTooLarge, match=r"m\.gguf: its tokenizer\.json is larger than 10 bytes"):
        files.read("tokenizer.json", 10)


def test_models_of_a_directory_are_counted_by_their_first_parts(tmp_path: Path) -> None:
    names = ["a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"]
    for name in [*names, "c.bin"]:
        GgufFile().write(tmp_path / name)
    assert [path.name for path in gguf_in(tmp_path)] == names[:2]
