"""A GGUF file as a checkpoint: the authors' tensors under the authors' names, or a refusal that names the tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.gguf_files import DEMO, GgufFile, Stored, demo_pairs, demo_tensors, write_demo

from pagoda_proto.pooling.kinds import architecture_of
from pagoda_worker.checkpoints.checkpoint import CheckpointError
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.checkpoints.gguf import open_gguf, open_weights
from pagoda_worker.checkpoints.reading import read_config
from pagoda_worker.loading.model import native_spec

CPU = torch.device("cpu")
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.mark.parametrize("kind", DTYPES)
def test_tensors_are_those_that_were_written(kind: str, tmp_path: Path) -> None:
    published = load_file(DEMO / "model.safetensors")
    seen: list[tuple[int, int]] = []
    with open_weights(write_demo(tmp_path / "m.gguf", kind), lambda done, of: seen.append((done, of))) as checkpoint:
        assert checkpoint.entries.keys() == published.keys()
        for name, tensor in published.items():
            dtype = DTYPES[kind] if tensor.dim() > 1 else torch.float32
            assert torch.equal(checkpoint.get(name, torch.float32, CPU), tensor.to(dtype).float())
        assert checkpoint.dtype() == DTYPES[kind]
    assert seen[-1] == (checkpoint.num_bytes, checkpoint.num_bytes)


def test_blocks_are_widened_where_numbers_are_wanted(tmp_path: Path) -> None:
    path = write_demo(tmp_path / "m.gguf", "Q8_0")
    raw = np.frombuffer(demo_tensors("Q8_0")["token_embd.weight"].data, np.uint8).reshape(-1, 34)
    values = raw[:, 2:].view(np.int8).astype(np.float32) * raw[:, :2].copy().view(np.float16).astype(np.float32)
    with open_gguf(path) as checkpoint:
        found = checkpoint.get("model.embed_tokens.weight", torch.float32, CPU)
        assert np.array_equal(found.numpy().reshape(-1, 32), values)
        assert torch.equal(checkpoint.get("lm_head.weight", torch.float32, CPU), found)  # read a second time


def test_other_weights_are_another_model_and_the_same_the_same(tmp_path: Path) -> None:
    digests = [open_gguf(write_demo(tmp_path / f"{name}.gguf", "Q8_0")).digest for name in ("a", "b")]
    tensors = demo_tensors("Q8_0")
    name = "blk.2.ffn_up.weight"
    data = bytearray(tensors[name].data)
    data[2] ^= 1
    changed = GgufFile(demo_pairs(), tensors | {name: replace(tensors[name], data=bytes(data))})
    assert digests[0] == digests[1]
    assert open_gguf(changed.write(tmp_path / "c.gguf")).digest != digests[0]
    assert open_gguf(write_demo(tmp_path / "d.gguf", "F16")).digest != digests[0]


REFUSED: list[tuple[str, Stored, str]] = [
    ("blk.0.attn_sinks.weight", Stored(bytes(16), (4,)), "'blk.0.attn_sinks.weight' is not a known tensor of"),
    ("blk.00.attn_q.weight", Stored(bytes(16), (4,)), "'blk.00.attn_q.weight' is not a known"),
    ("v.patch_embd.weight", Stored(bytes(16), (4,)), "'v.patch_embd.weight' is not a known"),
    ("blk.0.ffn_up_exps.bias", Stored(bytes(272), (1, 256), "Q8_0"), "'blk.0.ffn_up_exps.bias' is a vector or bias"),
    ("blk.0.attn_norm.weight", Stored(bytes(272), (256,), "Q8_0"), "'blk.0.attn_norm.weight' is a vector or bias"),
]


@pytest.mark.parametrize(("name", "tensor", "message"), REFUSED)
def test_a_tensor_that_nobody_knows_is_refused_by_name(name: str, tensor: Stored, message: str, tmp_path: Path) -> None:
    path = GgufFile(demo_pairs(), demo_tensors() | {name: tensor}).write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)


def test_sinks_have_one_name(tmp_path: Path) -> None:
    """A tensor with the other name would otherwise be read in place of the sinks."""
    pairs = demo_pairs() | {"general.architecture": "gpt-oss", "gpt-oss.attention.head_count": 4}
    tensors = demo_tensors() | {"blk.0.attn_sinks.weight": Stored(bytes(16), (4,))}
    with open_gguf(GgufFile(pairs, tensors).write(tmp_path / "m.gguf")) as checkpoint:
        assert "model.layers.0.self_attn.sinks" in checkpoint.entries
    tensors |= {"blk.0.attn_sinks.bias": Stored(bytes(16), (4,))}
    with pytest.raises(CheckpointError, match=r"'blk\.0.attn_sinks\.bias' is not a known tensor of"):
        open_gguf(GgufFile(pairs, tensors).write(tmp_path / "m.gguf"))


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    pairs = demo_pairs() | {"general.architecture": "gpt-oss", "gpt-oss.attention.head_count": 4}
    tensors = demo_tensors() | {"blk.0.post_attention_norm.weight": Stored(bytes(1024), (256,))}
    with pytest.raises(CheckpointError, match=r"'blk\.0\.post_attention_norm\.weight' maps to"):
        open_gguf(GgufFile(pairs, tensors).write(tmp_path / "m.gguf"))


@cache
def small_model() -> bytes:
    """Everything that a header can have, with tensors of a few bytes."""
    tensors = {name: Stored(bytes(64), (1, 32), "F16") for name in demo_tensors()}
    experts = {"blk.0.ffn_up_exps.weight": Stored(bytes(36), (2, 1, 32), "Q4_0")}
    pairs = {key: value for key, value in demo_pairs(False).items() if not key.startswith("tokenizer.")}
    return GgufFile(pairs | {"tokenizer.ggml.tokens": ["a", "b"]}, tensors | experts).encoded()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sec_30_damage_of_a_gguf_is_refused_by_the_worker(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The configuration or the tensors are refused; otherwise every tensor can be read to the last byte."""
    path, raw = tmp_path_factory.mktemp("damaged") / "m.gguf", bytearray(small_model())
    for _ in range(data.draw(st.integers(1, 2))):
        raw[data.draw(st.integers(0, 4000))] = data.draw(st.one_of(st.integers(0, 255), st.just(0)))
    path.write_bytes(raw)
    try:
        fields = read_config(path)
        native_spec(architecture_of(fields), fields)
    except (CheckpointError, UnsupportedConfig):
        pass
    try:
        checkpoint = open_gguf(path)
    except CheckpointError:
        return
    with checkpoint:
        for name in checkpoint.entries:
            if name not in checkpoint.undone:  # those are undone only for checked shapes
                checkpoint.get(name, torch.float32, CPU).sum()


def test_sec_30_experts_without_number_are_refused(tmp_path: Path) -> None:
    many = Stored(bytes(2**19), (2**18, 1, 1), "F16")
    path = GgufFile(demo_pairs(), {"blk.0.ffn_up_exps.weight": many, "blk.1.ffn_up_exps.weight": many})
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_up_exps\.weight' has 262144 matrices"):
        open_gguf(path.write(tmp_path / "m.gguf"))


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: path.write_bytes(b"GGUF"), "ends within its header"),
    (lambda path: GgufFile({"general.architecture": "bert"}).write(path), "architecture 'bert' is not one of"),
    (lambda path: None, "No such file"),
]


@pytest.mark.parametrize(("write", "message"), BROKEN)
def test_a_file_that_is_not_sound_is_refused_and_named_once(
    write: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=message) as caught:
        open_gguf(tmp_path / "m.gguf")
    assert str(caught.value).count("m.gguf") == 1
