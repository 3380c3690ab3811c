"""What an engine core can be told. One field is one option: flag, environment variable and YAML key derive from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise

from pagoda_proto import times
from pagoda_proto.options import option

MAX_PORT = 65_535
_LEAST = {"max_model_len": 0, "speculation_tokens": 0, "metrics_port": -1}  # of the whole numbers; 1 of the others


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    listen: str = option("", "gRPC address for gateways: unix:/path or host:port (loopback only without TLS)")
    worker_endpoint: str = option("", "ZMQ address for workers: ipc:///path or tcp://host:port (loopback only)")
    keys_dir: str = option("", "keys for links that leave the host, as `pagoda keygen` writes them")
    max_model_len: int = option(0, "longest prompt plus output; 0 takes the workers' own limit")
    max_tokens_per_step: int = option(2048, "most tokens computed in one step of a worker")
    max_rows: int = option(256, "most choices running at once on a worker")
    chunk_size: int = option(512, "most prompt tokens of one choice computed in one step")
    speculation_tokens: int = option(16, "steps are filled with drafts up to this many tokens; 0 allows no drafts")
    prefix_cache: bool = option(True, "reuse the KV blocks of equal prefixes")
    policy: str = option("fcfs", "order of waiting requests: fcfs or priority")
    preemption: str = option("auto", "where KV blocks run out: recompute, swap while there is room, auto: the quicker")
    max_steps_in_flight: int = option(2, "plans sent to a worker before the first result is back")
    max_queued_requests: int = option(4096, "requests waiting at once; more are refused as overloaded")
    max_queued_tokens: int = option(4_000_000, "prompt tokens waiting at once; more are refused as overloaded")
    queue_timeout_s: float = option(120.0, "a request that could not start after this long is refused")
    worker_lease_s: float = option(
        times.WORKER_LEASE_S, "a worker that hears nothing from the engine core for this long fences itself"
    )
    worker_suspect_s: float = option(times.WORKER_SUSPECT_S, "without a beat for this long a worker gets no new work")
    worker_dead_s: float = option(times.WORKER_DEAD_S, "without a beat for this long a worker is dead")
    step_deadline_s: float = option(
        times.STEP_DEADLINE_S, "a step running longer than this is hung and its worker dead"
    )
    max_attempts: int = option(3, "losses of its worker without a new token after which a request is failed")
    metrics_port: int = option(-1, "loopback port for Prometheus metrics; -1 is off, 0 picks a free one")

    def __post_init__(self) -> None:
        problems = [*self._number_problems(), *self._ladder_problems()]
        if self.policy not in ("fcfs", "priority"):
            problems.append(f"policy must be fcfs or priority, got {self.policy!r}")
        if self.preemption not in ("auto", "swap", "recompute"):
            problems.append(f"preemption must be auto, swap or recompute, got {self.preemption!r}")
        if problems:
            raise ValueError("; ".join(problems))

    def _number_problems(self) -> Iterator[str]:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not value > 0:  # also what is no number
                yield f"{field.name} must be above 0, got {value}"
            elif isinstance(value, int) and not isinstance(value, bool) and value < _LEAST.get(field.name, 1):
                yield f"{field.name} must be at least {_LEAST.get(field.name, 1)}, got {value}"
        if self.metrics_port > MAX_PORT:
            yield f"metrics_port must be at most {MAX_PORT}, got {self.metrics_port}"

    def _ladder_problems(self) -> Iterator[str]:
        """Whoever waits, waits longer than what it waits for can take (see `pagoda_proto.times`)."""
        rungs = ("worker_suspect_s", "worker_dead_s", "worker_lease_s", "step_deadline_s")
        for first, then in pairwise(rungs):
            if not getattr(self, first) < getattr(self, then):
                yield f"{first} must be below {then}, got {getattr(self, first)} and {getattr(self, then)}"
