"""Safetensors directories: what is read, what is refused, and that every refusal names its cause."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pagoda_worker.checkpoints.checkpoint import CheckpointError, Wanted, open_checkpoint
from pagoda_worker.checkpoints.fingerprint import Entry

CPU = torch.device("cpu")


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c.half": torch.randn(2, 2, generator=generator).half(),
        "empty": torch.zeros(0, 4),
    }


def write(path: Path, header: Any, data: bytes = b"\0" * 64, length: int | None = None) -> Path:
    """A safetensors file with an arbitrary header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]} | changes


def test_a_single_file_in_any_dtype(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    seen: list[tuple[int, int]] = []
    with open_checkpoint(tmp_path, lambda done, of: seen.append((done, of))) as checkpoint:
        for name, tensor in tensors().items():
            assert torch.equal(checkpoint.get(name, tensor.dtype, CPU), tensor)
            assert torch.equal(checkpoint.get(name, torch.float32, CPU), tensor.float())
        assert checkpoint.num_bytes == 60 + 14 + 8
        assert checkpoint.dtype() == torch.float32
    assert seen[-1] == (82, 82)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_tensor_costs_no_look_at_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a tensor must not scan the others: a mixture of experts has tens of thousands."""
    names = [f"experts.{number}" for number in range(500)]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    looks = 0

    def num_bytes(one: Entry) -> int:
        nonlocal looks
        looks += 1
        return one.end - one.begin

    monkeypatch.setattr(Entry, "num_bytes", property(num_bytes))
    with open_checkpoint(tmp_path, lambda done, of: None) as checkpoint:
        for name in names:
            checkpoint.get(name, torch.float32, CPU)
    assert looks < 20 * len(names)


def test_tensors_outlive_the_checkpoint(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        kept = checkpoint.get("a", torch.float32, CPU)
    kept += 1  # the mapping is private: the file does not change
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.get("a", torch.float32, CPU) + 1, kept)


def test_shards(tmp_path: Path) -> None:
    whole = tensors()
    save_file({"a": whole["a"]}, tmp_path / "one.safetensors")
    save_file({"b": whole["b"], "stray": whole["a"]}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.entries) == {"a", "b"}
        assert torch.equal(checkpoint.get("b", torch.bfloat16, CPU), whole["b"])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../one.safetensors"}}, "outside the directory"),
        ({"weight_map": {"a": "one.safetensors", "z": "one.safetensors"}}, "one.safetensors lacks: z"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors: No such file"),
        ({"weight_map": {}}, "no 'weight_map'"),
        ([], "not a JSON object"),
    ],
)
def test_a_bad_index(tmp_path: Path, index: Any, message: str) -> None:
    save_file({"a": tensors()["a"]}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        {"t": entry(data_offsets=[0, 68], shape=[17])},
        {"t": entry(data_offsets=[-4, 60])},
        {"t": entry(data_offsets=[64, 0])},
        {"t": entry(data_offsets=[0])},
        {"t": entry(shape=[4, 5])},
        {"t": entry(shape=[-4, -4])},
        {"t": entry(shape=[True, 16])},
        {"t": entry(shape="16")},
        {"t": entry(dtype="F8")},
        {"t": entry(dtype=[])},
        {"t": None},
    ],
)
def test_entries_that_lie(tmp_path: Path, header: Any) -> None:
    with pytest.raises(CheckpointError, match="do not fit the file or their own shape: t"):
        open_checkpoint(write(tmp_path, header))


@pytest.mark.parametrize(
    ("header", "length"),
    [(b"{", None), (b"[]", None), ({}, 10**9), ({}, 2**63), ({}, 0), (b"[" * 100_000, None), (b"\xff{}", None)],
)
def test_headers_that_are_none(tmp_path: Path, header: Any, length: int | None) -> None:
    with pytest.raises(CheckpointError, match="header"):
        open_checkpoint(write(tmp_path, header, length=length))


def test_a_file_too_short_for_a_header(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\1\0\0")
    with pytest.raises(CheckpointError, match="header of 0 bytes in a file of 3"):
        open_checkpoint(tmp_path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_harmless(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever one byte of the header becomes: CheckpointError, or every tensor is readable."""
    path = tmp_path_factory.mktemp("damaged")
    save_file(tensors(), path / "model.safetensors")
    raw = bytearray((path / "model.safetensors").read_bytes())
    place = data.draw(st.integers(0, 8 + struct.unpack("<Q", raw[:8])[0] - 1))
    raw[place] = data.draw(st.integers(0, 255))
    (path / "model.safetensors").write_bytes(raw)
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:
        return
    with checkpoint:
        for name in checkpoint.entries:
            checkpoint.get(name, torch.float32, CPU).sum()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin", "x.pt"], "only pytorch_model.bin, x.pt found; convert the model to safetensors"),
        (["readme.md"], "neither model.safetensors nor model.safetensors.index.json found"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, files: list[str], message: str) -> None:
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        open_checkpoint(tmp_path / "nowhere")


def test_all_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    found = {
        "a": torch.zeros(2),
        "b": torch.zeros(3, dtype=torch.int8),
        "x": torch.zeros(1),
        "old.inv_freq": torch.zeros(1),
        "packed": torch.zeros(4),
        "spare": torch.zeros(2),
    }
    wanted = {
        "a": Wanted((3,)),
        "b": Wanted((3,)),
        "c": Wanted((1,)),
        "packed": Wanted((4,), ("I32", "I64")),
        "spare": Wanted((3,), optional=True),
        "absent": Wanted((3,), optional=True),
    }
    save_file(found, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.check(wanted, (".inv_freq",), tied=False)
    assert caught.value.problems == [
        "missing tensors: c",
        "unexpected tensors: x",
        "wrong shapes: a has shape [2], expected [3], spare has shape [2], expected [3]",
        "wrong dtypes: b is I8, expected F64 or F32 or F16 or BF16, packed is F32, expected I32 or I64",
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_model_may_carry_its_head(tmp_path: Path, tied: bool) -> None:
    save_file({"a": torch.zeros(2), "lm_head.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        if tied:
            checkpoint.check({"a": Wanted((2,))}, (), tied)
        else:
            with pytest.raises(CheckpointError, match=r"unexpected tensors: lm_head\.weight"):
                checkpoint.check({"a": Wanted((2,))}, (), tied)


def test_the_digest_tells_shapes_apart(tmp_path: Path) -> None:
    digests = set()
    for index, shape in enumerate(((2, 2), (4,), (4,))):
        path = tmp_path / str(index)
        path.mkdir()
        save_file({"a": torch.zeros(shape)}, path / "model.safetensors")
        digests.add(open_checkpoint(path).digest)
    assert len(digests) == 2


@pytest.mark.parametrize(("size", "told"), [(0, "cannot be mapped"), (40, "shorter than its header says")])
def test_a_file_that_is_cut_short_before_it_is_mapped_is_refused(tmp_path: Path, size: int, told: str) -> None:
    save_file({"a": torch.zeros(64)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        os.truncate(tmp_path / "model.safetensors", size)
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{told}"):
            checkpoint.stored("a")


def test_a_file_that_is_gone_before_it_is_mapped_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(64)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="cannot be mapped into memory: No such file"):
            checkpoint.stored("a")
