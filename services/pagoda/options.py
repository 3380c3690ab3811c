"""The options that belong to no tier: what `pagoda serve` itself, a process's log, and a supervised child are told."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_proto.options import option

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    config: str = option("", "YAML file with options; a key is an option's name")
    log_level: str = option("info", "least severe messages to log: debug, info, warning or error")
    log_json: bool = option(False, "log one JSON object per line")

    def __post_init__(self) -> None:
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    workers: int = option(1, "worker processes on this machine; they share its cores, and each takes a GPU of its own")
    data_dir: str = option("", "directory for run-time files (sockets); the user's runtime directory when empty")

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 64:
            raise ValueError(f"workers must be between 1 and 64, got {self.workers}")


@dataclass(frozen=True, kw_only=True)
class ModelSourceConfig:
    revision: str = option("", "branch, tag or commit of a hub model; the default branch when empty")


@dataclass(frozen=True, kw_only=True)
class ChildConfig:
    """Set by the supervisor, not by people."""

    status_fd: int = option(-1, "file descriptor for status events, one JSON object per line; -1 is none")
    parent_pid: int = option(0, "die when this parent is gone; 0 is not to care")
