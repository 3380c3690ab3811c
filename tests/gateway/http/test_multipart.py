"""A form is parsed alike however it is split into chunks, and a body that is no form is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_gateway.http.multipart import MAX_FIELD_BYTES, MAX_FIELDS, MAX_FILENAME_CHARS, UploadForm
from pagoda_proto.errors import ErrorCode, PagodaError

BOUNDARY = b"--xYz"
TYPE = "multipart/form-data; boundary=--xYz"


def part(name: str, value: bytes, extra: str = "") -> bytes:
    head = f'Content-Disposition: form-data; name="{name}"{extra}\r\n'
    return b"--" + BOUNDARY + b"\r\n" + head.encode() + b"\r\n" + value + b"\r\n"


def file(value: bytes, filename: str = "a.jsonl", name: str = "file") -> bytes:
    return part(name, value, f'; filename="{filename}"')


END = b"--" + BOUNDARY + b"--\r\n"


def read(body: bytes, cuts: list[int] | None = None) -> tuple[UploadForm, bytes]:
    form, content, start = UploadForm(TYPE), b"", 0
    for end in [*sorted(cuts or ()), len(body)]:
        content += form.feed(body[start:end])
        start = max(start, end)
    form.close()
    return form, content


@given(st.data())
@settings(max_examples=60)
def test_a_form_is_read_alike_however_it_is_cut(data: Any) -> None:
    alphabet = st.sampled_from([b"\r\n", b"-", b"--", b"----xYz", b"\r", b"x", b"\x00", b"\r\n----xY"])
    value = b"".join(data.draw(st.lists(alphabet, max_size=8)))
    if b"\r\n--" + BOUNDARY in b"\r\n" + value + b"\r\n":
        value = b""
    body = part("purpose", b"batch") + file(value) + part("later", b"\xc3\xa9") + END
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=6))
    form, content = read(body, cuts)
    assert content == value
    assert form.fields == {"purpose": "batch", "later": "é"}
    assert form.filename == "a.jsonl"


@given(st.binary(max_size=200))
@settings(max_examples=60)
def test_whatever_comes_is_a_form_or_refused(body: bytes) -> None:
    for tail in (b"", END):
        try:
            form, _ = read(b"--" + BOUNDARY + body + tail)
        except PagodaError:
            continue
        assert form.filename is not None


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no end"),
        (END, "file: is required"),
        (part("purpose", b"batch") + END, "file: is required"),
        (file(b"x"), "no end"),
        (file(b"x") + file(b"y") + END, "only one is accepted"),
        (file(b"x", name="image") + END, "image: is a file"),
        (part("file", b"x") + END, "must be a file with a name"),
        (file(b"x", filename="") + END, "must be a file with a name"),
        (file(b"x", filename="n" * (MAX_FILENAME_CHARS + 1)) + END, "must be a file with a name"),
        (part("purpose", b"x" * (MAX_FIELD_BYTES + 1)) + END, "purpose: must have at most"),
        (part("a", b"1") + part("a", b"2") + file(b"") + END, "each of them once"),
        (b"".join(part(f"f{i}", b"") for i in range(MAX_FIELDS + 1)) + END, f"at most {MAX_FIELDS}"),
        (part("a", b"\xff") + END, "not UTF-8"),
        (part("", b"") + END, "with a name"),
        (b"--" + BOUNDARY + b"\r\nContent-Type: text/plain\r\n\r\nx\r\n" + END, "with a name"),
        (part("a", b"1", "\r\nContent-Transfer-Encoding: base64") + END, "content-transfer-encoding"),
        (b"no form at all", "not a form"),
        (part("a" * 5000, b"") + END, "not a form"),
    ],
)
def test_what_is_no_such_form_is_a_400(body: bytes, says: str) -> None:
    with pytest.raises(PagodaError, match=says) as caught:
        read(body)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=x"])
def test_other_content_types_are_not_taken(kind: str) -> None:
    with pytest.raises(PagodaError) as caught:
        UploadForm(kind)
    assert caught.value.code is ErrorCode.UNSUPPORTED_MEDIA_TYPE


def test_a_boundary_is_short() -> None:
    with pytest.raises(PagodaError, match="boundary"):
        UploadForm(f"multipart/form-data; boundary={'b' * 300}")
