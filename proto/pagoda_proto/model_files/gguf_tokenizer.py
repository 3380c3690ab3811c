"""From the vocabulary of a GGUF file to the tokenizer.json of the model from which it was converted.

Two kinds are supported: byte-level BPE, whose merges the file lists and whose pre-tokenizer it only names
(`pre_tokenizers`), and SentencePiece BPE, whose merges follow from the scores of its pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagoda_proto.model_files.gguf import Gguf
from pagoda_proto.model_files.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

TOKENS, TYPES, SCORES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"
TEMPLATE, TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
WHOLE = "tokenizer.huggingface.json"
NO_ID = (-1, 2**32 - 1)  # as converters write "none", in 32 bits with a sign or without
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
MAX_TOKENS = 2**22
MAX_SPLIT_CHARS = 2**30  # copied when splitting SentencePiece pieces in two: each piece once per character
SPACE = "\u2581"
STRIPS_NONE = {"<unk>", "<s>", "<|endoftext|>"}
# Tokens that end an answer in the supported models; a file names only one of a model's.
ENDS = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>",
    "<|observation|>",
}  # fmt: skip
HARMONY_ENDS = {"<|return|>", "<|call|>"}  # of gpt-oss
PART_END = "<|end|>"  # with HARMONY_ENDS: ends a part of an answer, the first of which is reasoning


def end_ids(gguf: Gguf) -> list[int]:
    """Tokens that end an answer, starting with the one that the file names."""
    tokens, types = _vocabulary(gguf)
    control = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == CONTROL}
    harmony = control.keys() >= HARMONY_ENDS
    ends = ENDS | HARMONY_ENDS if harmony else ENDS
    named = [_id_of(gguf, name, len(tokens)) for name in ("eos", "eot", "eom")]
    found = dict.fromkeys((*named, *(i for token, i in control.items() if token in ends)))
    return [i for i in found if i is not None and not (harmony and tokens[i] == PART_END)]


def tokenizer_config_of(gguf: Gguf) -> dict[str, Any]:
    """The contents of tokenizer_config.json, except for tokens added to every text, which are in `tokenizer_of`."""
    tokens, _ = _vocabulary(gguf)
    fields: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        found = _id_of(gguf, key, len(tokens))
        if found is not None:
            fields[f"{name}_token"] = tokens[found]
    names = gguf.items(TEMPLATES, str) or []
    named = {name: gguf.take(f"{TEMPLATE}.{name}", str) for name in names if f"{TEMPLATE}.{name}" in gguf.keys}
    default = gguf.maybe(TEMPLATE, str)
    templates = named if default is None else {"default": default} | named
    fields["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()] or None
    return fields


def tokenizer_of(gguf: Gguf) -> dict[str, Any] | str:
    """The contents of tokenizer.json; the original if the file contains it.

    Raises:
        BadGguf: the kind of vocabulary, or the pre-tokenizer, is unknown.
    """
    whole = gguf.maybe(WHOLE, str)
    if whole is not None:
        return whole
    kind = gguf.take("tokenizer.ggml.model", str)
    if kind == "gpt2":
        return _byte_level(gguf)
    if kind == "llama":
        return _sentencepiece(gguf)
    raise gguf.bad(f"a tokenizer of kind {kind[:64]!r} is not one of gpt2, llama")


def _vocabulary(gguf: Gguf) -> tuple[list[str], list[int]]:
    """Tokens, and a type for each."""
    tokens = gguf.items(TOKENS, str)
    if not tokens or len(tokens) > MAX_TOKENS:
        raise gguf.bad(f"{TOKENS!r} must have 1 to {MAX_TOKENS} tokens")
    types = gguf.items(TYPES, int) or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise gguf.bad(f"{TYPES!r} has {len(types)} types for {len(tokens)} tokens")
    return tokens, types


def _id_of(gguf: Gguf, name: str, num_tokens: int) -> int | None:
    """A special token's id; None if it is missing, or a number that means "none". Raises BadGguf if no token has it.

    For padding, which nothing here computes with, such a number is none, too: published files have one.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    found = gguf.maybe(key, int)
    if found is None or found in NO_ID:
        return None
    if 0 <= found < num_tokens:
        return found
    if name == "padding":
        return None
    raise gguf.bad(f"{key!r} is {found}, which is not the id of one of its {num_tokens} tokens")


