"""Log-probabilities in the shapes of OpenAI (chat, completions) and vLLM (prompt_logprobs).

A token that is not valid UTF-8 by itself is written as its bytes in hex, as OpenAI does. Chat entries also carry the
exact bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pagoda_gateway.text.detokenizer import Detokenizer
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.steps import TopLogprobs

LEAST = -9999.0  # OpenAI's value for "impossible", as JSON has no infinity


def token_text(text: ModelText, token_id: int, prefix: str = "") -> str:
    """The token as a string; `prefix` marks one shown as bytes."""
    data = text.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


def chat_logprobs(
    text: ModelText, token_ids: Sequence[int], entries: Sequence[TopLogprobs], top: int
) -> Iterator[dict[str, Any]]:
    """The items of `choices[].logprobs.content`, with `top` alternatives each."""
    for token_id, entry in zip(token_ids, entries, strict=True):
        others = zip(entry.top_ids[:top], entry.top_logprobs, strict=False)
        alternatives = [_chat_token(text, other, logprob) for other, logprob in others]
        yield _chat_token(text, token_id, entry.logprob) | {"top_logprobs": alternatives}


def _chat_token(text: ModelText, token_id: int, logprob: float) -> dict[str, Any]:
    data = text.token_bytes(token_id)
    return {"token": token_text(text, token_id), "logprob": _finite(logprob), "bytes": list(data)}


COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
Row = tuple[str, float | None, dict[str, float] | None, int]


class CompletionLogprobs:
    """`choices[].logprobs` of one choice of a plain completion, row by row; `COLUMNS` names a row's fields.

    `text_offset` counts characters of the choice's text, echoed prompt included.
    """

    def __init__(self, text: ModelText, top: int, skip_special_tokens: bool) -> None:
        self._text = text
        self._top = top
        self._detokenizer = Detokenizer(text.table, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], entries: Sequence[TopLogprobs], shown: str) -> Iterator[Row]:
        """Rows of the echoed prompt, whose text is `shown`. Its first token has no log-probability."""
        opening = Detokenizer(self._text.table, at_start=True)
        for token_id, entry in zip(token_ids, (None, *entries), strict=True):
            yield self._row(token_id, entry)
            text = opening.push((token_id,))
            if token_id in self._text.table.special_ids:  # takes up text only if the client spelled it out
                text = self._text.token_bytes(token_id).decode(errors="replace")
                text = text if shown.startswith(text, self._offset) else ""
            if text.startswith(" ") and not shown.startswith(" ", self._offset):
                text = text[1:]  # some tokenizers put a space after a special token
            self._offset += len(text)
        self._offset = len(shown)

    def output(self, token_ids: Sequence[int], entries: Sequence[TopLogprobs]) -> Iterator[Row]:
        for token_id, entry in zip(token_ids, entries, strict=True):
            yield self._row(token_id, entry)
            self._offset += len(self._detokenizer.push((token_id,)))

    def _row(self, token_id: int, entry: TopLogprobs | None) -> Row:
        token = token_text(self._text, token_id, "bytes:")
        if entry is None:
            return token, None, None, self._offset
        return token, _finite(entry.logprob), dict(self._top_pairs(token_id, entry)), self._offset

    def _top_pairs(self, token_id: int, entry: TopLogprobs) -> Iterator[tuple[str, float]]:
        for other, logprob in zip(entry.top_ids[: self._top], entry.top_logprobs, strict=False):
            yield token_text(self._text, other, "bytes:"), _finite(logprob)
        yield token_text(self._text, token_id, "bytes:"), _finite(entry.logprob)


def prompt_logprobs(
    text: ModelText, token_ids: Sequence[int], entries: Sequence[TopLogprobs], top: int
) -> Iterator[dict[str, Any] | None]:
    """The items of vLLM's `prompt_logprobs`: null for the first token, then token id -> logprob, rank, text."""
    yield None
    for token_id, entry in zip(token_ids[1:], entries, strict=True):
        ranked = enumerate(zip(entry.top_ids[:top], entry.top_logprobs, strict=False), 1)
        tokens = {other: (logprob, rank) for rank, (other, logprob) in ranked}
        tokens[token_id] = (entry.logprob, entry.rank)
        yield {
            str(other): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(text, other)}
            for other, (logprob, rank) in tokens.items()
        }
