"""One engine core serves one model with one numerics: what its first worker brought decides who may join later.

The model and its limits hold for the life of the engine core, because accepted requests were checked against them. The
numerics hold while any worker is alive; they are what makes a replay on another worker yield the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from pagoda_proto.channel import MAX_ID_BYTES
from pagoda_proto.params import ModelLimits
from pagoda_proto.steps import PROTOCOL_VERSION, Hello, Refused

MAX_COUNT = 2**31 - 1
_COUNTS = ("vocab_size", "max_model_len", "num_blocks", "block_size", "world_size", "max_rows", "max_tokens_per_step")


class Registry:
    """Judges registrations and grants epochs."""

    def __init__(self, max_model_len: int = 0) -> None:
        self._asked_model_len = max_model_len
        self._granted = 0
        self.model_fingerprint = ""
        self.limits: ModelLimits | None = None

    def refusal(self, hello: Hello, alive: Iterable[Hello]) -> Refused | None:
        """Why this worker may not join, or None. `alive` are the workers admitted at this moment, less the asker."""
        problem = _malformed(hello) or self._other_model(hello)
        if problem is not None:
            return Refused(reason=problem, final=True)
        for other in alive:
            if other.worker_id == hello.worker_id:
                return Refused(reason=f"duplicate_id: a worker named {hello.worker_id!r} is alive")
            if other.numerics_id != hello.numerics_id:
                return Refused(
                    reason=f"numerics_id: live workers compute as {other.numerics_id!r}, this one as "
                    f"{hello.numerics_id!r}; a request moved between them would not continue with the same tokens"
                )
        return None

    def grant(self, hello: Hello) -> int:
        """Admit the worker: its epoch, higher than every one before."""
        if self.limits is None:
            self.model_fingerprint = hello.model_fingerprint
            self.limits = ModelLimits(hello.vocab_size, self._asked_model_len or hello.max_model_len)
        self._granted += 1
        return self._granted

    def _other_model(self, hello: Hello) -> str | None:
        needed = self.limits.max_model_len if self.limits else self._asked_model_len
        if hello.max_model_len < needed:
            return f"max_model_len: {needed} is served here, this worker takes {hello.max_model_len}"
        if self.limits is None:
            return None
        if hello.model_fingerprint != self.model_fingerprint:
            return f"model_fingerprint: {self.model_fingerprint!r} is served here, not {hello.model_fingerprint!r}"
        if hello.vocab_size != self.limits.vocab_size:
            return f"vocab_size: {self.limits.vocab_size} is served here, not {hello.vocab_size}"
        return None


def _malformed(hello: Hello) -> str | None:
    if hello.protocol != PROTOCOL_VERSION:
        return f"protocol: {PROTOCOL_VERSION} is spoken here, not {hello.protocol}"
    for name in ("worker_id", "incarnation"):
        value = getattr(hello, name)
        if not (value and value.isprintable() and len(value.encode()) <= MAX_ID_BYTES):
            return f"{name}: 1 to {MAX_ID_BYTES} printable bytes are needed, got {value[:200]!r}"
    for name in _COUNTS:
        if not 1 <= getattr(hello, name) <= MAX_COUNT:
            return f"{name}: must be between 1 and {MAX_COUNT}, got {getattr(hello, name)}"
    if not 0 <= hello.num_swap_blocks <= MAX_COUNT:
        return f"num_swap_blocks: must be between 0 and {MAX_COUNT}, got {hello.num_swap_blocks}"
    if not 0 <= hello.swap_block_s < inf:
        return f"swap_block_s: must not be negative, got {hello.swap_block_s}"
    return None