def _pre_tokenizer(gguf: Gguf) -> PreTokenizer:
    name = gguf.maybe("tokenizer.ggml.pre", str)
    if name is None:
        raise gguf.bad("'tokenizer.ggml.pre' is missing, so it is unknown how to split texts into words")
    if name not in PRE_TOKENIZERS:
        raise gguf.bad(f"'tokenizer.ggml.pre' is {name[:64]!r}, not one of {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]


def _adds_bos(gguf: Gguf) -> bool:
    said = gguf.maybe("tokenizer.ggml.add_bos_token", bool)
    if said is not None:
        return said
    return gguf.take("tokenizer.ggml.model", str) == "llama" or _pre_tokenizer(gguf).adds_bos


def _byte_level(gguf: Gguf) -> dict[str, Any]:
    way = _pre_tokenizer(gguf)
    merges = gguf.items("tokenizer.ggml.merges", str)
    if merges is None:
        raise gguf.bad("'tokenizer.ggml.merges' is missing")
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in way.patterns
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return _tokenizer(
        gguf,
        model={"merges": merges, "ignore_merges": way.ignores_merges},
        normalizer={"type": "NFC"} if way.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )


def _sentencepiece(gguf: Gguf) -> dict[str, Any]:
    tokens, types = _vocabulary(gguf)
    scores = gguf.items(SCORES, float)
    if scores is None or len(scores) != len(tokens):
        raise gguf.bad(f"{SCORES!r} must have a score for each of {len(tokens)} tokens")
    if gguf.take("tokenizer.ggml.remove_extra_whitespaces", bool, False):
        raise gguf.bad("'tokenizer.ggml.remove_extra_whitespaces' is not supported")
    prefixed = gguf.take("tokenizer.ggml.add_space_prefix", bool, True)
    spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _id_of(gguf, "unknown", len(tokens))
    usual = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    return _tokenizer(
        gguf,
        model={
            "merges": _merges(gguf, scores), "byte_fallback": True, "fuse_unk": True,
            "unk_token": tokens[unknown] if unknown is not None else usual,
        },
        normalizer=normalizer if prefixed else spaces,
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
    )  # fmt: skip


def _merges(gguf: Gguf, scores: list[float]) -> list[list[str]]:
    """Merges in order of priority: the pair that makes the piece with the highest score is merged first.

    Only plain pieces are merged, and only into plain pieces.
    """
    tokens, types = _vocabulary(gguf)
    if sum(len(token) ** 2 for token in tokens) > MAX_SPLIT_CHARS:
        raise gguf.bad(f"its tokens are too long: the squares of their lengths add up to more than {MAX_SPLIT_CHARS}")
    plain = {token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == NORMAL}
    merges = []
    for token in sorted(plain, key=lambda token: -plain[token]):
        for at in range(len(token) - 1, 0, -1):
            left, right = token[:at], token[at:]
            if left in plain and right in plain:
                merges.append([left, right])
    return merges


def _tokenizer(gguf: Gguf, *, model: Mapping[str, Any], **steps: Any) -> dict[str, Any]:
    tokens, types = _vocabulary(gguf)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise gguf.bad(f"{len(tokens) - len(vocabulary)} tokens occur twice")
    usual = {
        "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    # Phi 3 strips white space after most of its special tokens, which GGUF files do not say.
    strips = gguf.maybe("general.architecture", str) == "phi3" and gguf.maybe("tokenizer.ggml.model", str) == "llama"
    added = [
        {
            "id": i, "content": token, "single_word": False, "lstrip": False,
            "rstrip": strips and token not in STRIPS_NONE, "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **steps,
        "post_processor": _ends(gguf, tokens),
        "model": {"type": "BPE", **usual, **model, "vocab": vocabulary},
    }  # fmt: skip


def _ends(gguf: Gguf, tokens: list[str]) -> dict[str, Any] | None:
    """The post-processor that adds tokens before and after every text."""
    bos = _id_of(gguf, "bos", len(tokens)) if _adds_bos(gguf) else None
    eos = _id_of(gguf, "eos", len(tokens)) if gguf.take("tokenizer.ggml.add_eos_token", bool, False) else None
    if bos is None and eos is None:
        return None

    def written(letter: str, kind: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": letter, "type_id": kind}}
        special = ({"SpecialToken": {"id": tokens[i], "type_id": kind}} if i is not None else None for i in (bos, eos))
        first, last = special
        return [one for one in (first, text, last) if one is not None]

    named = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in (bos, eos) if i is not None}
    single, pair = written("A", 0), written("A", 0) + written("B", 1)
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": named}
