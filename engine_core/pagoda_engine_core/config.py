"""Options of an engine core. Each field is one option: flag, environment variable and YAML key derive from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

from pagoda_proto import times
from pagoda_proto.errors import Problem
from pagoda_proto.options import check, option
from pagoda_proto.params import DEFAULT_MAX_TOKENS_PER_STEP
from pagoda_proto.steps import MAX_STEPS_IN_FLIGHT

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    listen: str = option(
        "", "gRPC address for gateways: unix:/path or host:port (loopback only without keys)", required=True
    )
    worker_endpoint: str = option(
        "",
        "ZMQ address for workers: ipc:///path or tcp://host:port (loopback only without keys)",
        required=True,
    )
    keys_dir: str = option("", "keys for links between hosts, as written by `pagoda keygen`")
    alive_file: str = option("", "file to touch while the process works; for liveness probes")
    max_model_len: int = option(0, "maximum length of prompt plus output; 0: the workers' own limit", unset=0, least=2)
    max_tokens_per_step: int = option(
        DEFAULT_MAX_TOKENS_PER_STEP, "most tokens in one step of a worker", least=1, most=2**20
    )
    max_rows: int = option(256, "most choices running at once on a worker", least=1, most=2**20)
    chunk_size: int = option(512, "most prompt tokens of one choice in one step", least=1, most=2**24)
    prompt_step_s: float = option(
        0.1,
        "while streams run, prompts are cut into chunks so that a step takes about this long; 0: by tokens alone",
        most=3600.0,
    )
    speculation_tokens: int = option(
        16, "steps are filled up with draft tokens to this many tokens; 0: no drafts", most=65536
    )
    prefix_cache: bool = option(True, "reuse the KV blocks of equal prefixes")
    policy: str = option(
        "fcfs",
        "order of waiting requests: fcfs, priority, or fair (the tenant served least comes first)",
        words=("fcfs", "priority", "fair"),
    )
    preemption: str = option(
        "auto",
        "what to do if KV blocks run out: recompute, swap (while there is room), or auto (whichever is quicker)",
        words=("auto", "swap", "recompute"),
    )
    max_steps_in_flight: int = option(
        2, "most plans sent to a worker before the first result is back", least=1, most=MAX_STEPS_IN_FLIGHT
    )
    max_queued_requests: int = option(4096, "most requests waiting at once; more are refused as overload", least=1)
    max_queued_tokens: int = option(
        4_000_000, "most prompt tokens waiting at once; more are refused as overload", least=1, most=2**53
    )
    queue_timeout_s: float = option(120.0, "time after which a request that has not started is refused", most=1e9)
    worker_lease_s: float = option(
        times.WORKER_LEASE_S,
        "a worker that hears nothing from the engine core for this long stops computing",
        least=0.1,
    )
    worker_suspect_s: float = option(
        times.WORKER_SUSPECT_S, "a worker without a heartbeat for this long gets no new work", least=0.1
    )
    worker_dead_s: float = option(
        times.WORKER_DEAD_S, "a worker without a heartbeat for this long is considered dead", least=0.1
    )
    step_deadline_s: float = option(
        times.STEP_DEADLINE_S,
        "a step that runs for longer than this is considered hung, and its worker dead",
        least=0.1,
    )
    drain_timeout_s: float = option(
        times.ENGINE_CORE_DRAINS_S, "after SIGTERM, how long open requests may take to finish"
    )
    max_attempts: int = option(
        3, "a request fails after losing its worker this many times without a new token", least=1
    )
    metrics_port: int = option(
        -1,
        "port for Prometheus metrics; further engine cores of `pagoda serve` take the next; -1: off, 0: a free one",
        least=-1,
        most=65535,
    )
    metrics_host: str = option(LOOPBACK, "address that the metrics port listens on; it asks for no key")

    def __post_init__(self) -> None:
        check(self, chain(self._ladder_problems(), self._metrics_problems()))

    def patience_s(self, asked_s: float) -> float:
        """How long a new request may wait: as long as it asks for (0: no wish), at most `queue_timeout_s`."""
        return min(asked_s or self.queue_timeout_s, self.queue_timeout_s)

    def _metrics_problems(self) -> Iterator[Problem]:
        if self.metrics_host != LOOPBACK and self.metrics_port < 0:
            yield Problem(
                "metrics_host", f"metrics_host needs a metrics_port, got {self.metrics_host[:64]!a} without one"
            )

    def _ladder_problems(self) -> Iterator[Problem]:
        """Each timeout must exceed the longest duration of what it waits for (see `pagoda_proto.times`)."""
        rungs = ("worker_suspect_s", "worker_dead_s", "worker_lease_s", "step_deadline_s")
        for first, then in pairwise(rungs):
            if 0 < getattr(self, then) <= getattr(self, first):  # its own check reports a bad value
                values = f"{getattr(self, first)} and {getattr(self, then)}"
                yield Problem(first, f"{first} must be below {then}, got {values}")
