"""Parses a form with one file as it arrives: short fields are kept, and the file's bytes passed on."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem

MAX_FIELDS = 16
MAX_FIELD_BYTES = 1024
MAX_FORM_BYTES = 64 * 1024  # of everything but the file
MAX_FILENAME_CHARS = 255
FILE_FIELD = "file"
PLAIN_ENCODINGS = (b"binary", b"8bit", b"7bit")


def _bad(message: str) -> PagodaError:
    return PagodaError(ErrorCode.INVALID_ARGUMENT, message)


class UploadForm:
    """`feed` it the body and `close` it at the end. Only then are `fields` and `filename` complete."""

    def __init__(self, content_type: str) -> None:
        """Raises PagodaError for a content type that is not a form."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            why = "the content type must be multipart/form-data with a boundary"
            raise PagodaError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, why)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._name = ""
        self._in_file = self._done = False
        self._value = bytearray()
        self._file: list[bytes] = []
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._name_part,
                    "on_part_data": self._take,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _bad("the boundary of the form is too long") from error

    def feed(self, data: bytes) -> bytes:
        """Return the file's bytes in `data`. Raises PagodaError for an invalid form."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _bad("the body is not a form as its content type says") from error
        content = b"".join(self._file)
        self._file.clear()
        return content

    def close(self) -> None:
        """Raises PagodaError for a form without an end, or without a file."""
        if not self._done:
            raise _bad("the form has no end")
        if self.filename is None:
            raise InvalidParams([Problem(FILE_FIELD, "is required")])

    def _begin_part(self) -> None:
        self._disposition = b""
        self._value.clear()

    def _end_header(self) -> None:
        name, value = self._header
        known = bytes(name).lower()
        if known == b"content-disposition":
            self._disposition = bytes(value)
        elif known == b"content-transfer-encoding" and bytes(value).strip().lower() not in PLAIN_ENCODINGS:
            raise _bad("parts of a form are taken as they are, in no content-transfer-encoding")
        name.clear()
        value.clear()

    def _name_part(self) -> None:
        kind, options = parse_options_header(self._disposition)
        try:
            self._name = options.get(b"name", b"").decode()
            filename = options[b"filename"].decode() if b"filename" in options else None
        except UnicodeDecodeError as error:
            raise _bad("names in a form are UTF-8") from error
        if kind != b"form-data" or not self._name:
            raise _bad("every part of a form has a content-disposition with a name")
        self._in_file = filename is not None or self._name == FILE_FIELD
        if filename is not None or self._in_file:
            self._begin_file(filename)
        elif len(self.fields) == MAX_FIELDS or self._name in self.fields:
            raise _bad(f"a form has at most {MAX_FIELDS} fields, each of them once")

    def _begin_file(self, filename: str | None) -> None:
        shown = self._name[:64]
        if self._name != FILE_FIELD or self.filename is not None:
            raise InvalidParams([Problem(shown, f"is a file, and only one is accepted, as the field {FILE_FIELD!r}")])
        if filename is None or not filename.isprintable() or not 0 < len(filename) <= MAX_FILENAME_CHARS:
            rule = f"must be a file with a name of 1 to {MAX_FILENAME_CHARS} printable characters"
            raise InvalidParams([Problem(FILE_FIELD, rule)])
        self.filename = filename

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._file.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidParams([Problem(self._name[:64], f"must have at most {MAX_FIELD_BYTES} bytes")])

    def _end_part(self) -> None:
        if not self._in_file:
            try:
                self.fields[self._name] = self._value.decode()
            except UnicodeDecodeError as error:
                raise InvalidParams([Problem(self._name[:64], "is not UTF-8")]) from error

    def _end(self) -> None:
        self._done = True
