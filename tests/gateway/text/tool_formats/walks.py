"""Samples of what a grammar allows: a walk over a matcher's masks, with a tokenizer of bytes and a few markers."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagoda_gateway.text.vocabulary import byte_level_alphabet
from pagoda_proto.grammars import LIMITS

EOS = "<eos>"
MARKER = re.compile(r"<[^<>\s=]+(?: [^<>\s=]+)?>|\[/?[A-Z_]{4,}\]")
_CLOSING = set("\"'}])>\n")
_USUAL = set("abxyé 10{[<:,")


class Vocabulary(NamedTuple):
    tokenizer: LLTokenizer
    texts: Sequence[bytes]
    markers: Mapping[str, int]
    end: int
    wishes: Sequence[float]  # weight of each token


def markers_in(texts: Sequence[str]) -> tuple[str, ...]:
    """What a checkpoint would have as separate tokens."""
    return tuple(dict.fromkeys(marker for text in texts for marker in MARKER.findall(text)))


@lru_cache(maxsize=64)
def vocabulary(markers: tuple[str, ...] = (), words: tuple[str, ...] = ()) -> Vocabulary:
    """All bytes; `markers` as added tokens, `words` as ordinary ones."""
    alphabet = byte_level_alphabet()
    chars = {byte: char for char, byte in alphabet.items()}
    pieces = [*sorted(alphabet), *("".join(chars[byte] for byte in word.encode()) for word in words)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*markers, EOS)])
    texts = [bytes(alphabet[char] for char in piece) for piece in pieces]
    texts += [text.encode() for text in (*markers, EOS)]
    ids = {text: tokenizer.token_to_id(text) for text in markers}
    end = tokenizer.token_to_id(EOS)
    known = LLTokenizer(tokenizer.to_str(), n_vocab=len(texts), eos_token=[end])
    return Vocabulary(known, texts, ids, end, [_wish(text, at_end=i == end) for i, text in enumerate(texts)])


def walk(grammar: str, known: Vocabulary, seed: int, max_tokens: int = 8000) -> str:
    """A text that the grammar admits. An end, once possible, is likely."""
    rng = random.Random(seed)
    matcher = LLMatcher(known.tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    assert not matcher.is_error(), matcher.get_error()
    written = b""
    for _ in range(max_tokens):
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), (matcher.get_error(), written)
        allowed = [i for i in range(len(known.texts)) if mask[i // 8] >> (i % 8) & 1]
        assert allowed, written
        (token,) = rng.choices(allowed, [known.wishes[i] for i in allowed])
        if token == known.end:
            return written.decode()
        assert matcher.consume_token(token)
        written += known.texts[token]
    raise AssertionError(f"no end after {max_tokens} tokens: {written!r}")


def _wish(text: bytes, *, at_end: bool) -> float:
    char = text.decode("latin-1")
    return 40.0 if at_end or len(char) > 1 else 12.0 if char in _CLOSING else 4.0 if char in _USUAL else 0.2
