"""Log-probabilities in the shapes of OpenAI (chat, completions) and vLLM (prompt_logprobs).

A token that is no whole character has no text of its own: it is written as its bytes in hex, as OpenAI does. Chat
entries carry the exact bytes beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pagoda_gateway.text.detokenizer import Detokenizer
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.steps import TopLogprobs

LEAST = -9999.0  # JSON has no infinity; OpenAI's number for "impossible"


def token_text(text: ModelText, token_id: int, prefix: str = "") -> str:
    """The token as a string; `prefix` marks one that is only bytes."""
    data = text.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


def chat_logprobs(
    text: ModelText, token_ids: Sequence[int], entries: Sequence[TopLogprobs], top: int
) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`, with `top` alternatives each."""
    return [
        _chat_token(text, token_id, entry.logprob)
        | {
            "top_logprobs": [
                _chat_token(text, other, logprob)
                for other, logprob in zip(entry.top_ids[:top], entry.top_logprobs, strict=False)
            ]
        }
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]


def _chat_token(text: ModelText, token_id: int, logprob: float) -> dict[str, Any]:
    data = text.token_bytes(token_id)
    return {"token": token_text(text, token_id), "logprob": _finite(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """`choices[].logprobs` of one choice of a plain completion, piece by piece.

    `text_offset` counts characters of the choice's text, echoed prompt included.
    """

    def __init__(self, text: ModelText, top: int, skip_special_tokens: bool) -> None:
        self._text = text
        self._top = top
        self._detokenizer = Detokenizer(text.table, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], entries: Sequence[TopLogprobs]) -> dict[str, Any]:
        """The echoed prompt: its first token has no log-probability."""
        first = self._describe(token_ids[:1], [None])
        return joined([first, self.output(token_ids[1:], entries)])

    def output(self, token_ids: Sequence[int], entries: Sequence[TopLogprobs]) -> dict[str, Any]:
        return self._describe(token_ids, entries)

    def _describe(self, token_ids: Sequence[int], entries: Sequence[TopLogprobs | None]) -> dict[str, Any]:
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            found["tokens"].append(token_text(self._text, token_id, "bytes:"))
            found["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            found["top_logprobs"].append(None if entry is None else dict(self._top_pairs(token_id, entry)))
            found["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.push((token_id,)))
        return found

    def _top_pairs(self, token_id: int, entry: TopLogprobs) -> Iterator[tuple[str, float]]:
        for other, logprob in zip(entry.top_ids[: self._top], entry.top_logprobs, strict=False):
            yield token_text(self._text, other, "bytes:"), _finite(logprob)
        yield token_text(self._text, token_id, "bytes:"), _finite(entry.logprob)


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Consecutive pieces of completion logprobs as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [item for part in parts for item in part[name]] for name in names}


def prompt_logprobs(
    text: ModelText, token_ids: Sequence[int], entries: Sequence[TopLogprobs], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: null for the first token, then token id -> logprob, rank, text."""
    found: list[dict[str, Any] | None] = [None]
    for token_id, entry in zip(token_ids[1:], entries, strict=True):
        ranked = enumerate(zip(entry.top_ids[:top], entry.top_logprobs, strict=False), 1)
        tokens = {other: (logprob, rank) for rank, (other, logprob) in ranked}
        tokens[token_id] = (entry.logprob, entry.rank)
        found.append(
            {
                str(other): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(text, other)}
                for other, (logprob, rank) in tokens.items()
            }
        )
    return found
