"""Headers of GGUF files: what is read, what is refused, and that every refusal names its cause."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gguf_files import GgufFile, Stored, pair, text

from pagoda_proto.model_files.gguf import BadGguf, Gguf, part_paths, plain_number, read_gguf

PAIRS: dict[str, Any] = {
    "general.architecture": "llama", "a.count": 7, "a.below": -3, "a.share": 0.1, "a.is": True,
    "a.words": ["one", "", "drei"], "a.numbers": [1, 2, 3], "a.halves": [0.5, 1.5],
}  # fmt: skip
TENSORS = {
    "one": Stored(struct.pack("<4f", 1, 2, 3, 0.1), (4,)),
    "two": Stored(bytes(34 * 2), (2, 32), "Q8_0"),
}


def write(path: Path, **changes: Any) -> Path:
    return GgufFile(**({"pairs": PAIRS, "tensors": TENSORS} | changes)).write(path / "m.gguf")


@pytest.mark.parametrize("version", [2, 3])
def test_values_and_places(tmp_path: Path, version: int) -> None:
    path = write(tmp_path, version=version)
    found = read_gguf(path)
    assert found.keys == PAIRS.keys()
    assert (found.take("general.architecture", str), found.take("a.count", int)) == ("llama", 7)
    assert (found.take("a.below", int), found.take("a.is", bool)) == (-3, True)
    assert found.take("a.share", float) == 0.1  # as written, not as float32 has it
    assert found.take("a.count", float) == 7.0
    assert found.items("a.words", str) == ["one", "", "drei"]
    assert found.items("a.numbers", int) == [1, 2, 3]
    assert found.items("a.halves", float) == [0.5, 1.5]
    assert found.maybe("a.nothing", int) is None
    assert found.items("a.nothing", int) is None
    assert found.take("a.nothing", int, 4) == 4
    two = found.tensors["two"]
    assert (two.kind, two.shape, two.end - two.begin) == ("Q8_0", (2, 32), 68)
    assert found.floats("one") == [1, 2, 3, 0.1]


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda found: found.take("a.words", str), "'a.words' must be of type str"),
        (lambda found: found.take("a.share", int), "'a.share' must be of type int"),
        (lambda found: found.items("a.words", int), "'a.words' must be an array of type int"),
        (lambda found: found.items("a.count", int), "'a.count' must be an array of type int"),
        (lambda found: found.take("a.nothing", int), "'a.nothing' is missing"),
        (lambda found: found.floats("two"), "'two' must be one-dimensional and F32"),
    ],
)
def test_a_value_of_another_type_is_refused(tmp_path: Path, read: Any, message: str) -> None:
    with pytest.raises(BadGguf, match=f"m.gguf: .*{message}"):
        read(read_gguf(write(tmp_path)))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"magic": b"GGML"}, "is not a GGUF file"),
    ({"version": 1}, "version 1"),
    ({"version": 0x03000000}, "big-endian"),
    ({"tensors": {"x": Stored(bytes(16), (9,))}}, "'x' of shape .9. and type F32 ends beyond the file"),
    ({"tensors": {"x": Stored(bytes(34), (33,), "Q8_0")}}, "'x' of shape .33. does not consist of blocks of 32"),
    ({"tensors": {"x": Stored(b"", (2**40, 2**40, 2**40, 32))}}, "ends beyond the file"),
    ({"tensors": {"x": Stored(b"", (0, 4))}}, "'x' of shape .0, 4. does not"),
    ({"tensors": {"x": Stored(b"", (1, 1, 1, 1, 1))}}, "'x' has 5 dimensions"),
    ({"tensors": {"x": Stored(bytes(16), (4,), 40)}}, "'x' is of type NVFP4, which is not supported"),
    ({"tensors": {"x": Stored(bytes(16), (4,), 977)}}, "'x' is of type 977"),
    ({"tensors": {"x": Stored(bytes(16), (4,), offset=4)}}, "'x' begins at 4, not a multiple of 32"),
    ({"tensors": {"x": Stored(bytes(16), (4,), offset=2**63)}}, "'x' of shape .4. and type F32 ends beyond"),
    ({"tensors": {"x": Stored(bytes(64), (16,)), "y": Stored(b"", (4,), offset=32)}}, "'x' and 'y' overlap"),
    ({"tensors": {"n" * 300: Stored(bytes(16), (4,))}}, "a string of 300 bytes"),
    ({"pairs": {"general.alignment": 24}}, "'general.alignment' is 24"),
    ({"pairs": {"general.alignment": 0}}, "'general.alignment' is 0"),
    ({"pairs": {"general.alignment": "x"}}, "'general.alignment' must be of type int"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadGguf, match=f"^m.gguf: .*{message}"):
        read_gguf(write(tmp_path, **changes))


HEAD = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
RAW: list[tuple[bytes, str]] = [
    (b"", "is empty"),
    (b"GG", "ends within its header"),
    (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "exceed the limits"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "exceed the limits"),
    (HEAD + struct.pack("<Q", 2**62), "a string of 4611686018427387904 bytes"),
    (HEAD + text("a") + struct.pack("<IQ", 8, 2**27), "ends within its header"),
    (HEAD + text("a") + struct.pack("<IIQ", 9, 4, 2**61), "ends within its header"),
    (HEAD + text("a") + struct.pack("<IIQ", 9, 8, 2**61), "ends within its header"),
    (HEAD + text("a") + struct.pack("<IIQ", 9, 9, 1), "'a' has values of type 9"),
    (HEAD + text("a") + struct.pack("<I", 99), "'a' has values of type 99"),
    (HEAD + struct.pack("<Q", 1) + b"\xff" + struct.pack("<IB", 7, 1), "not UTF-8"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair("a", 1) + pair("a", 1), "'a' occurs twice"),
]


@pytest.mark.parametrize(("content", "message"), RAW)
def test_headers_that_lead_nowhere_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(BadGguf, match=message):
        read_gguf(tmp_path / "m.gguf")


def everything(found: Gguf) -> None:
    """Ask for every value and for the bounds of every tensor."""
    for key in found.keys:
        for kind in (str, int, float, bool):
            for read in (found.maybe, found.items):
                try:
                    read(key, kind)
                except BadGguf:
                    continue
    for tensor in found.tensors.values():
        assert 0 <= tensor.begin < tensor.end <= tensor.file.stat().st_size


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_sec_30_a_damaged_gguf_is_refused_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever a few bytes of the file become, and wherever it is cut."""
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    raw = bytearray(GgufFile(PAIRS, TENSORS).encoded())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))])
    try:
        found = read_gguf(path)
    except BadGguf:
        return
    everything(found)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadGguf, match="No such file"):
        read_gguf(tmp_path / "m.gguf")


