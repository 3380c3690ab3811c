"""Model directories are untrusted data: no code in them runs, and damage is refused with a message."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.security.starting import Ended, run_worker

from pagoda.tools.checkpoints import locate
from pagoda_gateway.text.model_text import BadModelFiles, ModelText
from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.model import load_model

DEMO = locate("")
DEPTH = 100_000  # nested brackets


class Canary:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def demo_copy(directory: Path, *left_out: str) -> Path:
    copy = directory / "model"
    copy.mkdir()
    for file in DEMO.iterdir():
        if file.name not in left_out:
            (copy / file.name).write_bytes(file.read_bytes())
    return copy


def change_config(model: Path, **fields: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def start_worker(model: Path) -> Ended:
    return run_worker(model, model.parent / "worker.log")


@pytest.mark.e2e
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM"], ids=["native", "fallback"])
def test_sec_06_pickled_weights_are_refused_and_never_opened(tmp_path: Path, architecture: str) -> None:
    model, canary = demo_copy(tmp_path, "model.safetensors"), tmp_path / "canary"
    change_config(model, architectures=[architecture], model_type="llama" if "Llama" in architecture else "gpt_neox")
    with zipfile.ZipFile(model / "pytorch_model.bin", "w") as archive:  # in the format that torch.save writes
        archive.writestr("archive/data.pkl", pickle.dumps(Canary(canary)))
        archive.writestr("archive/version", "3")
    done = start_worker(model)
    assert done.returncode == 2
    assert "pytorch_model.bin" in done.stderr
    assert "safetensors" in done.stderr
    assert "Traceback" not in done.stderr
    assert not canary.exists()


@pytest.mark.e2e
@pytest.mark.parametrize("model_type", ["llama", "of_our_own"])
def test_sec_26_code_in_a_model_directory_never_runs(tmp_path: Path, model_type: str) -> None:
    model, canary = demo_copy(tmp_path), tmp_path / "canary"
    code = f"import os\nos.mkdir({str(canary)!r})\n"
    names = ("configuration_own", "modeling_own", "tokenization_own")
    for name in names:
        (model / f"{name}.py").write_text(code)
    auto_map = {"AutoConfig": "configuration_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    change_config(model, auto_map=auto_map, model_type=model_type)
    if model_type == "llama":
        load_model(WorkerConfig(model=str(model), max_tokens_per_step=64))  # with our own model classes
    else:
        change_config(model, architectures=["OwnForCausalLM"])
        done = start_worker(model)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    ModelText.load(model)
    assert not canary.exists()


def nested(kind: str) -> str:
    return {"lists": "[" * DEPTH + "]" * DEPTH, "objects": '{"a":' * DEPTH + "1" + "}" * DEPTH}[kind]


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["lists", "objects"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_sec_30_nesting_without_end_is_refused_by_the_worker(tmp_path: Path, file: str, kind: str) -> None:
    model = demo_copy(tmp_path, file)
    data = ('{"x":' + nested(kind) + "}").encode()
    (model / file).write_bytes(data if file == "config.json" else struct.pack("<Q", len(data)) + data)
    done = start_worker(model)
    assert done.returncode == 2, done.stderr[-2000:]
    assert file in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["lists", "objects"])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_sec_30_nesting_without_end_is_refused_by_the_gateway(tmp_path: Path, file: str, kind: str) -> None:
    model = demo_copy(tmp_path)
    (model / file).write_text('{"x":' + nested(kind) + "}")
    with pytest.raises(BadModelFiles, match=file):
        ModelText.load(model)


@settings(max_examples=40)
@given(data=st.data())
def test_sec_30_a_damaged_tokenizer_is_refused_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = demo_copy(tmp_path_factory.mktemp("damaged"))
    file = model / data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        text = ModelText.load(model)
    except BadModelFiles:
        return
    text.decode(text.encode("2 + 3"))
