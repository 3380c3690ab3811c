"""One engine core serves one model with one numerics: its first worker decides which workers may join later.

The model and its limits hold for the life of the engine core, because accepted requests were checked against them. The
numerics hold while any worker is alive, and then while a request that has begun waits for a worker with the numerics it
began with, so that a replay on another worker yields the same tokens.

A process may register repeatedly. Only its newest registration counts, so a delayed Hello cannot end a life that began
after it was sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import inf

from pagoda_proto.channel import MAX_ID_BYTES
from pagoda_proto.params import ModelLimits
from pagoda_proto.pooling.params import OUTPUTS
from pagoda_proto.steps import MAX_KV_GROUPS, MAX_STEPS_IN_FLIGHT, SPOKEN, Hello, Refused, Versions

MAX_COUNT = 2**31 - 1
MAX_REMEMBERED_PROCESSES = 1024
_COUNTS = (
    "registration", "vocab_size", "max_model_len", "block_size", "max_rows",
    "max_tokens_per_step",
)  # fmt: skip


class Registry:
    """Checks registrations and grants epochs. `spoken` are the protocol versions supported here."""

    def __init__(self, max_model_len: int = 0, spoken: Versions = SPOKEN) -> None:
        self._spoken = spoken
        self._asked_model_len = max_model_len
        self._granted = 0
        self._newest: OrderedDict[str, tuple[int, bool]] = OrderedDict()  # registration, whether admitted
        self._refused_numerics = ""
        self._numerics_id = ""  # required while no worker is alive
        self.model_fingerprint = ""
        self.limits: ModelLimits | None = None

    def hold(self, numerics_id: str) -> str:
        """While no worker is alive, admit only workers with these numerics, or any with "". Returns the numerics of a
        worker refused for that."""
        if not numerics_id:
            self._refused_numerics = ""
        self._numerics_id = numerics_id
        return self._refused_numerics

    def is_stale(self, hello: Hello) -> bool:
        """Whether this registration was admitted before, or its process has registered again since."""
        newest, admitted = self._newest.get(hello.incarnation, (0, False))
        return hello.registration < newest or (admitted and hello.registration == newest)

    def refusal(self, hello: Hello, alive: Iterable[Hello]) -> Refused | None:
        """Why this worker may not join, or None. `alive` are the workers admitted now, except this one."""
        problem = self._other_protocol(hello) or _malformed(hello) or self._other_model(hello)
        if problem is not None:
            return Refused(reason=problem, final=True)
        self._remember(hello, admitted=False)
        alive = tuple(alive)
        if any(other.worker_id == hello.worker_id for other in alive):
            return Refused(reason=f"duplicate_id: a worker named {hello.worker_id!r} is alive")
        needed = alive[0].numerics_id if alive else self._numerics_id
        if needed not in ("", hello.numerics_id):
            self._refused_numerics = hello.numerics_id
            who = "live workers compute" if alive else "requests that have begun wait for a worker that computes"
            return Refused(
                reason=f"numerics_id: {who} as {needed!r}, this one as {hello.numerics_id!r}; "
                f"a request moved between them would not continue with the same tokens"
            )
        return None

    def grant(self, hello: Hello) -> int:
        """Admit the worker. Returns its epoch, higher than all before."""
        if self.limits is None:
            self.model_fingerprint = hello.model_fingerprint
            self.limits = ModelLimits(hello.vocab_size, self._asked_model_len or hello.max_model_len)
        self._granted += 1
        self._numerics_id = hello.numerics_id
        self._remember(hello, admitted=True)
        return self._granted

    def _remember(self, hello: Hello, *, admitted: bool) -> None:
        self._newest[hello.incarnation] = (hello.registration, admitted)
        self._newest.move_to_end(hello.incarnation)
        if len(self._newest) > MAX_REMEMBERED_PROCESSES:
            self._newest.popitem(last=False)

    def _other_protocol(self, hello: Hello) -> str | None:
        if self._spoken.agreed(hello.spoken) is not None:
            return None
        return f"protocol: {self._spoken} is spoken here, not {hello.spoken}"

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
    for name in ("worker_id", "incarnation", "device"):
        value = getattr(hello, name)
        if not (value and value.isprintable() and len(value.encode()) <= MAX_ID_BYTES):
            return f"{name}: 1 to {MAX_ID_BYTES} printable bytes are needed, got {value[:200]!r}"
    for name in _COUNTS:
        if not 1 <= getattr(hello, name) <= MAX_COUNT:
            return f"{name}: must be between 1 and {MAX_COUNT}, got {getattr(hello, name)}"
    if not 0 <= hello.pooled_width <= MAX_COUNT:
        return f"pooled_width: must be between 0 and {MAX_COUNT}, got {hello.pooled_width}"
    if not 0 <= hello.start_s < inf:
        return f"start_s: must not be negative, got {hello.start_s}"
    return _bad_groups(hello) or _no_reader(hello)


def _bad_groups(hello: Hello) -> str | None:
    """Checks each group and the totals, because all groups share one range of block ids."""
    if len(hello.kv_groups) > MAX_KV_GROUPS:
        return f"kv_groups: at most {MAX_KV_GROUPS}, got {len(hello.kv_groups)}"
    for group in hello.kv_groups:
        for name, least in (("num_blocks", 1), ("kept", 0), ("num_swap_blocks", 0)):
            if not least <= getattr(group, name) <= MAX_COUNT:
                return f"{name}: must be between {least} and {MAX_COUNT}, got {getattr(group, name)}"
        if not 0 <= group.swap_block_s < inf:
            return f"swap_block_s: must not be negative, got {group.swap_block_s}"
        if group.room_in_flight(hello.block_size, hello.max_model_len) < MAX_STEPS_IN_FLIGHT:
            return f"kv_groups: {group.num_blocks} blocks do not hold {group.kept} tokens and a step"
    for name in ("num_blocks", "num_swap_blocks"):
        if getattr(hello, name) > MAX_COUNT:
            return f"{name}: must be between 0 and {MAX_COUNT}, got {getattr(hello, name)}"
    return None


def _no_reader(hello: Hello) -> str | None:
    if not (hello.num_blocks or hello.pools):
        return "num_blocks: a worker that generates keeps K and V, and has none"
    if not set(hello.pools) <= set(OUTPUTS):
        return f"pools: must be of {', '.join(OUTPUTS)}, got {', '.join(hello.pools)[:200]!r}"
    return None
