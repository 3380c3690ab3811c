"""Late interaction (ColBERT, arXiv 2004.12832): each token has a vector, and a pair of texts is scored by matching each
query token with the most similar document token. Reads a checkpoint's settings for text side and tensor side alike.

A marker after the first token distinguishes queries from documents. A query may be padded with mask tokens (query
expansion); in documents, the vectors of some tokens (punctuation) are omitted.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pagoda_proto.pooling.kinds import HF_COLBERT, architecture_of

METADATA = "artifact.metadata"  # beside a checkpoint of HF_COLBERT
MARKER_AT = 1
MAX_SKIPPED = 4096
MAX_FILLED = 4096


class Late(NamedTuple):
    """`filled`: length to which queries are padded; 0: no padding. `seen`: whether other tokens attend to the padding.
    `skipped`: tokens of a document whose vectors are omitted. `width`: length of a vector; 0: unspecified."""

    query_marker: str
    document_marker: str
    filled: int
    seen: bool
    skipped: tuple[str, ...]
    width: int = 0


class Marks(NamedTuple):
    """Token ids of the markers and of skipped tokens."""

    query: int
    document: int
    skipped: frozenset[int]

    def kept(self, token_ids: Sequence[int]) -> list[int]:
        """Positions of the tokens whose vectors are kept."""
        is_document = len(token_ids) > MARKER_AT and token_ids[MARKER_AT] == self.document
        skipped = self.skipped if is_document else ()
        return [place for place, token in enumerate(token_ids) if token not in skipped]


def late_of(
    config: Mapping[str, Any], modules: Sequence[Any], sentence: Mapping[str, Any], metadata: Mapping[str, Any]
) -> Late | None:
    """None for a model of another kind. `modules` is modules.json, `sentence` config_sentence_transformers.json,
    `metadata` METADATA. Raises ValueError naming an invalid field.
    """
    if architecture_of(config) == HF_COLBERT:
        return _of_metadata(metadata)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, Mapping)]
    return _of_modules(sentence) if "Dense" in kinds and "Pooling" not in kinds else None


def _of_metadata(fields: Mapping[str, Any]) -> Late:
    """The authors' format, with the defaults of their code."""
    return Late(
        query_marker=_text(fields, "query_token_id", "[unused0]"),
        document_marker=_text(fields, "doc_token_id", "[unused1]"),
        filled=_filled(fields, "query_maxlen"),
        seen=fields.get("attend_to_mask_tokens") is True,
        skipped=tuple(string.punctuation) if fields.get("mask_punctuation", True) else (),
        width=_width(fields.get("dim")),
    )


def _of_modules(fields: Mapping[str, Any]) -> Late:
    """PyLate's format, with its defaults."""
    skipped = fields.get("skiplist_words")
    skipped = list(string.punctuation) if skipped is None else skipped
    if not isinstance(skipped, list) or len(skipped) > MAX_SKIPPED or not all(isinstance(w, str) for w in skipped):
        raise ValueError(f"skiplist_words: must be a list of at most {MAX_SKIPPED} words")
    return Late(
        query_marker=_text(fields, "query_prefix", "[Q] "),
        document_marker=_text(fields, "document_prefix", "[D] "),
        filled=0 if fields.get("do_query_expansion") is False else _filled(fields, "query_length"),
        seen=fields.get("attend_to_expansion_tokens") is True,
        skipped=tuple(skipped),
    )


def _text(fields: Mapping[str, Any], name: str, default: str) -> str:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: must be a token's text")
    return value


def _filled(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if value is None:
        return 32
    if not isinstance(value, int) or not 0 < value <= MAX_FILLED:
        raise ValueError(f"{name}: must be between 1 and {MAX_FILLED}")
    return value


def _width(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def marks_of(late: Late, id_of: Callable[[str], int | None]) -> Marks:
    """Raises ValueError if the tokenizer lacks a marker."""
    query, document = id_of(late.query_marker), id_of(late.document_marker)
    if query is None or document is None:
        raise ValueError(f"tokenizer.json has no tokens {late.query_marker!a} and {late.document_marker!a}")
    found = (id_of(word) for word in late.skipped)
    return Marks(query, document, frozenset(one for one in found if one is not None))
