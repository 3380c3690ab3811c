"""Compiles a grammar once and gives each row a copy. The most recently used grammars are kept.

The tokenizer is llguidance's own, built from the checkpoint's tokenizer.json: it serves as a table of bytes here, and
nothing is tokenised.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pagoda_proto.grammars import LIMITS
from pagoda_proto.model_files.files import MAX_TOKENIZER_BYTES, FileTooLarge, ModelFiles, model_files
from pagoda_worker.grammars.masks import Ids
from pagoda_worker.grammars.matching import GrammarTokens, Matcher

MAX_COMPILED = 64
MAX_COMPILED_CHARS = 2**20  # of their texts together; a compiled grammar takes some 70 bytes for each


class GrammarError(ValueError):
    """A grammar that cannot be used here, and why."""


class Grammars(Protocol):
    def matcher(self, grammar: str, ends: Sequence[int], outputs: Ids) -> Matcher:
        """A matcher that has consumed `outputs`; `ends` are the request's ends of sequence. Raises GrammarError."""


class NoGrammars:
    """Refuses every grammar; `why` is the reason."""

    def __init__(self, why: str) -> None:
        self._why = why

    def matcher(self, grammar: str, ends: Sequence[int], outputs: Ids) -> Matcher:
        raise GrammarError(self._why)


NO_GRAMMARS = NoGrammars("no tokenizer was loaded")


class CompiledGrammars:
    """`vocab_size` is the width of the logits and of `tokenizer`."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = GrammarTokens(tokenizer, vocab_size)
        self._limits = LLParserLimits(**LIMITS)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_chars = 0

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._compiled)

    def matcher(self, grammar: str, ends: Sequence[int], outputs: Ids) -> Matcher:
        if not ends:
            raise GrammarError("it needs an end-of-sequence token, and the request has none")
        state = self._compile(grammar).deep_copy()
        matcher = Matcher(state, self._tokens, np.array(ends, np.int64), partial(self._anew, grammar))
        for token in outputs.tolist():
            matcher.consume(token)
        if matcher.error:
            raise GrammarError(matcher.error)
        return matcher

    def _compile(self, grammar: str) -> LLMatcher:
        found = self._compiled.pop(grammar, None)
        if found is None:
            found = self._made(grammar)
            if found.is_error():
                raise GrammarError(found.get_error())
            self._num_chars += len(grammar)
        self._compiled[grammar] = found
        while len(self._compiled) > MAX_COMPILED or self._num_chars > MAX_COMPILED_CHARS:
            self._num_chars -= len(self._compiled.popitem(last=False)[0])
        return found

    def _anew(self, grammar: str) -> LLMatcher:
        """Compile a grammar afresh: the kept one has used up its shared limits."""
        if self._compiled.pop(grammar, None) is not None:
            self._num_chars -= len(grammar)
        return self._made(grammar)

    def _made(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)


def load_grammars(path: Path, vocab_size: int) -> Grammars:
    """Grammars over a checkpoint's vocabulary; if that is not possible, a NoGrammars with the reason."""
    files = model_files(path)
    try:
        definition = files.read("tokenizer.json", MAX_TOKENIZER_BYTES)
        if definition is None:
            return NoGrammars("the model has no tokenizer.json, which grammars need")
        tokenizer = LLTokenizer(definition.decode(), n_vocab=vocab_size, eos_token=_model_ends(files))
    except FileTooLarge:
        return NoGrammars(f"the model's tokenizer.json has more than {MAX_TOKENIZER_BYTES} bytes")
    except ValueError as error:
        return NoGrammars(f"the model's tokenizer.json cannot be used for grammars: {error}")
    return CompiledGrammars(tokenizer, vocab_size)


def _model_ends(files: ModelFiles) -> list[int] | None:
    """The checkpoint's end-of-sequence ids; None leaves them to llguidance, which knows some names."""
    for name in ("generation_config.json", "config.json"):
        fields: Any = json.loads(files.read(name, MAX_TOKENIZER_BYTES) or "{}")
        if not isinstance(fields, dict):
            raise ValueError(f"{name} is not a JSON object")
        said = fields.get("eos_token_id")
        ends = [one for one in (said if isinstance(said, list) else [said]) if isinstance(one, int)]
        if ends:
            return ends
    return None