def test_a_file_that_becomes_shorter_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    found = read_gguf(path)
    path.write_bytes(path.read_bytes()[:80])
    with pytest.raises(BadGguf):
        found.items("a.halves", float)


def parts(path: Path, count: int = 3) -> list[Path]:
    """A split file: the first part has the metadata, and each part has a tensor."""
    paths = [path / f"m-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1)]
    for index, one in enumerate(paths):
        split = {"split.no": index, "split.count": count, "split.tensors.count": count}
        GgufFile((PAIRS if not index else {}) | split, {f"t{index}": TENSORS["one"]}).write(one)
    return paths


def test_parts_are_one_model(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    found = read_gguf(paths[0])
    assert {name: tensor.file for name, tensor in found.tensors.items()} == {f"t{i}": paths[i] for i in range(3)}
    assert found.take("a.count", int) == 7


def test_a_set_with_something_missing_is_refused(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    with pytest.raises(BadGguf, match=r"is part of 3; name the first one, m-00001-of-00003\.gguf"):
        read_gguf(paths[1])
    GgufFile({}, {"t0": TENSORS["one"]}).write(paths[2])
    with pytest.raises(BadGguf, match=r"m-00003-of-00003\.gguf: repeats tensors of an earlier part"):
        read_gguf(paths[0])
    GgufFile({}, {}).write(paths[2])
    with pytest.raises(BadGguf, match="the parts have 2 tensors instead of 3"):
        read_gguf(paths[0])
    paths[2].unlink()
    with pytest.raises(BadGguf, match=r"m-00003-of-00003\.gguf: No such file"):
        read_gguf(paths[0])


@pytest.mark.parametrize("name", ["model.gguf", "a-of-b.gguf", "m-1-of-3.gguf", "-00001-of-00002.gguf"])
def test_other_names_tell_of_no_set(name: str) -> None:
    assert part_paths(Path(name)) is None


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_plain_number_makes_the_same_bytes(value: float) -> None:
    assert struct.pack("<f", plain_number(value)) == struct.pack("<f", value)
