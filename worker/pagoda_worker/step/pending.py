"""A step that was launched and not yet answered, with everything its answer needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pagoda_proto.steps import Chunk, RowError, StepResult
from pagoda_worker.device.accelerator import Fetch
from pagoda_worker.rows.rows import Ids, Row

Work = Sequence[tuple[Row, Chunk]]


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """Tokens chosen on the device: `ids` [R] feed the next step there, `fetch` brings the results to the host.

    `promised` maps each sampled row's id to its place in `ids` and its place among the row's own tokens.
    """

    ids: torch.Tensor
    fetch: Fetch
    promised: dict[int, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class OnHost:
    """Tokens to be chosen by the host from `logits` [R, V]; `hidden` [T, H] is valid until the next forward pass.

    `drafts` are those that were computed, `num_drafted` how many were tried; both by row id.
    """

    starts: list[int]
    hidden: torch.Tensor
    logits: torch.Tensor | None
    drafts: Mapping[int, Ids]
    num_drafted: Mapping[int, int]


@dataclass(kw_only=True)
class Pending:
    """Written only by the runner.

    Attributes:
        decoding: Ids of the rows that the plan lets decode, in its order; some may be missing in `work`.
        began: When the plan arrived, by time.perf_counter; `computing`: when its rows were ready to be computed.
        launched: The running computation; None if there is nothing to compute.
        errors: Of invalid claims.
        lost: Rows that an earlier step ended after this one was launched.
        result: The answer, once it is made.
    """

    step: int
    work: Work
    decoding: Sequence[int]
    began: float
    computing: float
    launched: OnDevice | OnHost | None = None
    errors: list[RowError] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    result: StepResult | None = None

    @property
    def done(self) -> bool:
        """Whether the answer can be made without waiting for the device to choose tokens."""
        return not isinstance(self.launched, OnDevice) or self.result is not None or self.launched.fetch.done()

    def lose(self, row_ids: Iterable[int]) -> None:
        """These rows have ended meanwhile; those of them that this step computes are answered as unknown."""
        self.lost |= {row.row_id for row, _ in self.work} & set(row_ids)
