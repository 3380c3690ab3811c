"""A decoder whose steps are recorded when it first sees a cache, if the back end can record.

The op-by-op path stays: it is what is recorded, what other back ends run, and the oracle of the recordings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import Ops
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.rows.batch import Batch
from pagoda_worker.rows.slots import TokenSlots, slots_of

Run = Callable[[Batch], tuple[torch.Tensor, ...]]


class Recorded:
    """See `loading.model.Model`. `max_tokens` and `max_rows`: most of a step."""

    def __init__(self, decoder: Decoder, max_tokens: int, max_rows: int) -> None:
        self.kv_groups = decoder.kv_groups
        self.logits = decoder.logits
        self._decoder = decoder
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._kv: Any = None
        self._runs: dict[tuple[str, bool], Run | None] = {}

    def forward(self, batch: Batch, kv: Any) -> torch.Tensor:
        """Hidden states [T, H] of the batch; if recorded, valid until the next call."""
        run = self._recorded("forward", batch, kv)
        return self._decoder.forward(batch, kv) if run is None else run(batch)[0]

    def decoded(self, batch: Batch, kv: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Hidden states and logits of a step that samples from every token, in one call, valid until the next.

        None: it is no such step, or the back end cannot record it.
        """
        if not batch.num_logits == batch.num_tokens <= self._max_rows:
            return None
        run = self._recorded("decode", batch, kv)
        if run is None:
            return None
        hidden, logits = run(batch)
        return hidden, logits

    def _recorded(self, what: str, batch: Batch, kv: Any) -> Run | None:
        """The recording for such batches. Batches with adapters have a separate one, so that the others pay nothing for
        them; None if an adapter replaces a tensor of the model."""
        if self._decoder.replaced(batch.slots) is not None:
            return None
        if kv is not self._kv:
            self._kv, self._runs = kv, {}
        key = what, batch.slots is not None
        if key not in self._runs:
            self._runs[key] = self._record(what, adapted=batch.slots is not None)
        return self._runs[key]

    def _record(self, what: str, *, adapted: bool) -> Run | None:
        decoder, decodes = self._decoder, what == "decode"

        def compute(ops: Ops, batch: Batch, cache: Any) -> tuple[torch.Tensor, ...]:
            by = decoder.on(ops)
            slots = slots_of(0, batch.num_tokens, ops.device) if adapted else None  # only their presence matters
            hidden = by.forward(replace(batch, slots=slots), cache)
            return (hidden, by.logits(hidden, slots=slots)) if decodes else (hidden,)

        return decoder.ops.record(compute, self._kv, self._max_rows if decodes else self._max_tokens)


class Reading(Protocol):
    """A model that only computes hidden states."""

    ops: Ops

    def on(self, ops: Ops) -> Reading: ...

    def forward(self, batch: Batch, kv: Any) -> torch.Tensor: ...


class RecordedReader:
    """The same for a model that reads. `max_tokens`: most of a step."""

    def __init__(self, model: Reading, max_tokens: int) -> None:
        self.kv_groups: tuple[KVShape, ...] = getattr(model, "kv_groups", ())
        self._model = model
        self._max_tokens = max_tokens
        self._kv: Any = None
        self._forward: Run | None = None

    def forward(self, batch: Batch, kv: Any) -> torch.Tensor:
        """Hidden states [T, H] of the batch; if recorded, valid until the next call."""
        if kv is not self._kv:
            model = self._model
            self._kv = kv
            self._forward = model.ops.record(
                lambda ops, part, cache: (model.on(ops).forward(part, cache),), kv, self._max_tokens
            )
        return self._model.forward(batch, kv) if self._forward is None else self._forward(batch)[0]

    def logits(self, hidden: torch.Tensor, *, slots: TokenSlots | None = None) -> torch.Tensor:
        """Raises TypeError: it does not generate."""
        raise TypeError("a model that does not generate has no logits")
