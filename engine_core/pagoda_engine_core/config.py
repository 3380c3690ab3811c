"""What an engine core can be told. One field is one option: flag, environment variable and YAML key derive from it."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_proto.options import option
from pagoda_proto.params import DEFAULT_MAX_TOKENS_PER_STEP


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    listen: str = option("", "gRPC address for gateways: unix:/path or host:port (loopback only without TLS)")
    worker_endpoint: str = option("", "ZMQ address for workers: ipc:///path or tcp://host:port (loopback only)")
    keys_dir: str = option("", "keys for links that leave the host, as `pagoda keygen` writes them")
    max_model_len: int = option(0, "longest prompt plus output; 0 takes the workers' own limit")
    max_tokens_per_step: int = option(DEFAULT_MAX_TOKENS_PER_STEP, "most tokens computed in one step of a worker")
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
    worker_lease_s: float = option(4.0, "a worker that hears nothing from the engine core for this long fences itself")
    worker_suspect_s: float = option(1.5, "without a beat for this long a worker gets no new work")
    worker_dead_s: float = option(3.0, "without a beat for this long a worker is dead")
    step_deadline_s: float = option(60.0, "a step running longer than this is hung and its worker dead")
    max_attempts: int = option(3, "worker losses a request may live through before it is failed")
    metrics_port: int = option(-1, "loopback port for Prometheus metrics; -1 is off, 0 picks a free one")

    def __post_init__(self) -> None:
        problems = []
        for name in ("max_tokens_per_step", "max_rows", "chunk_size", "max_steps_in_flight", "max_attempts"):
            if getattr(self, name) < 1:
                problems.append(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.speculation_tokens < 0:
            problems.append(f"speculation_tokens must not be negative, got {self.speculation_tokens}")
        if self.policy not in ("fcfs", "priority"):
            problems.append(f"policy must be fcfs or priority, got {self.policy!r}")
        if self.preemption not in ("auto", "swap", "recompute"):
            problems.append(f"preemption must be auto, swap or recompute, got {self.preemption!r}")
        if problems:
            raise ValueError("; ".join(problems))
