"""Decodes the tokens' bytes as UTF-8, holding back bytes that may still become a character.

Each token is processed once, so the cost is linear, and a token costs the same in a text of any length.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pagoda_gateway.text.vocabulary import TokenTable

REPLACEMENT = "\ufffd"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("pagoda-replace-each-byte", _replace_each_byte)
_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Tokens in, whole characters out: the concatenation of all `push` and one `flush` is the text of all tokens.

    Args:
        table: The tokenizer's bytes.
        skip_special_tokens: Leave special tokens out of the text, except `visible` ones.
        at_start: The first token opens a whole text, so a tokenizer's leading space is dropped. False for tokens that
            continue a prompt: there the space is part of the answer.

    Invalid UTF-8 becomes U+FFFD: by the usual "maximal subpart" rule for byte-level tokenizers, one per byte for
    byte-fallback ones.
    """

    def __init__(
        self,
        table: TokenTable,
        *,
        skip_special_tokens: bool = True,
        at_start: bool = False,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        self._table = table
        self._skipped = table.special_ids - visible if skip_special_tokens else frozenset()
        self._decoder = _decoder("replace" if table.rules.byte_level else "pagoda-replace-each-byte")
        self._at_start = at_start
        self._strip = table.rules.strip_left[1] if at_start else 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the characters that `token_ids` complete."""
        table, skipped = self._table, self._skipped
        shown = [token_id for token_id in token_ids if token_id not in skipped]
        if not shown:
            return ""
        if self._at_start:
            self._at_start = False
            data = table.first_bytes_of(shown[0]) + b"".join(map(table.bytes_of, shown[1:]))
        else:
            data = b"".join(map(table.bytes_of, shown))
        if self._strip:
            data = self._strip_left(data)
        return self._decoder.decode(data)

    def flush(self) -> str:
        """End of the tokens: return what an incomplete character leaves behind."""
        return self._decoder.decode(b"", True)

    def _strip_left(self, data: bytes) -> bytes:
        mark = self._table.rules.strip_left[0].encode()
        while self._strip and data.startswith(mark):
            data = data[1:]
            self._strip -= 1
        if data:
            self._strip = 0
        return data
