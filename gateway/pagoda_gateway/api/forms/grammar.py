"""Turns a structural tag into a grammar: regular parts become one lexeme, free text ends where the next part begins.

A lexer is greedy. So adjacent regular pieces are written as one terminal, which knows where each may end, and free text
is written as a lazy terminal together with the text that ends it. Special tokens are not text: a piece of text that is
the name of one is written as that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import singledispatchmethod
from itertools import groupby
from typing import NamedTuple

from pagoda_gateway.api.forms import tags
from pagoda_proto import grammars
from pagoda_proto.params import MAX_GRAMMAR_CHARS

ANY = "/(?s:.*)/"
MAX_CHARS = 4 * MAX_GRAMMAR_CHARS  # written in all; literals are counted again with the rule that contains them


class Part(NamedTuple):
    """An expression. A `regular` one may be part of a terminal."""

    text: str
    regular: bool = False


class Literal(NamedTuple):
    """One of these texts."""

    texts: tuple[str, ...]


Atom = Literal | tags.Format


def structural_tag(tag: tags.StructuralTag, special: Mapping[str, int]) -> str:
    """The grammar of a structural tag. `special` are token ids by name.

    Raises:
        ValueError: the end of a free text is ambiguous, or the grammar too large.
    """
    return _Writer(special).grammar(tag.whole)


def _atoms(piece: tags.Format) -> list[Atom]:
    """The sequence of pieces that a format consists of."""
    match piece:
        case tags.ConstString(value=value):
            return [Literal((value,))]
        case tags.Sequence(elements=elements):
            return [atom for element in elements for atom in _atoms(element)]
        case tags.Tag(begin=begin, content=content):
            return [Literal((begin,)), *_atoms(content), Literal(tuple(piece.ends))]
    return [piece]


def _is_open(atom: Atom) -> bool:
    """Whether it has no end of its own, and continues until the next piece."""
    match atom:
        case tags.AnyText() | tags.TriggeredTags():
            return True
        case tags.Or(elements=elements):
            return any(_is_open(_atoms(element)[-1]) for element in elements)
        case tags.Optional(content=content):
            return _is_open(_atoms(content)[-1])
    return False


def _is_regular(part: Part) -> bool:
    return part.regular


class _Writer:
    """Writes one grammar. Rules, terminals and embedded grammars are numbered in order."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        names = sorted(filter(None, special), key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._lines: list[str] = []
        self._num_chars = 0  # written so far
        self._own: list[dict[str, str]] = []

    def grammar(self, whole: tags.Format) -> str:
        start = self._in_rule(self._row(_atoms(whole)))
        return grammars.composed("\n".join([f"start: {start}", *self._lines]), self._own)

    def _row(self, atoms: Sequence[Atom]) -> Part:
        parts = list(self._parts([atom for atom in atoms if atom != Literal(("",))]))
        return self._joined(parts)

    def _parts(self, atoms: Sequence[Atom]) -> Iterator[Part]:
        """Parts of the sequence; an open piece is joined with the literal that follows it."""
        i = 0
        while i < len(atoms):
            atom = atoms[i]
            if isinstance(atom, Literal):
                yield self._literal(atom)
            elif _is_open(atom):
                i += 1
                yield self._until(atom, self._end(atoms[i : i + 1]))
            else:
                yield self._written(atom)
            i += 1

    def _end(self, following: Sequence[Atom]) -> Literal | None:
        if not following:
            return None
        (end,) = following
        if not isinstance(end, Literal) or "" in end.texts:
            raise ValueError("free text must be last in its sequence, or followed by a const_string or a tag")
        return end

    def _joined(self, parts: Sequence[Part]) -> Part:
        """Concatenate parts. Adjacent regular ones become one terminal; if all are regular, the result is regular."""
        if all(part.regular for part in parts):
            return Part(" ".join(part.text for part in parts) or '""', regular=True)
        runs = (Part(" ".join(part.text for part in run), regular) for regular, run in groupby(parts, _is_regular))
        return Part(" ".join(map(self._in_rule, runs)))

    def _in_rule(self, part: Part) -> str:
        return self._named("T", part.text) if part.regular else part.text

    def _named(self, kind: str, text: str, options: str = "") -> str:
        self._count(text)
        name = f"{kind}{len(self._lines)}"
        self._lines.append(f"{name}{options}: {text}")
        return name

    def _count(self, text: str) -> None:
        """Bound the size, as an end is written for each alternative before it. Raises ValueError if it is too large."""
        self._num_chars += len(text)
        if self._num_chars > MAX_CHARS:
            raise ValueError(f"the resulting grammar would have more than {MAX_GRAMMAR_CHARS} characters")

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _literal(self, literal: Literal) -> Part:
        """One of the texts. An empty text among others makes them optional."""
        parts = [self._text(text) for text in literal.texts if text]
        regular = all(part.regular for part in parts)
        text = " | ".join(part.text for part in parts)
        self._count(text)
        optional = "?" * (len(parts) < len(literal.texts))
        return Part(f"({text}){optional}" if len(parts) > 1 or optional else text, regular)

    def _text(self, text: str) -> Part:
        pieces = list(filter(None, self._names.split(text))) if self._names is not None else [text]
        if pieces == [text] and text not in self._special:
            return Part(grammars.quoted(text), regular=True)
        told = (f"<[{self._special[one]}]>" if one in self._special else grammars.quoted(one) for one in pieces)
        return Part(" ".join(told))

    @singledispatchmethod
    def _written(self, piece: tags.Format) -> Part:
        raise TypeError(f"{type(piece).__name__} is no format")

    @_written.register
    def _(self, piece: tags.JsonSchema) -> Part:
        return Part(self._named("r", f"%json {json.dumps(grammars.written(piece.json_schema), ensure_ascii=False)}"))

    @_written.register
    def _(self, piece: tags.LarkGrammar) -> Part:
        name = f"g{len(self._own)}"
        self._own.append({"name": name, "lark_grammar": piece.grammar})
        return Part(f"@{name}")

    @_written.register
    def _(self, piece: tags.Regex) -> Part:
        return Part(grammars.slashed(piece.pattern), regular=True)

    @_written.register
    def _(self, piece: tags.Or) -> Part:
        return self._alternatives([self._row(_atoms(element)) for element in piece.elements])

    @_written.register
    def _(self, piece: tags.Optional) -> Part:
        return self._repeated(piece.content, "?")

    @_written.register
    def _(self, piece: tags.Star) -> Part:
        return self._repeated(piece.content, "*")

    @_written.register
    def _(self, piece: tags.Plus) -> Part:
        return self._repeated(piece.content, "+")

    @_written.register
    def _(self, piece: tags.Repeat) -> Part:
        return self._repeated(piece.content, f"{{{piece.min},{'' if piece.max < 0 else piece.max}}}")

    @_written.register
    def _(self, piece: tags.TagsWithSeparator) -> Part:
        tag = self._alternatives([self._row(_atoms(tag)) for tag in piece.tags])
        if piece.stop_after_first:
            text = tag.text
        else:
            text = f"{tag.text} ({self._literal(Literal((piece.separator,))).text} {tag.text})*"
        return Part(f"({text})" if piece.at_least_one else f"({text})?")

    def _alternatives(self, parts: Sequence[Part]) -> Part:
        regular = all(part.regular for part in parts)
        text = " | ".join(part.text if regular else self._in_rule(part) for part in parts)
        return Part(f"({text})" if regular else self._named("r", text), regular)

    def _repeated(self, content: tags.Format, times: str) -> Part:
        atoms = _atoms(content)
        if _is_open(atoms[-1]):
            raise ValueError(f"free text cannot be repeated: nothing says where it ends ({content.type})")
        part = self._row(atoms)
        return Part(f"({part.text}){times}", part.regular)

    # --- free text ---------------------------------------------------------------------------------------------------

    def _until(self, piece: Atom, end: Literal | None) -> Part:
        """An open piece and the literal that ends it; None: the end of the output."""
        match piece:
            case tags.AnyText(excludes=excludes):
                return self._free(excludes, end)
            case tags.TriggeredTags():
                return self._triggered(piece, end)
            case tags.Or(elements=elements):
                behind = [] if end is None else [end]
                return self._alternatives([self._row([*_atoms(element), *behind]) for element in elements])
            case tags.Optional(content=content):
                with_it = self._row([*_atoms(content), *([] if end is None else [end])])
                without = self._literal(end or Literal(("",)))
                return self._alternatives([with_it, without if end else Part('""', regular=True)])
        raise TypeError(f"{type(piece).__name__} has an end of its own")

    def _free(self, excludes: Sequence[str], end: Literal | None) -> Part:
        """Text without any of `excludes`, up to and including the first `end`."""
        text = self._plain(excludes)
        return Part(text, regular=True) if end is None else self._alternatives(list(self._ended(text, end.texts)))

    def _plain(self, excludes: Sequence[str]) -> str:
        if not excludes:
            return self._named("T", ANY)
        inside = " | ".join(grammars.quoted(one) for one in excludes)
        return self._named("T", f"{ANY} & ~({ANY} ({inside}) {ANY})")

    def _ended(self, text: str, ends: Sequence[str]) -> Iterator[Part]:
        """Text up to and including the first of `ends`; an end that is plain text is found by a lazy lexeme."""
        plain = []
        for end in ends:
            part = self._text(end)
            if part.regular:
                plain.append(part.text)
            elif part.text.startswith("<["):
                yield Part(f"{text} {part.text}")
            else:
                raise ValueError(f"free text cannot end at {end[:64]!a}, which has a special token after plain text")
        if plain:
            yield Part(self._named("h", f"{text} ({' | '.join(plain)})", "[lazy]"))

    def _triggered(self, piece: tags.TriggeredTags, end: Literal | None) -> Part:
        text = self._plain(piece.excludes)
        begun, whole = [], []
        for trigger in piece.triggers:
            chosen = [tag for tag in piece.tags if tag.begin.startswith(trigger)]
            rests = [self._row(_atoms(tag.model_copy(update={"begin": tag.begin[len(trigger) :]}))) for tag in chosen]
            rest = self._alternatives(rests).text
            begun += [f"{head.text} {rest}" for head in self._ended(text, [trigger])]
            whole.append(f"{self._text(trigger).text} {rest}")
        later, first = self._named("r", " | ".join(begun)), self._named("r", " | ".join(whole))
        rest = self._free(piece.excludes, end).text
        stop = "" if end is None else self._literal(end).text
        match piece.at_least_one, piece.stop_after_first:
            case True, True:
                return Part(f"{first} {stop}".rstrip())
            case True, False:
                return Part(f"{first} ({later})* {rest}")
            case False, True:
                return Part(f"({later} {stop} | {rest})")
        return Part(f"({later})* {rest}")
