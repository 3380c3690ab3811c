"""Special tokens are special only where the template wrote them: in a request's own strings they are plain text.

Before rendering, a mark is put into every special token spelled out in the request's strings, and after every string
that ends in the start of one, so that joining strings cannot form one. The template passes marks on like any other
character. In the rendered text, special tokens without a mark are the template's. They are renamed, the marks are
removed, and a tokenizer that knows special tokens only by the new names reads the text.

A template that deletes text inside a message may still join the parts of a special token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pagoda_proto.errors import ErrorCode, PagodaError

# Noncharacters: Unicode reserves these code points for a program's internal use.
MARK = "\ufdd0"
OTHER_NAME = "\ufdd1"
_STEPS = ("normalizer", "pre_tokenizer")


class SpecialTokens:
    """The special tokens of one tokenizer. Safe to share between threads.

    `ids` are ids by name of all tokens that a grammar does not treat as text: special ones, and those that look like
    tags.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        special = {token.content for token in self._added.values() if token.special and token.content}
        self._added_special = frozenset(i for i, token in self._added.items() if token.special)
        self.ids: Mapping[str, int] = {token.content: i for i, token in self._added.items() if _is_no_text(token)}
        self._contents = sorted(special, key=len, reverse=True)
        self._beginnings = tuple({text[:end] for text in special for end in range(1, len(text))})

    def marked(self, value: Any) -> Any:
        """Return a JSON value whose strings, keys included, have marks where needed.

        Raises:
            PagodaError: INVALID_ARGUMENT for strings with the code points reserved for marks.
        """
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        return [self.marked(item) for item in value] if isinstance(value, list | tuple) else value

    def _marked_text(self, text: str) -> str:
        for kept in (MARK, OTHER_NAME):
            if kept in text:
                message = f"a text holds U+{ord(kept):04X}, which is not a character"
                raise PagodaError(ErrorCode.INVALID_ARGUMENT, message, "messages")
        for content in self._contents:
            if content in text:
                text = text.replace(content, content[0] + MARK + content[1:])
        return text + MARK if text.endswith(self._beginnings) else text

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text with marks.

        Raises:
            PagodaError: INVALID_ARGUMENT if this tokenizer takes even plain text for a special token.
        """
        tokenizer, live, ids = self._renamed
        present = [content for content in self._contents if content in text]
        num_live = 0
        if present:
            text, num_live = re.subn("|".join(map(re.escape, present)), rf"{OTHER_NAME}\g<0>", text)
        found = tokenizer.encode_batch_fast([text.replace(MARK, "")], add_special_tokens=False)[0].ids
        if sum(map(live.__contains__, found)) != num_live or not (self._added_special - live).isdisjoint(found):
            message = "a text writes out a special token, which this model's tokenizer cannot take as plain text"
            raise PagodaError(ErrorCode.INVALID_ARGUMENT, message, "messages")
        return [ids.get(token_id, token_id) for token_id in found]

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, frozenset[int], dict[int, int]]:
        """A tokenizer of the same vocabulary, its ids of special tokens, and a map of its added ids to the model's."""
        renamed = Tokenizer(self._tokenizer.model)
        for step in _STEPS:
            if getattr(self._tokenizer, step) is not None:
                setattr(renamed, step, getattr(self._tokenizer, step))
        ids: dict[int, int] = {}
        live: set[int] = set()
        for token_id, token in sorted(self._added.items()):
            content = OTHER_NAME + token.content if token.special else token.content
            added = AddedToken(
                content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            (renamed.add_special_tokens if token.special else renamed.add_tokens)([added])
            new_id = renamed.token_to_id(content)
            if new_id is not None:
                ids[new_id] = token_id
                live |= {new_id} if token.special else set()
        return renamed, frozenset(live), ids


def _is_no_text(token: AddedToken) -> bool:
    """Whether llguidance does not treat it as text."""
    return bool(token.content) and (token.special or (token.content[0] == "<" and token.content[-1] == ">"))
