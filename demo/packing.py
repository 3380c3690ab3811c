"""Turns generated conversations into packed batches for training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from torch import Tensor

from demo.tasks import training_example
from demo.tokenizer import IM_END, IM_START, render

ANSWER_WEIGHT, OTHER_WEIGHT = 1.0, 0.05
BYTES_ONLY_SHARE = 0.06


@dataclass(frozen=True)
class Document:
    """Token ids, and how much the prediction of each of them counts."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True)
class Batch:
    """Inputs, next-token targets, their weights, and the additive attention mask."""

    ids: Tensor
    targets: Tensor
    weights: Tensor
    mask: Tensor


def bytes_only(tokenizer: Tokenizer) -> Tokenizer:
    """The same vocabulary, but only role headers and special tokens stay whole.

    A few conversations are encoded this way, so that the model also knows how the words with
    tokens of their own are spelled.
    """
    plain: Tokenizer = Tokenizer.from_str(tokenizer.to_str())
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"(?:system|user|assistant)\n|[\s\S]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return plain


class DocumentSource:
    """An endless, seeded stream of encoded conversations of at most `limit` tokens."""

    def __init__(self, tokenizer: Tokenizer, limit: int, seed: int) -> None:
        self._tokenizers = (tokenizer, bytes_only(tokenizer))
        self._limit = limit
        self._rng = random.Random(seed)
        self._start = tokenizer.token_to_id(IM_START)
        self._end = tokenizer.token_to_id(IM_END)
        self._assistant = tokenizer.encode("assistant\n").ids[0]

    def __iter__(self) -> Iterator[Document]:
        while True:
            plain = self._rng.random() < BYTES_ONLY_SHARE
            text = render(training_example(self._rng))
            ids = self._tokenizers[plain].encode(text, add_special_tokens=False).ids
            if len(ids) <= self._limit:
                yield Document(ids, self._weights(ids))

    def _weights(self, ids: list[int]) -> list[float]:
        """Answers count fully, up to and including their end-of-turn token."""
        weights, answering, previous = [], False, -1
        for token in ids:
            weights.append(ANSWER_WEIGHT if answering else OTHER_WEIGHT)
            if token == self._assistant and previous == self._start:
                answering = True
            elif token == self._end:
                answering = False
            previous = token
        return weights


def pack(documents: Iterator[Document], rows: int, length: int, dtype: torch.dtype) -> Batch:
    """Fills rows first-fit; a document attends only to itself.

    RoPE only encodes distances, so positions need not restart with each document.
    """
    ids = torch.zeros(rows, length + 1, dtype=torch.long)
    weights = torch.zeros(rows, length + 1)
    owner = torch.full((rows, length + 1), -1)
    used = [0] * rows
    misses = number = 0
    while misses < 4:
        document = next(documents)
        size = len(document.ids)
        row = next((r for r in range(rows) if used[r] + size <= length), None)
        if row is None:
            misses += 1  # dropped: the stream is endless
            continue
        span = slice(used[row], used[row] + size)
        ids[row, span] = torch.tensor(document.ids)
        weights[row, span] = torch.tensor(document.weights)
        weights[row, used[row]] = 0.0  # nothing predicts the first token of a document
        owner[row, span] = number
        used[row] += size
        number += 1
    seen = owner[:, :length]
    allowed = (seen[:, :, None] == seen[:, None, :]).tril()
    mask = torch.zeros(rows, 1, length, length, dtype=dtype)
    mask.masked_fill_(~allowed[:, None], float("-inf"))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights[:, 1:], mask)
