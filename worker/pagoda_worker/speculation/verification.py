"""A draft is accepted if it equals the token sampled at its position; so speculation changes the number of steps, and
no token.

The target computes a row's last token and its drafts in one pass. Kernels do not care how tokens are split into chunks,
so each position's logits are bit for bit those of sampling the tokens before it one by one. Positions are sampled in
order, from the row with all tokens before the position appended, so penalties, min_tokens and the random stream see
what they would see without drafts. The first token that differs from its draft is still right; later positions are
ignored.
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
    """Sample each row until a draft fails, and append the tokens to it; returned by row id.

    A fault after the first position is left for the step that gets there: the row may end before.

    Args:
        sample: See `Ops.sample`.
        logits: [R, V] float32, raw; for each row in order, 1 + its number of drafts; overwritten.
        rows: The rows that sample.
        drafts: By row id.
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
