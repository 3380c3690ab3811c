"""The output side of a tokenizer: a table from token id to bytes.

Every decoder found in checkpoints (byte-level BPE, SentencePiece pieces with or without byte fallback, plain words) is
converted to this one form at load time, together with its rules for the very start of a text. Loading a model whose
decoder does not fit fails, and names the decoder's step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizer(ValueError):
    """The tokenizer's decoder has an unknown step; the message names it."""


@dataclass(frozen=True)
class DecoderRules:
    """How token strings become bytes.

    `replacements` are applied to each piece in order. `strip_left` (character, count) is stripped from the start of a
    whole text. `first_marker` is removed from the first token of a whole text (Metaspace). `separator` precedes every
    token but the first.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_left: tuple[str, int] = ("", 0)
    first_marker: str = ""
    separator: str = ""


class TokenTable:
    """Token id -> bytes. Unknown ids (padding of the logits' width) have no bytes. Computes entries on first use."""

    def __init__(self, rules: DecoderRules, tokens: Mapping[int, str], special_ids: frozenset[int]) -> None:
        self.rules = rules
        self.special_ids = special_ids
        self._tokens = tokens
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes inside a text, that is, after another token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute(token_id)
        return known

    def first_bytes_of(self, token_id: int) -> bytes:
        """The token's bytes when it opens a whole text."""
        piece = self._tokens.get(token_id)
        if piece is None:
            return b""
        marker = self.rules.first_marker
        return _piece_bytes(piece.replace(marker, "") if marker else piece, self.rules)

    def _compute(self, token_id: int) -> bytes:
        piece = self._tokens.get(token_id)
        if piece is None:
            return b""
        return self.rules.separator.encode() + _piece_bytes(piece, self.rules)


def _piece_bytes(piece: str, rules: DecoderRules) -> bytes:
    if rules.byte_level:
        return _byte_level_bytes(piece)
    for pattern, content in rules.replacements:
        piece = piece.replace(pattern, content)
    if rules.byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece.encode("utf-8", "replace")


def _byte_level_bytes(piece: str) -> bytes:
    alphabet = byte_level_alphabet()
    if all(char in alphabet for char in piece):
        return bytes(alphabet[char] for char in piece)
    return piece.encode("utf-8", "replace")


@cache
def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map from bytes to printable characters, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def read_rules(decoder: dict[str, Any] | None) -> DecoderRules:
    """Translate the `decoder` of a tokenizer.json.

    Raises:
        UnsupportedTokenizer: a step is unknown, or is in a place where it has another meaning.
    """
    if decoder is None or decoder.get("type") == "WordPiece":
        return DecoderRules(separator=" ")
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    fields: dict[str, Any] = {}
    for i, step in enumerate(steps):
        read = _STEPS.get(step.get("type"))
        if read is None:
            raise UnsupportedTokenizer(f"tokenizer.json: decoder step {step.get('type')!r} is not supported")
        read(step, steps[:i], fields)
    return DecoderRules(**fields)


def _refuse(step: dict[str, Any], why: str) -> UnsupportedTokenizer:
    return UnsupportedTokenizer(f"tokenizer.json: decoder step {step['type']!r} {why}")


def _seen(earlier: Sequence[dict[str, Any]], *types: str) -> bool:
    return any(step["type"] in types for step in earlier)


def _read_byte_level(step: dict[str, Any], earlier: Sequence[dict[str, Any]], fields: dict[str, Any]) -> None:
    if _seen(earlier, "Replace", "ByteFallback", "Metaspace", "Strip"):
        raise _refuse(step, f"after {earlier[-1]['type']!r} is not supported")
    fields["byte_level"] = True


def _read_replace(step: dict[str, Any], earlier: Sequence[dict[str, Any]], fields: dict[str, Any]) -> None:
    pattern = step["pattern"].get("String")
    if pattern is None:
        raise _refuse(step, "with a regular expression is not supported")
    if _seen(earlier, "ByteFallback", "Fuse", "ByteLevel"):
        raise _refuse(step, f"after {earlier[-1]['type']!r} is not supported")
    fields["replacements"] = (*fields.get("replacements", ()), (pattern, step["content"]))


def _read_byte_fallback(step: dict[str, Any], earlier: Sequence[dict[str, Any]], fields: dict[str, Any]) -> None:
    if _seen(earlier, "Fuse", "ByteLevel"):
        raise _refuse(step, f"after {earlier[-1]['type']!r} is not supported")
    fields["byte_fallback"] = True


def _read_fuse(step: dict[str, Any], earlier: Sequence[dict[str, Any]], fields: dict[str, Any]) -> None:
    """Nothing to do: a byte table joins pieces anyway."""


def _read_strip(step: dict[str, Any], earlier: Sequence[dict[str, Any]], fields: dict[str, Any]) -> None:
    if step.get("stop") or not _seen(earlier, "Fuse") or len(step["content"].encode()) != 1:
        raise _refuse(step, "is supported only for one ASCII character at the start, after 'Fuse'")
    fields["strip_left"] = (step["content"], step["start"])


def _read_metaspace(step: dict[str, Any], earlier: Sequence[dict[str, Any]], fields: dict[str, Any]) -> None:
    if earlier:
        raise _refuse(step, f"after {earlier[-1]['type']!r} is not supported")
    mark = step["replacement"]
    fields["replacements"] = ((mark, " "),)
    prepends = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
    fields["first_marker"] = mark if prepends else ""


_STEPS: dict[Any, Callable[[dict[str, Any], Sequence[dict[str, Any]], dict[str, Any]], None]] = {
    "ByteLevel": _read_byte_level,
    "Replace": _read_replace,
    "ByteFallback": _read_byte_fallback,
    "Fuse": _read_fuse,
    "Strip": _read_strip,
    "Metaspace": _read_metaspace,
}
