"""How byte-level tokenizers split a text into words, by the pre-tokenizer name in a GGUF file.

The patterns are those in the tokenizer.json files of the published models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """`patterns` are applied one after the other, each to the pieces of the one before.

    Attributes:
        nfc: The text is NFC-normalised first.
        ignores_merges: A word that is a token becomes that token, whatever the merges say.
        adds_bos: If the file does not say, a beginning-of-sequence token is put before every text.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _by_case(endings: str, digits: str) -> str:
    return rf"{_BEFORE}{_UPPER}*{_LOWER}+{endings}|{_BEFORE}{_UPPER}+{_LOWER}*{endings}|{digits}|{_REST_WITH_SLASH}"


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}|{_REST}"
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = _by_case(f"{_ENDINGS}?", r"\p{N}{1,3}")
TEKKEN = _by_case("", r"\p{N}")

_LLAMA3 = PreTokenizer(patterns=(CL100K,), ignores_merges=True, adds_bos=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(patterns=(GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), PreTokenizer(patterns=(r"\p{N}", GPT2))),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": PreTokenizer(patterns=(TEKKEN,), ignores_merges=True, adds_bos=True),
    "qwen2": PreTokenizer(patterns=(QWEN2,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer(patterns=(QWEN2,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer(patterns=(CL100K,))),
    "glm4": PreTokenizer(patterns=(CL100K,), ignores_merges=True),
    "command-r": PreTokenizer(patterns=(r"\p{N}", GPT2), nfc=True),
    "olmo": PreTokenizer(patterns=(GPT2,), nfc=True),
    "deepseek-coder": PreTokenizer(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-v3": PreTokenizer(patterns=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK_V3)),
    "gpt-4o": PreTokenizer(patterns=(O200K,)),
}
