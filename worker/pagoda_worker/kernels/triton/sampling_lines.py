"""The rows' sampling parameters and state on the device: one line per row, at the same index in every table.

The host writes a line when it first sees the row; `sampling` then updates it with every token it chooses, so no token
has to return to the host before the next can be chosen. Rows with a grammar are the exception: the host derives from
their outputs which tokens may come next and sends them as bit masks, in one copy for all such rows of a step. The
device is not told when rows end: their lines are simply overwritten later.

The tables are allocated at full size, so that they are in the memory plan and no step can fail for lack of them. Nearly
all of their bytes are counts, 4 per row and vocabulary entry: 156 MB for 256 rows and a vocabulary of 152 000.
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

# The columns of a line of `SamplingLines.numbers`, 8 bytes each, and their names in device code.
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

IN_PROMPT = 1 << 30  # the count of a token that was only in the prompt when the line was written; outputs are added
ALWAYS, EARLY, NEVER = -1, -2, -3  # in place of the token that an edit applies after
MAX_EDITS = MAX_LOGIT_BIAS + MAX_BAD_WORDS + MAX_STOP_TOKEN_IDS + 64  # 64 for end-of-sequence tokens


class SamplingLines:
    """Tables of `max_rows` lines.

    Attributes:
        numbers: [L, WIDTH] int64, a LINE each; `reals` is the same memory as float64. `position` counts the outputs,
            `last` is the latest (NEVER if there is none); the device advances both, and `counts`.
        counts: [L, V] int32, occurrences of each token in the output, plus IN_PROMPT; for rows with penalties.
        allowed: [L, ceil(V / 32)] int32 bit masks, lowest bit first; for rows with `allowed` set. With a grammar the
            mask holds for one position.
        edits: [L, 1 + 3 * MAX_EDITS] int32, for rows with `edited` set: the number of edits, then for each the token,
            the float32 bits of the number added to its logit (-inf forbids it), and when it applies: after this last
            output, ALWAYS, or EARLY, that is before `min_tokens` outputs.
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
        """Write `rows` to distinct `lines`. The host must know all outputs of rows with processing."""
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
        """Write what the rows' grammars allow as the next token. The host must know all outputs of these rows."""
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
    """The most edits that `edits_of` can return."""
    return len(processing.bias_ids) + len(processing.params.bad_words_token_ids) + len(processing.ending)


def shifts(processing: Processing) -> bool:
    """Whether its edits depend on outputs before the last."""
    return any(len(word) > 2 for word in processing.params.bad_words_token_ids)


def near_words(processing: Processing, outputs: Ids) -> Words:
    """The bad words that the token after `outputs` may complete, depending on the last of these, which is ignored here.

    Words of one and two tokens are always among them.
    """
    return [w for w in processing.params.bad_words_token_ids if len(w) == 1 or completes(w[:-1], outputs[:-1])]


def edits_of(processing: Processing, words: Words) -> Edits:
    """The edits [n, 3] for a token that must not complete any of these `near_words`."""
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
