"""The options that belong to no tier: those of `pagoda serve` itself, of a process's log, and of a supervised child."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagoda_proto.errors import Problem
from pagoda_proto.options import check, option

LOG_LEVELS = ("debug", "info", "warning", "error")
WORKERS_PER_ENGINE_CORE = 12  # whose steps one engine core plans without any of them waiting (decision 17)


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    config: str = option("", "YAML file with options, keyed by their names")
    log_level: str = option("info", "least severe messages to log: debug, info, warning or error", words=LOG_LEVELS)
    log_json: bool = option(False, "log one JSON object per line")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    workers: int = option(
        1,
        "worker processes to start; they share this machine's cores, and each takes a GPU of its own",
        least=1,
        most=64,
    )
    engine_cores: int = option(
        0, f"engine cores to start, which share the workers; 0: one for every {WORKERS_PER_ENGINE_CORE}", most=64
    )
    data_dir: str = option("", "directory for run-time files (sockets); empty: the user's runtime directory")

    def __post_init__(self) -> None:
        check(self, self._problems())

    @property
    def num_engine_cores(self) -> int:
        return self.engine_cores or -(-self.workers // WORKERS_PER_ENGINE_CORE)

    def _problems(self) -> Iterator[Problem]:
        if self.engine_cores > self.workers > 0:
            yield Problem(
                "engine_cores", f"engine_cores must be at most workers ({self.workers}), got {self.engine_cores}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelSourceConfig:
    revision: str = option("", "branch, tag or commit of a hub model; empty: the default branch")


@dataclass(frozen=True, kw_only=True)
class ChildConfig:
    """Set by the supervisor, not by people."""

    status_fd: int = option(-1, "file descriptor for status events, one JSON object per line; -1: none", least=-1)
    parent_pid: int = option(0, "exit when this parent process is gone; 0: never")
    listen_fd: int = option(
        -1, "bound socket for the gateway to listen on, instead of host and port; -1: none", least=-1
    )

    def __post_init__(self) -> None:
        check(self)
