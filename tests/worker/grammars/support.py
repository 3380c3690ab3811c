"""Grammars over small tokenizers, and the means to compute independently which tokens they allow."""

from __future__ import annotations

import functools

import numpy as np
from llguidance import LLTokenizer
from tests.gateway.model_dir import EOS, SPECIALS, byte_level_tokenizer

from pagoda_worker.grammars.compiling import CompiledGrammars
from pagoda_worker.grammars.matching import Matcher

NONE = np.empty(0, np.int64)


@functools.cache
def small_tokenizer() -> LLTokenizer:
    made = byte_level_tokenizer()
    return LLTokenizer(made.to_str(), eos_token=made.token_to_id(EOS))


@functools.cache
def vocabulary() -> dict[int, bytes]:
    """Token id -> its bytes, for all text tokens of the small tokenizer; never the byte 255."""
    made = byte_level_tokenizer()
    special = {made.token_to_id(name) for name in SPECIALS}
    pieces = {i: small_tokenizer().decode_bytes([i]) for i in range(made.get_vocab_size()) if i not in special}
    return {i: piece for i, piece in pieces.items() if piece}


def end() -> int:
    return byte_level_tokenizer().token_to_id(EOS)


def small_grammars() -> CompiledGrammars:
    return CompiledGrammars(small_tokenizer(), small_tokenizer().vocab_size)


def started(grammar: str, outputs: list[int] | None = None, grammars: CompiledGrammars | None = None) -> Matcher:
    compiled = small_grammars() if grammars is None else grammars
    return compiled.matcher(grammar, [end()], np.array(outputs or NONE, np.int64))


def allowed(matcher: Matcher, vocab_size: int | None = None) -> set[int]:
    mask = matcher.mask()
    assert (np.diff(mask.ids) > 0).all()
    listed = set(mask.ids.tolist())
    return listed if mask.keeps else set(range(vocab_size or small_tokenizer().vocab_size)) - listed
