"""Turns a prompt's hidden states into a model's output; a request's `PoolingParams` may adjust it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from pagoda_proto.errors import ErrorCode
from pagoda_proto.pooling.late import Marks
from pagoda_proto.pooling.params import (
    CLASSIFY,
    EMBED,
    MAX_POOLED_BYTES,
    MAX_SIM,
    TOKEN_EMBED,
    PoolingParams,
    Readings,
)
from pagoda_worker.pooling.stages import ACTIVATIONS, WAYS, Floats, Stage, max_sim, normalized
from pagoda_worker.sampling.sampler import NOT_A_NUMBER, Fault


@dataclass(frozen=True, kw_only=True)
class Pooler:
    """`ways` pool the vectors of tokens into one, concatenated if there are several; `stages` follow, and give the
    scores of a model with a head.

    Attributes:
        width: Numbers of a vector, or labels.
        outputs: Supported outputs; see `pagoda_proto.pooling.params`.
        normalizes: Whether vectors have length 1 unless the request says otherwise.
        skips: Whether a mean leaves out an instruction at the front.
        activation: Of scores.
        marks: Special tokens of late interaction; None for other models.
        filled: Token count that its queries are padded to.
    """

    ways: tuple[str, ...]
    stages: tuple[Stage, ...] = ()
    width: int
    outputs: tuple[str, ...] = (EMBED,)
    normalizes: bool = False
    skips: bool = False
    activation: str = "identity"
    marks: Marks | None = None
    filled: int = 0

    @property
    def readings(self) -> Readings:
        return Readings(self.outputs, self.width)

    @property
    def needs_all(self) -> bool:
        """Whether it looks at more than a prompt's last token."""
        return self.ways != ("last",) or TOKEN_EMBED in self.outputs

    def digest(self) -> bytes:
        """A digest of everything here that a vector depends on."""
        told = sha256(repr((self.ways, self.outputs, self.normalizes, self.skips, self.activation)).encode())
        if self.marks is not None:
            told.update(repr((self.marks.query, self.marks.document, sorted(self.marks.skipped))).encode())
        for stage in self.stages:
            for value in vars(stage).values():
                told.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        return told.digest()

    def read(self, states: Floats, params: PoolingParams, token_ids: Sequence[int] = ()) -> bytes | Fault:
        """states [T, H] of a whole prompt, or of its end if only the last token is needed -> see `RowOutput.pooled`.
        `token_ids` are the prompt's."""
        if params.unseen and (params.second_start or len(states)) > self.filled:
            return Fault(ErrorCode.INVALID_ARGUMENT, f"unseen: queries are padded to at most {self.filled} tokens")
        if params.output == TOKEN_EMBED:
            size = len(states) * (params.dimensions or self.width) * states.itemsize
            if size > MAX_POOLED_BYTES:
                message = f"vectors of {len(states)} tokens have {size} bytes; at most {MAX_POOLED_BYTES} are allowed"
                return Fault(ErrorCode.INVALID_ARGUMENT, message)
            found = self._vectors(states, params)
        elif params.output == MAX_SIM and self.marks is not None:
            found = self._alike(states, params.second_start, token_ids, self.marks)
        elif params.output == CLASSIFY:
            found = self._staged(self._pooled(states, 0))
            found = found if params.activate is False else ACTIVATIONS[self.activation](found)
        else:
            found = self._vectors(self._pooled(states, params.skip if self.skips else 0), params)
        if not np.isfinite(found).all():
            return NOT_A_NUMBER
        return found.astype("<f4").tobytes()

    def _alike(self, states: Floats, second_start: int, token_ids: Sequence[int], marks: Marks) -> Floats:
        vectors = normalized(self._staged(states))
        kept = [second_start + place for place in marks.kept(token_ids[second_start:])]
        return max_sim(vectors[:second_start], vectors[kept])

    def _pooled(self, states: Floats, skip: int) -> Floats:
        parts = [WAYS[way](states if way in ("cls", "last") else states[skip:]) for way in self.ways]
        return np.concatenate(parts)[None]

    def _staged(self, vectors: Floats) -> Floats:
        for stage in self.stages:
            vectors = stage(vectors)
        return vectors

    def _vectors(self, states: Floats, params: PoolingParams) -> Floats:
        vectors = self._staged(states)[:, : params.dimensions or None]
        wanted = self.normalizes if params.normalize is None else params.normalize
        return normalized(vectors) if wanted else vectors


def widest(stages: Sequence[Stage], width: int) -> int:
    """The width after `stages`, given the width before them."""
    for stage in stages:
        weight = getattr(stage, "weight", None)
        width = width if weight is None or weight.ndim < 2 else weight.shape[0]
    return width
