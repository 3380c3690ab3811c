"""`device_sampler.DeviceSampler` with Triton: tracks which row has which line, and what the host must still upload.

A line is a cache entry for a row. It is valid if it was written for this very row and has counted as many outputs as
the row has, including a promised one. A row without a valid line gets the least recently used one. Between two steps
with the same rows, nothing is written or uploaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch

from pagoda_worker.kernels.triton.report import report
from pagoda_worker.kernels.triton.sampling import sample
from pagoda_worker.kernels.triton.sampling_lines import MAX_EDITS, SamplingLines, Words, near_words, num_edits, shifts
from pagoda_worker.rows.rows import Row
from pagoda_worker.sampling.device_sampler import Chosen, Upload

NO_LINE = -1


@dataclass(frozen=True)
class Asked:
    """What a step's rows need, reused as long as the rows and their lines stay the same.

    Attributes:
        lines: The line of each row; `there` has them on the device.
        draws: Whether any row has a temperature.
        reported: Places [P] int64 on the device of rows that want log-probabilities; None if no row does.
        num_top: The largest number of top tokens that any of these wants, at least 1.
        shifting: Places of rows whose `near_words` may change with every step.
        formed: Places of rows with a grammar, whose mask changes with every step.
    """

    lines: list[int]
    there: torch.Tensor
    draws: bool
    reported: torch.Tensor | None
    num_top: int
    shifting: list[int]
    formed: list[int]


class TritonSampler:
    """Serves up to `max_rows` rows at once of a model with `vocab_size` logits."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, upload: Upload) -> None:
        self._table = SamplingLines(max_rows, vocab_size, device, upload)
        self._vocab_size = vocab_size
        self._upload = upload
        self._line_of: dict[int, int] = {}  # by row id
        self._holders: list[Callable[[], Row | None]] = [_nobody] * max_rows
        self._row_ids = [0] * max_rows
        self._outputs = [0] * max_rows  # counted by the device
        self._used = np.zeros(max_rows, np.int64)  # when a line was last used, counting changes of the set of rows
        self._words: dict[int, Words] = {}  # the near words on the device, for lines where these shift
        self._asked: Asked | None = None

    def takes(self, rows: Sequence[Row]) -> bool:
        """Whether no row's processing needs an output that the host does not know yet.

        The device knows the last output of every line. But the host matches bad words of three or more tokens against
        the outputs before the last, and can write a line (its counts, its last output) only if it knows all outputs of
        the row. Neither is a problem with two steps in flight if all steps come through here. Nor does any model have
        so many end-of-sequence tokens that a row's edits do not fit into its line. The host derives a grammar's mask
        from all outputs: of two steps in flight, such a row is taken only in the first.
        """
        return all(row.processing is None or self._knows(row) for row in rows)

    def _knows(self, row: Row) -> bool:
        processing = row.processing
        if processing is not None and num_edits(processing) > MAX_EDITS:
            return False
        if row.matcher is not None and row.num_promised:
            return False
        return not row.num_promised or (row.num_promised == 1 and self._line(row) != NO_LINE)

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> Chosen:
        """See `DeviceSampler.sample`; raises ValueError if there are more rows than lines."""
        asked = self._ask(rows)
        raw = None if asked.reported is None else logits.index_select(0, asked.reported)
        ids = sample(logits, self._table, asked.there, asked.draws)
        for line in asked.lines:
            self._outputs[line] += 1
        if raw is None or asked.reported is None:
            return Chosen(ids)
        return Chosen(ids, report(raw, ids.index_select(0, asked.reported).clamp_(min=0), asked.num_top))

    def _line(self, row: Row) -> int:
        """The valid line of this row, or NO_LINE."""
        line = self._line_of.get(row.row_id, NO_LINE)
        holds = line >= 0 and self._holders[line]() is row and self._outputs[line] == row.num_outputs
        return line if holds else NO_LINE

    def _ask(self, rows: Sequence[Row]) -> Asked:
        lines = [self._line(row) for row in rows]
        asked = self._asked
        if NO_LINE in lines:
            asked = self._asked = None
            self._write(rows, lines)
        if asked is None or lines != asked.lines:
            asked = self._asked = self._asked_by(rows, lines)
        for place in asked.shifting:
            self._shift(lines[place], rows[place])
        if asked.formed:
            self._table.write_masks([lines[place] for place in asked.formed], [rows[place] for place in asked.formed])
        return asked

    def _write(self, rows: Sequence[Row], lines: list[int]) -> None:
        """Assign lines to the rows that have none, write them, and complete `lines`."""
        if len(rows) > len(self._table):
            raise ValueError(f"{len(rows)} rows exceed the {len(self._table)} lines of the table")
        missing = [place for place, line in enumerate(lines) if line == NO_LINE]
        self._used[[line for line in lines if line != NO_LINE]] = self._used.max() + 1
        given = np.argsort(self._used, kind="stable")[: len(missing)].tolist()
        for line in given:  # invalid until written, even if writing fails
            self._holders[line] = _nobody
        self._table.write(given, [rows[place] for place in missing])
        for line, place in zip(given, missing, strict=True):
            row = rows[place]
            if self._line_of.get(self._row_ids[line]) == line:
                del self._line_of[self._row_ids[line]]
            lines[place] = self._line_of[row.row_id] = line
            self._row_ids[line], self._outputs[line], self._holders[line] = row.row_id, row.num_outputs, ref(row)
            self._words.pop(line, None)

    def _asked_by(self, rows: Sequence[Row], lines: list[int]) -> Asked:
        self._used[lines] = self._used.max() + 1
        reported = [place for place, row in enumerate(rows) if row.params.logprobs is not None]
        there = self._upload(torch.tensor(lines + reported))
        return Asked(
            lines=lines,
            there=there[: len(lines)],
            draws=not all(row.params.greedy for row in rows),
            reported=there[len(lines) :] if reported else None,
            num_top=min(self._vocab_size, max([1, *(rows[place].params.logprobs or 1 for place in reported)])),
            shifting=[place for place, row in enumerate(rows) if row.processing is not None and shifts(row.processing)],
            formed=[place for place, row in enumerate(rows) if row.matcher is not None],
        )

    def _shift(self, line: int, row: Row) -> None:
        """Update the line's bad words that the next token may complete."""
        if row.processing is None:
            return
        words = near_words(row.processing, row.outputs)
        if words != self._words.get(line):
            self._table.write_edits(line, row.processing, words)
            self._words[line] = words


def _nobody() -> None:
    return None
