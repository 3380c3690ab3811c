"""What a grammar allows, sampled: a walk over the masks of a matcher, with a tokenizer of bytes and a few markers."""

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
MARKER = re.compile(r"<[^<>\s=]+>|\[/?[A-Z_]{4,}\]")
_CLOSING = set("\"'}])>\n")
_USUAL = set("abxyé 10{[<:,")


class Vocabulary(NamedTuple):
    tokenizer: LLTokenizer
    texts: Sequence[bytes]
    markers: Mapping[str, int]
    end: int


def markers_in(texts: Sequence[str]) -> tuple[str, ...]:
    """What a checkpoint would have as tokens of their own."""
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
    return Vocabulary(LLTokenizer(tokenizer.to_str(), n_vocab=len(texts), eos_token=[end]), texts, ids, end)


def walk(grammar: str, known: Vocabulary, seed: int, max_tokens: int = 2000) -> str:
    """A text that the grammar admits. Ends, once they are possible, are likely."""
    rng = random.Random(seed)
    matcher = LLMatcher(known.tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    assert not matcher.is_error(), matcher.get_error()
    written = b""
    for _ in range(max_tokens):
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), (matcher.get_error(), written)
        allowed = [i for i in range(len(known.texts)) if mask[i // 8] >> (i % 8) & 1]
        assert allowed, written
        token = _chosen(rng, known, allowed)
        if token == known.end:
            return written.decode()
        assert matcher.consume_token(token)
        written += known.texts[token]
    raise AssertionError(f"no end after {max_tokens} tokens: {written!r}")


def _chosen(rng: random.Random, known: Vocabulary, allowed: list[int]) -> int:
    def wish(token: int) -> float:
        text = known.texts[token].decode("latin-1")
        return (
            40.0
            if token == known.end or len(text) > 1
            else 12.0
            if text in _CLOSING
            else 4.0
            if text in _USUAL
            else 0.2
        )

    return rng.choices(allowed, [wish(token) for token in allowed])[0]
