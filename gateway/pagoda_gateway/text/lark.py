"""Builds a grammar for llguidance, from rules for texts, markers and schemas.

A marker that is a token is written by its id: quoted, it would never match. All other text is matched as bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagoda_proto import grammars
from pagoda_proto.params import MAX_GRAMMAR_CHARS

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
ANY = r"(.|\n)*"
GAP = r"(/\s{1,4}/)?"
MAX_PART_CHARS = 16 * MAX_GRAMMAR_CHARS  # equal parts are merged, so there may be more of them than in a grammar


def escaped(text: str) -> str:
    """Escape a text for a regular expression between slashes."""
    return _SPECIAL.sub(lambda found: "\\" + found[0], text).replace("\n", "\\n").replace("\r", "\\r")


class TooMuch(ValueError):
    """Larger than any grammar may be."""


class Rules:
    """`tokens` are the markers that the tokenizer knows as tokens, by their text."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        names = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._lines: list[str] = []
        self._names: dict[str, str] = {}
        self._parts: dict[str, dict[str, Any]] = {}
        self._num_chars = 0  # of parts, duplicates included: writing them is the work

    def spell(self, text: str) -> str:
        """An expression that matches exactly this text."""
        pieces: list[str] = []
        start = 0
        for found in self._pattern.finditer(text) if self._pattern else ():
            if found.start() > start:
                pieces.append(grammars.quoted(text[start : found.start()]))
            pieces.append(f"<[{self._tokens[found[0]]}]>")
            start = found.end()
        if start < len(text):
            pieces.append(grammars.quoted(text[start:]))
        return " ".join(pieces)

    def starts_with_token(self, marker: str) -> bool:
        """Whether the marker begins with a token."""
        return self._pattern is not None and self._pattern.match(marker) is not None

    def has_token(self, marker: str) -> bool:
        return self._pattern is not None and self._pattern.search(marker) is not None

    def rule(self, body: str, attributes: str = "") -> str:
        """Return the name of a rule with this body; equal rules share one."""
        return self._named("r", body, attributes)

    def terminal(self, body: str) -> str:
        return self._named("T", body, "")

    def recursive(self, name: str, body: Callable[[], str]) -> str:
        """Define a rule whose body may refer to itself; return its name."""
        if name not in self._names:
            self._names[name] = name
            self._lines.append(f"{name}: {body()}")
        return name

    def text(self, avoid: Sequence[str] = (), first: str = "", pattern: str = ANY) -> str:
        """Any text that contains none of `avoid` and does not begin with a match of the expression `first`."""
        body = f"/{pattern}/"
        if avoid:
            body += f" & ~/{ANY}({'|'.join(map(escaped, avoid))}){ANY}/"
        if first:
            body += f" & ~/({first}){ANY}/"
        return self.terminal(body)

    def up_to(
        self, markers: Sequence[str], *, first: str = "", pattern: str = ANY, max_tokens: int | None = None
    ) -> str:
        """A text up to and including its first marker. With `max_tokens`, each marker must begin with a token."""
        text = self.text([marker.strip() for marker in markers], first, pattern)
        limit = "" if max_tokens is None else f"max_tokens={max_tokens}"
        return self.rule(" | ".join(self._up_to(marker, text, limit) for marker in markers))

    def _up_to(self, marker: str, text: str, limit: str) -> str:
        if self.starts_with_token(marker):
            return f"{self.rule(text, limit) if limit else text} {self.spell(marker)}"
        found = self._pattern.search(marker) if self._pattern else None
        end = len(marker) if found is None else found.start()
        lazy = self.rule(f"{text} {grammars.quoted(marker[:end])}", "lazy")
        return f"{lazy} {self.spell(marker[end:])}".rstrip()

    def schema(self, schema: Mapping[str, Any]) -> str:
        """JSON that conforms to the schema."""
        return self.part(grammars.schema_part(dict(schema)))

    def part(self, part: Mapping[str, Any]) -> str:
        """Add another grammar as a part of this one; return a reference to it. Raises TooMuch."""
        key = json.dumps(part)
        self._num_chars += len(key)
        if self._num_chars > MAX_PART_CHARS:
            raise TooMuch("schemas are too large together, each with what it refers to")
        if key not in self._parts:
            self._parts[key] = {"name": f"p{len(self._parts)}", **part}
        return f"@{self._parts[key]['name']}"

    def grammar(self, start: str) -> str:
        return grammars.composed("\n".join([f"start: {start}", *self._lines]), list(self._parts.values()))

    def _named(self, letter: str, body: str, attributes: str) -> str:
        key = f"{letter}[{attributes}]: {body}"
        if key not in self._names:
            name = self._names[key] = f"{letter}{len(self._names)}"
            told = f"[{attributes}]" if attributes else ""
            self._lines.append(f"{name}{told}: {body}")
        return self._names[key]
