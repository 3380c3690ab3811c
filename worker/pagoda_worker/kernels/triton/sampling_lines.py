"""What rows ask of sampling and how far they have come, on the device: a line per row, the same one in every table.

The host writes a line when it first sees the row; `sampling` then brings it up to date with every token it chooses, so
no token has to come back before the next can be chosen, except of rows with a grammar: what may come next, the host
finds in their outputs, and sends as bits, in one copy for all such rows of a step. Nothing is said of rows that have
ended: a line is only ever written over.

The tables are as large as they ever get, so that they are in the memory plan and no step can fail for want of them. Of
their bytes nearly all are counts, 4 per row and token: 156 MB for 256 rows and a vocabulary of 152 000.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from pagoda_proto.params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from pagoda_worker.rows.order import Ids
from pagoda_worker.rows.penalties import Processing, completes
from pagoda_worker.rows.rows import Row
from pagoda_worker.sampling.device_sampler import Upload

Edits = NDArray[np.int32]
Words = list[tuple[int, ...]]

# What a line of `SamplingLines.numbers` has, 8 bytes each, and how device code calls it.
COLUMNS = (
    ("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8"), ("min_p", "f8"), ("seed", "u8"), ("choice", "i8"),
    ("repetition", "f8"), ("frequency", "f8"), ("presence", "f8"), ("allowed", "i8"), ("edited", "i8"),
    ("min_tokens", "i8"), ("position", "i8"), ("last", "i8"),
)  # fmt: skip
LINE = np.dtype(list(COLUMNS))
(
    TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, CHOICE, REPETITION, FREQUENCY, PRESENCE, ALLOWED, EDITED, MIN_TOKENS,
    POSITION, LAST,
) = (tl.constexpr(column) for column in range(len(COLUMNS)))  # fmt: skip
WIDTH: tl.constexpr = tl.constexpr(len(COLUMNS))

IN_PROMPT = 1 << 30  # added to a token's count if only the prompt had it when the line was written
ALWAYS, EARLY, NEVER = -1, -2, -3  # in place of the token that an edit comes after
MAX_EDITS = MAX_LOGIT_BIAS + MAX_BAD_WORDS + MAX_STOP_TOKEN_IDS + 64  # the rest are ends of sequence


class SamplingLines:
    """Tables of `max_rows` lines.

    Attributes:
        numbers: [L, WIDTH] int64, a LINE each; `reals` is the same memory as float64. `position` counts the outputs,
            `last` is the latest (NEVER if there is none); both are the device's to advance, like `counts`.
        counts: [L, V] int32, how often a token is in the output, plus IN_PROMPT; of rows with penalties.
        allowed: [L, ceil(V / 32)] int32 bit masks, lowest bit first; of rows that have `allowed` set. With a grammar
            it is that of one position.
        edits: [L, 1 + 3 * MAX_EDITS] int32, of rows that have `edited` set: their number, then of each the token, the
            float32 bits of what is added to its logit (-inf forbids it), and when: after this last output, ALWAYS, or
            EARLY, that is before `min_tokens` outputs.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, upload: Upload) -> None:
        def table(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(max_rows, width, dtype=dtype, device=device)

        self.numbers = table(len(COLUMNS), torch.int64)
        self.reals = self.numbers.view(torch.float64)
        self.counts = table(vocab_size, torch.int32)
        self.allowed = table(-(-vocab_size // 32), torch.int32)
        self.edits = table(1 + 3 * MAX_EDITS, torch.int32)
        self._upload = upload

    def __len__(self) -> int:
        return len(self.numbers)

    def write(self, lines: Sequence[int], rows: Sequence[Row]) -> None:
        """Give distinct `lines` to `rows`, of which the host knows all outputs, or which have no processing."""
        packed = np.array([_line_of(row) for row in rows], LINE).view(np.int64)
        there = self._upload(torch.from_numpy(np.concatenate((np.array(lines), packed))))
        self.numbers.index_copy_(0, there[: len(lines)], there[len(lines) :].view(len(lines), -1))
        for line, row in zip(lines, rows, strict=True):
            if row.processing is not None:
                self._write_processing(line, row.processing)
                self.write_edits(line, row.processing, near_words(row.processing, row.outputs))

    def write_edits(self, line: int, processing: Processing, words: Words) -> None:
        edits = edits_of(processing, words)
        self._fill(self.edits[line], np.concatenate((np.array([len(edits)], np.int32), edits.ravel())))

    def write_masks(self, lines: Sequence[int], rows: Sequence[Row]) -> None:
        """Have the lines know what their rows' grammars leave the next token. The host knows all outputs of these."""
        masks = np.zeros((len(rows), 1 + self.allowed.shape[1]), np.int32)
        masks[:, 0] = lines
        for mask, row in zip(masks[:, 1:], rows, strict=True):
            if row.processing is not None and row.processing.matcher is not None:
                bits = row.processing.matcher.bits()[: mask.nbytes]
                mask.view(np.uint8)[: len(bits)] = bits
                if row.processing.allowed is not None:
                    mask &= self._packed(row.processing.allowed)
        there = self._upload(torch.from_numpy(masks))
        self.allowed.index_copy_(0, there[:, 0].long(), there[:, 1:])

    def _packed(self, ids: Ids) -> NDArray[np.int32]:
        bits = np.zeros(32 * self.allowed.shape[1], bool)
        bits[ids] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _write_processing(self, line: int, processing: Processing) -> None:
        if processing.allowed is not None:
            self._fill(self.allowed[line], self._packed(processing.allowed))
        if processing.counts is not None:
            times = processing.counts.output_counts
            counted = np.stack((processing.counts.ids, np.where(times, times, IN_PROMPT)))
            ids, values = self._upload(torch.from_numpy(counted))
            self.counts[line].zero_().index_copy_(0, ids, values.int())

    def _fill(self, line: torch.Tensor, values: NDArray[np.int32]) -> None:
        line[: len(values)].copy_(self._upload(torch.from_numpy(values)))


def _line_of(row: Row) -> tuple[float, ...]:
    """A LINE."""
    p, outputs, processing = row.params, row.outputs, row.processing
    return (
        p.temperature, p.top_k, p.top_p, p.min_p, row.seed, row.choice,
        p.repetition_penalty, p.frequency_penalty, p.presence_penalty,
        processing is not None and (processing.allowed is not None or processing.matcher is not None),
        processing is not None and num_edits(processing) > 0,
        p.min_tokens, len(outputs), int(outputs[-1]) if len(outputs) else NEVER,
    )  # fmt: skip


def num_edits(processing: Processing) -> int:
    """As many as `edits_of` can be."""
    return len(processing.bias_ids) + len(processing.params.bad_words_token_ids) + len(processing.ending)


def shifts(processing: Processing) -> bool:
    """Whether its edits depend on outputs before the last."""
    return any(len(word) > 2 for word in processing.params.bad_words_token_ids)


def near_words(processing: Processing, outputs: Ids) -> Words:
    """The bad words that the token after `outputs` may complete, if the last of these, not looked at, is the right one.

    For words of one and two tokens that is always so.
    """
    return [w for w in processing.params.bad_words_token_ids if len(w) == 1 or completes(w[:-1], outputs[:-1])]


def edits_of(processing: Processing, words: Words) -> Edits:
    """The edits [n, 3] of a token that must not complete any of these `near_words`."""
    parts = (
        (processing.bias_ids, processing.bias, ALWAYS),
        ([w[-1] for w in words], -np.inf, [w[-2] if len(w) > 1 else ALWAYS for w in words]),
        (processing.ending, -np.inf, EARLY),
    )
    return np.concatenate([_edits(np.array(ids, np.int32), add, after) for ids, add, after in parts])


def _edits(ids: Edits, add: NDArray[np.float32] | float, after: list[int] | int) -> Edits:
    edits = np.empty((len(ids), 3), np.int32)
    edits[:, 0], edits[:, 2] = ids, after
    edits.view(np.float32)[:, 1] = add
    return edits
