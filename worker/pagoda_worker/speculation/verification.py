"""A draft holds if it is the token that is sampled in its place; so speculation changes the number of steps, and no
token.

The target computes a row's last token and its drafts in one pass. Each position's logits are, bit for bit, what they
would be had the tokens before it been sampled one by one, because kernels do not care how tokens are cut into chunks.
Positions are sampled in order, from the row with all tokens before the position appended: penalties, min_tokens and the
random stream see what they would have seen. The first token that is not the draft is still right; what follows it is
not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from pagoda_worker.rows.rows import Ids, Row
from pagoda_worker.sampling.sampler import Fault, Sample

Sampler = Callable[[torch.Tensor, Sequence[Row]], list[Sample | Fault]]


def sample_drafted(
    sample: Sampler, logits: torch.Tensor, rows: Sequence[Row], drafts: Mapping[int, Ids]
) -> dict[int, list[Sample] | Fault]:
    """Sample rows, each until a draft fails, and append the tokens to them; by row id.

    A fault after the first position is left for the step that gets there: the row may end before.

    Args:
        sample: See `Ops.sample`.
        logits: [R, V] float32, raw, 1 + the number of its drafts for each row in order; overwritten.
        rows: The rows that sample.
        drafts: Guesses by row id.
    """
    done: dict[int, list[Sample] | Fault] = {}
    going: list[tuple[Row, int, list[int]]] = []
    start = 0
    for row in rows:
        guesses = drafts[row.row_id].tolist() if row.row_id in drafts else []
        going.append((row, start, guesses))
        start += 1 + len(guesses)
    position = 0
    while going:
        asked = logits if len(going) == start else logits[[first + position for _, first, _ in going]]
        held = []
        for entry, one in zip(going, sample(asked, [row for row, _, _ in going]), strict=True):
            row, _, guesses = entry
            if isinstance(one, Fault):
                done.setdefault(row.row_id, one)
                continue
            samples = done.setdefault(row.row_id, [])
            if isinstance(samples, list):
                samples.append(one)
            row.append(one.token_id)
            if position < len(guesses) and guesses[position] == one.token_id:
                held.append(entry)
        going, position = held, position + 1
    return done
